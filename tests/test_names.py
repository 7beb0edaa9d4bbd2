"""Names say something, and tests use only those that are public."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("router", "engine", "buffer", "envs", "examples", "src/outloop")
BANNED_NAMES = {"utils", "common", "helpers", "misc", "legacy", "patches"}
PATCHERS = {"monkeypatch.setattr", "monkeypatch.delattr", "setattr", "delattr"}


def test_no_module_has_a_name_that_says_nothing() -> None:
    """Nothing is called utils, common, helpers, misc, legacy or patches."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    files = [path.relative_to(ROOT) for path in found]
    assert len(files) > 100
    assert not [path for path in files if {path.stem, *path.parts} & BANNED_NAMES]


@pytest.mark.medium
def test_tests_use_no_private_name_of_ours_and_patch_nothing_of_ours() -> None:
    """They use public names, and pass in what they want another to use."""
    ours = {
        name
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for name in private_names(ast.parse(path.read_text()))
    }
    assert len(ours) > 1000
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        file = str(path.relative_to(ROOT))
        for line, what in uses_of(ast.parse(path.read_text()), ours):
            found.append(f"{file}:{line}: {what}")
    assert not found, "\n".join(found)


def test_uses_of_private_names_are_found() -> None:
    """Attributes, imports and patches; not a test's own names, nor those of libraries."""
    text = """
from unittest import mock
from outloop.router.app import _pattern, create_app
class Own:
    def __init__(self):
        self._own = 1
    def same(self, other):
        return self._client is other._own
reader._client
os._exit(1)
monkeypatch.setattr(sys, "path", [])
monkeypatch.setattr(reader, "take", None)
setattr(loop, name, None)
tapped("outloop.engine.train.loop:RlLoop._update")
"""
    found = [what for _, what in uses_of(ast.parse(text), {"_client", "_own", "_pattern"})]
    assert sorted(found) == [
        "'outloop.engine.train.loop:RlLoop._update'",
        "from outloop.router.app import _pattern, create_app",
        "from unittest import mock",
        "monkeypatch.setattr(reader, 'take', None)",
        "reader._client",
        "setattr(loop, name, None)",
    ]


DOORS = {"buffer/terminal.py", "buffer/rich_terminal.py"}
"""The modules through which text reaches a terminal."""


def test_text_reaches_a_terminal_through_one_door() -> None:
    """What a policy, an agent or a file wrote is no markup there, and no terminal obeys it."""
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            file = str(path.relative_to(ROOT))
            if file in DOORS or file.startswith(("examples/", "src/outloop/project/files/")):
                continue
            found += [f"{file}:{line}: {what}" for line, what in writes_of(path.read_text())]
    assert not found, "use outloop.buffer.terminal or rich_terminal:\n" + "\n".join(found)


def test_other_ways_to_a_terminal_are_found() -> None:
    """By rich and by click."""
    text = """
from rich.table import Table
import rich.text
from rich import print
from rich.progress import BarColumn, TextColumn
console.print(f"warning: {warning}", style="yellow")
click.echo(text)
click.secho(text, bold=True)
echo(text)
show(console, text)
"""
    assert [line for line, _ in writes_of(text)] == [2, 3, 4, 5, 6, 7, 8]


def writes_of(text: str) -> Iterator[tuple[int, str]]:
    """Uses of rich's and click's own ways to a terminal: line and text."""
    banned = {"table", "text", "markup", "print", "print_json", "panel", "TextColumn", "Table"}
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] == "rich":
                names = {*module.split("."), *(one.name for one in node.names)}
                is_banned = bool(names & banned)
            case ast.Import(names=names):
                is_banned = any(one.name.partition(".")[0] == "rich" for one in names)
            case ast.Call(func=ast.Attribute(attr="print")):
                is_banned = True
            case ast.Call(func=ast.Attribute(value=ast.Name("click"), attr="echo" | "secho")):
                is_banned = True
            case _:
                is_banned = False
        if is_banned:
            yield node.lineno, ast.unparse(node)


def private_names(tree: ast.AST) -> set[str]:
    """Of functions, classes, attributes and variables that are made in `tree`."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store()):
                names.add(name)
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def uses_of(tree: ast.AST, ours: set[str]) -> Iterator[tuple[int, str]]:
    """(line, what) of each use of a private name of `ours`, and of each patch."""
    theirs = ours - private_names(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(attr=name) if name in theirs:
                yield node.lineno, ast.unparse(node)
            case ast.Constant(value=str(text)) if re.match(r"outloop\..*[.:]_[a-z]", text):
                yield node.lineno, ast.unparse(node)
            case ast.ImportFrom(module="unittest.mock" | "unittest"):
                yield node.lineno, ast.unparse(node)
            case ast.ImportFrom(names=names) if any(one.name in theirs for one in names):
                yield node.lineno, ast.unparse(node)
            case ast.Call(func=called, args=[target, *_]) if ast.unparse(called) in PATCHERS:
                if ast.unparse(target) != "sys":
                    yield node.lineno, ast.unparse(node)
