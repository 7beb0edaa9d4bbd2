"""The example of docs/sandbox.md."""

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[3] / "docs"


async def test_the_example_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    """It runs as it stands, and its comment is its output."""
    text = (DOCS / "sandbox.md").read_text()
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    space: dict[str, Any] = {}
    exec(found[1], space)
    await space["play"]()
    assert "exited 0 b'42\\n'" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("page", ["sandbox.md", "verifiers.md"])
def test_modules_and_names_of_the_pages_exist(page: str) -> None:
    """Every import of an example can be made."""
    for line in re.findall(r"^from outloop.*$", (DOCS / page).read_text(), re.MULTILINE):
        exec(line, {})
