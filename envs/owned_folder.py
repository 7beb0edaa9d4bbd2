"""Temporary folders of a process.

What a killed process leaves would in time fill the disk of a machine whose runners are killed and
started again. So a folder is locked while its process lives, which the system ends with it, and who
makes the next one of that kind removes those without a lock.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path


class OwnedFolder:
    """An empty folder, there until `close` or the end of the process.

    Args:
        kind: how its name begins.
    """

    def __init__(self, kind: str) -> None:
        _remove_abandoned(kind)
        made = Path(tempfile.mkdtemp(prefix=f".{kind}-"))
        descriptor = _lock(made)
        assert descriptor is not None
        # Without the dot others look at it, and find it locked.
        self.path = made.rename(made.with_name(made.name.removeprefix(".")))
        self._remove = weakref.finalize(self, _remove, self.path, descriptor)

    def close(self) -> None:
        """Remove it, and what is in it."""
        self._remove()


def _remove_abandoned(kind: str) -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{kind}-*"):
        # Another process may remove it at the same time.
        with suppress(OSError):
            if path.lstat().st_uid == os.getuid() and (descriptor := _lock(path)) is not None:
                _remove(path, descriptor)


def _lock(folder: Path) -> int | None:
    """The descriptor that holds the lock; None: another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _remove(folder: Path, descriptor: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(descriptor)
