"""Finds and imports code of the user, by package.module:name, and reads what it raises.

A wrong path raises a SettingsError with one line that says what to change.
"""

from __future__ import annotations

import difflib
import importlib
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from outloop.buffer.errors import SettingsError
from outloop.buffer.foreign_text import storable


def text_of(error: BaseException) -> str:
    """The text of an exception, which its own class may fail to give; it can be encoded."""
    try:
        text = str(error)
    except Exception as raised:  # noqa: BLE001 - the user's class may raise anything
        text = f"(its __str__ raised {type(raised).__name__})"
    return storable(text)


def import_folders(import_dir: Path | None) -> tuple[Path, ...]:
    """The folders of user code and task files: the working directory, then `import_dir`."""
    folders = [Path.cwd()]
    if import_dir is not None and import_dir.resolve() != folders[0]:
        folders.append(import_dir.resolve())
    return tuple(folders)


def import_object(path: str, *, setting: str, import_dir: Path | None) -> Any:
    """Import the object `package.module:name`.

    The folders of `import_folders` come before installed packages in `sys.path`, and after Python's
    own modules: a file of the user's cannot take the place of one of these.

    Raises:
        SettingsError: no such module or name (the nearest is named), or the import raised.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise SettingsError(
            f"{setting}={path!r} is not package.module:function; "
            f"for example {setting}='rollout:play'"
        )
    folders = import_folders(import_dir)
    for folder in reversed(folders):
        if str(folder) not in sys.path:
            sys.path.insert(_after_standard_library(), str(folder))
    try:
        target = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _import_raised(path, setting, error, folders) from error
        where = ", ".join(str(folder) for folder in folders)
        near = nearest(module_name, [p.stem for folder in folders for p in folder.glob("*.py")])
        raise SettingsError(
            f"{setting}={path!r}: there is no module {error.name!r} in {where} or among the "
            f"installed packages; {near}give package.module:function as you would import it there"
        ) from error
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise _import_raised(path, setting, error, folders) from error
    for part in name.split("."):
        if not hasattr(target, part):
            known = [key for key, value in vars(target).items() if callable(value)]
            raise SettingsError(
                f"{setting}={path!r}: {getattr(target, '__name__', module_name)!r} has no "
                f"{part!r}; {nearest(part, known)}put the function's name after the colon"
                f"{_shadow_hint(folders)}"
            )
        target = getattr(target, part)
    return target


def _after_standard_library() -> int:
    """The index in `sys.path` behind Python's own modules."""
    own = sysconfig.get_path("stdlib")
    packages = ("site-packages", "dist-packages")
    found = [
        index
        for index, folder in enumerate(sys.path)
        if folder.startswith(own) and not folder.endswith(packages)
    ]
    return found[-1] + 1 if found else 0


def _shadow_hint(folders: Iterable[Path]) -> str:
    """Names the user's files that cannot be imported, because Python has a module of the name."""
    files = [
        file.name
        for folder in folders
        for file in sorted(folder.glob("*.py"))
        if file.stem in sys.stdlib_module_names
    ]
    if not files:
        return ""
    return (
        f". Python has modules of the names of {', '.join(files)}, which are imported in their "
        "place: give these files other names"
    )


def _import_raised(
    path: str, setting: str, error: BaseException, folders: Iterable[Path]
) -> SettingsError:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    text = " ".join(text_of(error).split())
    return SettingsError(
        f"{setting}={path!r}: importing it raised {type(error).__name__}{place}: {text}; "
        "make `import` of the module work on its own, and try again"
        f"{_shadow_hint(folders)}"
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """A question that names the known name most like `name`; empty where none is."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]!r}? " if near else ""
