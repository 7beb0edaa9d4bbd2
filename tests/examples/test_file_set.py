"""Every example has the same files, so that who knows one knows them all."""

import ast
import tomllib
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FOLDERS = sorted(path.parent.name for path in EXAMPLES.glob("*/run.toml"))


@pytest.mark.parametrize("name", FOLDERS)
def test_an_example_has_its_files(name: str) -> None:
    """Settings, a page, the agent, how it is played, what an answer is worth, and tasks."""
    folder = EXAMPLES / name
    for file in ("README.md", "run.toml", "agent.py", "rollout.py", "verifier.py"):
        assert (folder / file).is_file(), file
    assert (folder / "tasks.py").is_file() or (folder / "tasks.jsonl").is_file()
    page = (folder / "README.md").read_text()
    for file in folder.glob("*.py"):
        assert f"`{file.name}`" in page, f"{file.name} is not in the page's table"
    tomllib.loads((folder / "run.toml").read_text())
    played = {node.name for node in ast.parse((folder / "rollout.py").read_text()).body
              if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}  # fmt: skip
    assert "play" in played
