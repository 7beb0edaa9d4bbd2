"""Temporary folders of a process.

What a killed process leaves would in time fill the disk of a machine whose runners are killed and
started again. So a folder is locked while its process lives, which the system ends with it, and who
makes the next one of that kind removes those without a lock.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

import structlog

from outloop.buffer import untrusted_tree

_log = structlog.get_logger()


class OwnedFolder:
    """An empty folder, there until `close` or the end of the process.

    Programs that nobody trusts may fill it. What cannot be removed is logged, and never an error.

    Args:
        kind: how its name begins.
        parent: where it is made; None: the folder for temporary files.
    """

    def __init__(self, kind: str, parent: str | None = None) -> None:
        _remove_abandoned(kind, Path(parent or tempfile.gettempdir()))
        made = Path(tempfile.mkdtemp(prefix=f".{kind}-", dir=parent))
        descriptor = _lock(made)
        assert descriptor is not None
        # Without the dot others look at it, and find it locked.
        self.path = made.rename(made.with_name(made.name.removeprefix(".")))
        self._remove = weakref.finalize(self, _remove_own, self.path, descriptor, os.getpid())

    def close(self) -> None:
        """Remove it, and what is in it."""
        self._remove()


def _remove_abandoned(kind: str, parent: Path) -> None:
    for path in parent.glob(f"{kind}-*"):
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


def _remove_own(folder: Path, descriptor: int, pid: int) -> None:
    if os.getpid() == pid:  # A forked child that ends owns nothing.
        _remove(folder, descriptor)


def _remove(folder: Path, descriptor: int) -> None:
    if (left := untrusted_tree.remove(folder)) is not None:
        _log.warning("folder_not_removed", folder=str(folder), reason=str(left))
    os.close(descriptor)
