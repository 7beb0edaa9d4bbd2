"""Finds the files that belong to an agent command: those it names, and the modules they import.

Python modules are found by their import statements, JavaScript modules by theirs, a command's
packages by the folder node_modules. Whatever else an agent opens is named in env.agent_read_only.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

_SCRIPT = re.compile(r"""(?:from|import|require\()\s*\(?\s*["'](\.{1,2}/[^"']+)["']""")
_ENDINGS = ("", ".mjs", ".js", ".cjs", ".ts", ".mts", ".json", "/index.js", "/index.mjs")
_MANIFESTS = ("package.json", "tsconfig.json", "node_modules")
_MAX_SOURCE_BYTES = 4 * 2**20


def own_files(words: Sequence[str], folders: Sequence[Path], home: Path) -> list[Path]:
    """The files and folders that a command names below `folders` or by full path, and imports.

    Args:
        words: of the command; the text of `sh -c` is looked through too.
        folders: where the user's code is looked for.
        home: the value of {project_dir}, and where modules (`python -m`) are looked for.
    """
    found: dict[Path, None] = {}
    for text in _texts(words):
        full = Path(text.replace("{project_dir}", str(home)))
        if "{" in str(full) or not ("/" in text or "." in text):
            continue
        for path in (Path(os.path.abspath(folder / full)) for folder in folders):
            above = (*folders, Path.home())
            if path.exists() and not any(one.is_relative_to(path.resolve()) for one in above):
                _add(path, folders, found)
                break
    for name in _modules(words):
        for path in _module_files(name, (home,)):
            _add(path, folders, found)
    return list(found)


def _texts(words: Iterable[str]) -> Iterator[str]:
    """The words, the values of options, and the words in a shell's command."""
    for word in words:
        yield word
        if "=" in word:
            yield word.partition("=")[2]
        if " " in word:
            try:
                yield from _texts(shlex.split(word.replace(";", " ")))
            except ValueError:
                continue


def _modules(words: Sequence[str]) -> list[str]:
    texts = [*_texts(words)]
    return [name for option, name in pairwise(texts) if option == "-m"]


def _add(path: Path, folders: Sequence[Path], found: dict[Path, None]) -> None:
    """Add a path, and what it imports."""
    waiting = [path]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found[path] = None
        if path.suffix == ".py":
            waiting += _imported_by_python(path, folders)
        elif path.suffix in (".js", ".mjs", ".cjs", ".ts", ".mts"):
            waiting += _imported_by_javascript(path, folders)


def _imported_by_python(path: Path, folders: Sequence[Path]) -> Iterator[Path]:
    try:
        tree = ast.parse(_source(path))
    except (SyntaxError, ValueError, RecursionError):  # The agent will say so itself.
        return
    roots = (path.parent, path.resolve().parent, *folders)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield from _module_files(name.name, roots)
        elif isinstance(node, ast.ImportFrom):
            where: Sequence[Path] = roots
            if node.level:
                where = (path.parents[min(node.level, len(path.parents)) - 1],)
            if node.module:
                yield from _module_files(node.module, where)
            for name in node.names:
                yield from _module_files(".".join(filter(None, (node.module, name.name))), where)


def _module_files(name: str, roots: Sequence[Path]) -> Iterator[Path]:
    """The files that importing a module of the user's reads: its own, and its packages'."""
    parts = name.split(".")
    for root in roots:
        if not any((root / f"{parts[0]}{end}").exists() for end in ("", ".py")):
            continue
        for count in range(1, len(parts) + 1):
            base = root.joinpath(*parts[:count])
            for path in (base.with_name(f"{base.name}.py"), base / "__init__.py"):
                if path.is_file():
                    yield path
        main = root.joinpath(*parts, "__main__.py")
        if main.is_file():
            yield main
        return


def _imported_by_javascript(path: Path, folders: Sequence[Path]) -> Iterator[Path]:
    for name in _SCRIPT.findall(_source(path)):
        for end in _ENDINGS:
            target = path.parent / f"{name}{end}"
            if target.is_file():
                yield Path(os.path.abspath(target))
                break
    for folder in path.parents:
        if any(folder.is_relative_to(one) for one in folders):
            yield from (folder / name for name in _MANIFESTS if (folder / name).exists())


def _source(path: Path) -> str:
    try:
        with path.open(errors="replace") as file:
            return file.read(_MAX_SOURCE_BYTES)
    except OSError:
        return ""
