"""Walks folders that an untrusted program filled: of any depth, modes and names, following no link.

The standard library's own walks recurse, open by path, and skip folders without rights.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MIN_BYTES = 4096
"""Size of the smallest file, with what the file system keeps of it."""


class Entry(NamedTuple):
    """A file, link or folder below the root."""

    folder: int
    """Descriptor of the folder that holds it, until the walk goes on."""
    name: str
    found: os.stat_result
    parents: tuple[str, ...]

    @property
    def is_folder(self) -> bool:
        """True for a folder, false for a link to one."""
        return stat.S_ISDIR(self.found.st_mode)

    def remove(self) -> None:
        """Remove a file, a link or an empty folder."""
        (os.rmdir if self.is_folder else os.unlink)(self.name, dir_fd=self.folder)


class _Level(NamedTuple):
    name: str
    found: os.stat_result
    names: list[str]


def walk(root: str | os.PathLike[str], *, unlocks: bool = False) -> Iterator[Entry]:
    """Yield all that is below `root`; a folder comes after its contents.

    A folder that is moved meanwhile ends the walk: it never leaves `root`.

    Args:
        unlocks: give this user all rights to the folders; no other process may use them then.

    Raises:
        OSError: `root` is no folder.
    """
    if unlocks:
        with suppress(OSError):
            os.chmod(root, 0o700)
    folder = os.open(root, _FOLDER)
    levels: list[_Level] = []
    parents: tuple[str, ...] = ()
    try:
        levels.append(_Level("", os.fstat(folder), os.listdir(folder)))
        while True:
            level = levels[-1]
            if level.names:
                name = level.names.pop()
                try:
                    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
                except OSError:  # Removed meanwhile.
                    continue
                below = _enter(folder, name, found, unlocks)
                if below is None:
                    yield Entry(folder, name, found, parents)
                    continue
                os.close(folder)
                folder = below
                levels.append(_Level(name, found, os.listdir(folder)))
                parents = (*parents, name)
            else:
                levels.pop()
                if not levels:
                    return
                above = os.open("..", _FOLDER, dir_fd=folder)
                os.close(folder)
                folder = above
                if not os.path.samestat(os.fstat(folder), levels[-1].found):
                    return
                parents = parents[:-1]
                yield Entry(folder, level.name, level.found, parents)
    finally:
        os.close(folder)


def remove(root: str | os.PathLike[str]) -> OSError | None:
    """Remove a folder that nobody uses any more; return why a part is left, None: nothing is."""
    left: OSError | None = None
    try:
        for entry in walk(root, unlocks=True):
            try:
                entry.remove()
            except FileNotFoundError:
                pass
            except OSError as error:
                left = left or error
        os.rmdir(root)
    except FileNotFoundError:
        return left
    except OSError as error:
        return left or error
    return None


def used_bytes(root: str | os.PathLike[str]) -> int:
    """Disk that the files below `root` take; each counts 4 KiB at least.

    Raises:
        OSError: `root` is no folder.
    """
    return sum(
        max(_MIN_BYTES, entry.found.st_blocks * 512 // max(1, entry.found.st_nlink))
        for entry in walk(root)
    )


def _enter(folder: int, name: str, found: os.stat_result, unlocks: bool) -> int | None:
    """A descriptor of the folder `name`; None for files, and folders that cannot be read."""
    if not stat.S_ISDIR(found.st_mode):
        return None
    if unlocks and found.st_mode & 0o700 != 0o700:
        with suppress(OSError):
            os.chmod(name, 0o700, dir_fd=folder)
    try:
        return os.open(name, _FOLDER, dir_fd=folder)
    except OSError:
        return None
