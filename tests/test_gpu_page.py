"""docs/gpu.md names the tests that hold what a reading found."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/gpu.md").read_text()


def test_every_test_that_the_page_names_is_there() -> None:
    """A test that was renamed would hold nothing."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 15
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text())
        assert name in {node.name for node in ast.walk(tree) if hasattr(node, "name")}, (path, name)


def test_every_row_of_the_reading_has_a_test_or_a_reason() -> None:
    """C1 to C9 and L1 to L12."""
    rows = {
        row[0]: row[3]
        for line in PAGE.splitlines()
        if len(row := [cell.strip() for cell in line.strip("|").split("|")]) == 4
    }
    wanted = [f"C{n}" for n in range(1, 10)] + [f"L{n}" for n in range(1, 13)]
    assert [name for name in rows if name in wanted] == wanted
    for name in wanted:
        assert re.search(r"::test_|no test: |measured above|make test", rows[name]), name
