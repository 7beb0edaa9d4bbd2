"""Size limits of DESIGN: files, functions, and folder names that hide things."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("router", "engine", "buffer", "envs", "examples", "src/outloop")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
BANNED_NAMES = {"utils", "common", "helpers", "misc", "legacy", "patches"}


def _source_files() -> list[Path]:
    own = [p for f in FOLDERS for p in (ROOT / f).rglob("*.py") if not p.is_symlink()]
    return [p for p in own if "src/outloop/" not in str(p) or p.parent == ROOT / "src/outloop"]


def test_files_fit_in_the_limit() -> None:
    """No source file is longer than 400 lines."""
    files = _source_files()
    assert len(files) > 20
    long = {
        str(p.relative_to(ROOT)): n for p in files if (n := len(p.read_text().split("\n"))) > 401
    }
    assert not long


def test_functions_fit_in_the_limit() -> None:
    """No function is longer than 60 lines."""
    long = []
    for path in _source_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    long.append(f"{path.relative_to(ROOT)}:{node.name} {length}")
    assert not long


def test_no_module_has_a_name_that_says_nothing() -> None:
    """Nothing is called utils, common, helpers, misc, legacy or patches."""
    assert not [p for p in _source_files() if {p.stem, *p.parts} & BANNED_NAMES]


def test_every_module_says_what_it_owns() -> None:
    """Every non-empty module of the parts opens with owns, does not own, invariant."""
    silent = []
    for path in _source_files():
        text = path.read_text()
        if not text.strip() or "examples" in path.parts:
            continue
        doc = " ".join((ast.get_docstring(ast.parse(text)) or "").split())
        if not all(word in doc for word in ("Owns:", "not own:", "Invariant:")):
            silent.append(str(path.relative_to(ROOT)))
    assert not silent
