"""Waiting for room for the files of a run's folder, on a disk that may be full.

Does not own: what is written. A wait ends with the write, or with `DiskFull`.
"""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import structlog

from outloop.buffer.errors import DiskFull

T = TypeVar("T")
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_AGAIN_S = 0.5
_log = structlog.get_logger()


def wait_for_room(
    write: Callable[[], T], path: Path, *, max_s: float, on_full: Callable[[str], None]
) -> T:
    """What `write` returns, once the disk of `path` has room for it.

    Args:
        write: leaves nothing behind where it fails.
        on_full: gets a sentence for a person, once, when it begins to wait.

    Raises:
        DiskFull: there was none for `max_s`.
        OSError: it failed for another reason.
    """
    began_at: float | None = None
    while True:
        try:
            answer = write()
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            now = time.monotonic()
            if began_at is None:
                began_at = now
                sentence = _sentence(path, error)
                _log.warning("disk_full", path=str(path), max_s=max_s, error=str(error))
                on_full(f"{sentence}; the trainer waits for room")
            if now - began_at >= max_s:
                raise DiskFull(
                    f"{_sentence(path, error)}. The run waited for buffer.max_outage_s={max_s:g}; "
                    "start the same command again when there is room"
                ) from error
            time.sleep(_AGAIN_S)
        else:
            if began_at is not None:
                _log.warning("disk_has_room", after_s=round(time.monotonic() - began_at, 2))
            return answer


def _sentence(path: Path, error: OSError) -> str:
    folder = path.parent.absolute()
    free_mib = shutil.disk_usage(folder).free / 2**20
    return f"disk full at {folder} ({error.strerror}, {free_mib:.1f} MiB free), free space there"
