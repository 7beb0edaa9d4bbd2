"""No module or folder has a name that says nothing."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("router", "engine", "buffer", "envs", "examples", "src/outloop")
BANNED_NAMES = {"utils", "common", "helpers", "misc", "legacy", "patches"}


def test_no_module_has_a_name_that_says_nothing() -> None:
    """Nothing is called utils, common, helpers, misc, legacy or patches."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    files = [path.relative_to(ROOT) for path in found]
    assert len(files) > 100
    assert not [path for path in files if {path.stem, *path.parts} & BANNED_NAMES]
