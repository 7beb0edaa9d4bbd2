"""Files in a folder that a hostile program may have filled.

Symbolic links are not followed, only regular files are read, and no read blocks or returns more
than its limit.
"""

from __future__ import annotations

import os
import stat

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
