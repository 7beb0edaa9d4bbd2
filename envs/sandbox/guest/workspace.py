"""Files in a folder that a hostile program may have filled.

Symbolic links are not followed, only regular files are read, and no read blocks or returns more
than its limit.
"""

from __future__ import annotations

import os
import stat

_MAX_DEPTH = 64
"""Folders in folders that are listed; deeper ones are left out."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def write_file(root: str, path: str, data: bytes, mode: int) -> None:
    """Write `path` below `root`, replacing links and files on the way.

    Raises:
        OSError: the disk is full, or a folder has the file's name.
    """
    parts = _parts(path)
    folder = os.open(root, _FOLDER)
    try:
        for part in parts[:-1]:
            folder = _enter(folder, part)
        try:
            os.unlink(parts[-1], dir_fd=folder)
        except FileNotFoundError:
            pass
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(parts[-1], flags, mode, dir_fd=folder)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(file, view) :]
        finally:
            os.close(file)
    finally:
        os.close(folder)


def read_file(root: str, path: str, max_bytes: int) -> bytes | None:
    """The content of `path` below `root`; None if it is no regular file of at most `max_bytes`."""
    parts = _parts(path)
    folder = os.open(root, _FOLDER)
    try:
        for part in parts[:-1]:
            below = os.open(part, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = below
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(parts[-1], flags, dir_fd=folder)
    except OSError:
        return None
    finally:
        os.close(folder)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_size > max_bytes:
            return None
        data = b""
        while chunk := os.read(file, found.st_size + 1 - len(data)):
            data += chunk
        return data
    finally:
        os.close(file)


class Entry:
    """A file, folder or symbolic link: `kind`, path below the root, mode, size, and a target."""

    def __init__(self, kind: str, path: str, mode: int, size: int = 0, target: str = "") -> None:
        self.kind = kind
        self.path = path
        self.mode = mode
        self.size = size
        self.target = target


def list_below(root: str, names: list[str], *, opens_all: bool = False) -> list[Entry]:
    """List the files, folders and links among and below `names`, folders before their content.

    Left out are devices, FIFOs and sockets, links that lead out of `root`, and depths over 64.

    Args:
        names: paths below the root; "." is all of it.
        opens_all: makes files and folders readable for their owner, who has to call this. Entries
            have the modes that they had before.
    """
    found: list[Entry] = []
    for name in names:
        parts = [part for part in name.split("/") if part not in ("", ".")]
        folder = os.open(root, _FOLDER)
        try:
            for part in parts[:-1]:
                below = os.open(part, _FOLDER, dir_fd=folder)
                os.close(folder)
                folder = below
            if parts:
                _list(root, folder, parts, found, opens_all)
            else:
                _list_folder(root, folder, parts, found, opens_all)
        except OSError:
            pass  # It is not there, or a link leads to it.
        finally:
            os.close(folder)
    return found


def _list(root: str, folder: int, parts: list[str], found: list[Entry], opens_all: bool) -> None:
    """List the last of `parts`, which is in `folder`, and what is below it."""
    name, path = parts[-1], "/".join(parts)
    about = os.stat(name, dir_fd=folder, follow_symlinks=False)
    mode = stat.S_IMODE(about.st_mode) & 0o777
    needed = 0o700 if stat.S_ISDIR(about.st_mode) else 0o400
    if opens_all and mode & needed != needed and not stat.S_ISLNK(about.st_mode):
        os.chmod(name, mode | needed, dir_fd=folder)
    if stat.S_ISLNK(about.st_mode):
        if _stays_below(root, path):
            target = os.readlink(name, dir_fd=folder)
            found.append(Entry("link", path, mode, target=target))
    elif stat.S_ISREG(about.st_mode):
        found.append(Entry("file", path, mode, about.st_size))
    elif stat.S_ISDIR(about.st_mode) and len(parts) <= _MAX_DEPTH:
        found.append(Entry("folder", path, mode))
        below = os.open(name, _FOLDER, dir_fd=folder)
        try:
            _list_folder(root, below, parts, found, opens_all)
        finally:
            os.close(below)


def _list_folder(
    root: str, folder: int, parts: list[str], found: list[Entry], opens_all: bool
) -> None:
    for name in sorted(os.listdir(folder)):
        try:
            _list(root, folder, [*parts, name], found, opens_all)
        except OSError:
            continue  # It cannot be read.


def _stays_below(root: str, path: str) -> bool:
    """Whether the link at `path` leads to something below `root`, through other links too."""
    whole = os.path.realpath(root)
    return (os.path.realpath(os.path.join(root, path)) + "/").startswith(whole + "/")


def arrange(root: str, entries: list[Entry]) -> None:
    """Make the folders and links of a list below `root`, and give folders and files their modes.

    Raises:
        OSError: a file of the list is not there, or the disk is full.
    """
    for entry in entries:
        if entry.kind == "folder":
            os.close(_open_parent(root, [*_parts(entry.path), ""]))
    for entry in entries:
        if entry.kind != "folder":
            _arrange(root, entry)
    # From within: a folder may forbid its own user to enter it.
    for entry in reversed(entries):
        if entry.kind == "folder":
            _arrange(root, entry)


def _arrange(root: str, entry: Entry) -> None:
    parts = _parts(entry.path)
    folder = _open_parent(root, parts)
    try:
        if entry.kind == "link":
            try:
                os.unlink(parts[-1], dir_fd=folder)
            except FileNotFoundError:
                pass
            os.symlink(entry.target, parts[-1], dir_fd=folder)
        else:
            os.chmod(parts[-1], entry.mode, dir_fd=folder)
    finally:
        os.close(folder)


def _open_parent(root: str, parts: list[str]) -> int:
    """Open the folder of the last of `parts`; makes the folders that are not there."""
    folder = os.open(root, _FOLDER)
    try:
        for part in parts[:-1]:
            folder = _enter(folder, part)
    except OSError:
        os.close(folder)
        raise
    return folder


def _enter(folder: int, part: str) -> int:
    try:
        below = os.open(part, _FOLDER, dir_fd=folder)
    except OSError:
        try:
            os.unlink(part, dir_fd=folder)
        except FileNotFoundError:
            pass
        os.mkdir(part, 0o755, dir_fd=folder)
        below = os.open(part, _FOLDER, dir_fd=folder)
    os.close(folder)
    return below


def _parts(path: str) -> list[str]:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts or ".." in parts or path.startswith("/"):
        raise OSError(f"path={path!r}; a path below the workspace is allowed")
    return parts
