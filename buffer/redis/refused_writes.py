"""A Redis that answers and does not write: its disk or memory is full, its replicas are missing, or
it is a replica itself.

Owns: which errors say so, what a person does about each, and asking a server.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import redis

_NO_ROOM = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
"""How the system says that a file cannot grow."""


UNKNOWN_FOLDER = "its data folder"
_LEAST_BYTES = 2**20
"""Less is a full disk."""
_DISK = "MISCONF"
_ADVICE = {
    "maxmemory": "its memory is full; raise buffer.max_memory_mb (or the server's maxmemory), or "
    "let the trainer catch up. Nothing was evicted",
    _DISK: "its disk fails; free space where its data folder is",
    "good replicas": "its replicas are missing; bring them back, or lower min-replicas-to-write",
    "read only replica": "it is a replica; point buffer.redis_url at the primary",
}
"""Part of the error's text -> why, and what to do. Redis 6.2 wraps errors inside a script: only the
text shows which error it was."""


def refused_write(error: Exception) -> str | None:
    """Why a server refuses every write, or every one that takes memory, if `error` says so."""
    if not isinstance(error, redis.RedisError):
        return None
    return next((advice for sign, advice in _ADVICE.items() if sign in str(error)), None)


def write_obstacle(error: redis.RedisError, folder: Path | str) -> str:
    """Why Redis cannot write, as a sentence for a person.

    Args:
        error: its answer to `probe`.
        folder: of its data; a path is one of this machine.

    Raises:
        redis.RedisError: it is no refusal to write.
    """
    why = refused_write(error)
    if why is None:
        raise error
    if _DISK in str(error):
        why = _disk_fails(str(error), folder)
    return f"Redis cannot write: {why}"


def probe(key: str) -> tuple[str, str, str]:
    """A command that Redis refuses as any write that takes memory, and that changes nothing as long
    as there is no `key`."""
    return ("LPUSHX", key, "")


def ended_for_room(exit_code: int, last_words: str, folder: Path) -> str | None:
    """Why a server that must sync every write has ended by itself, as `write_obstacle`; None: not
    because its disk is full. It may not have had the room to say so in its log."""
    if exit_code <= 0:
        return None
    has_room = shutil.disk_usage(folder).free >= _LEAST_BYTES
    if has_room and not any(words in last_words for words in _NO_ROOM):
        return None
    return f"Redis cannot write: {_disk_full(folder, 'it ended')}"


def _disk_fails(text: str, folder: Path | str) -> str:
    reason = next((words for words in _NO_ROOM if words in text), None)
    if reason is None:
        return f"its disk fails at {folder} ({text}); look at its log"
    return _disk_full(folder, reason)


def _disk_full(folder: Path | str, reason: str) -> str:
    room = ""
    if isinstance(folder, Path) and folder.is_dir():
        room = f", {shutil.disk_usage(folder).free / 2**20:.1f} MiB free"
    return f"disk full at {folder} ({reason}{room}), free space or raise its limit there"


def folder_of(client: redis.Redis) -> str:
    """Of the server's data, as it says it, if our user may ask."""
    try:
        found: dict[Any, Any] = client.config_get("dir")
    except redis.RedisError:
        return UNKNOWN_FOLDER
    return next(
        (_text(value) for name, value in found.items() if _text(name) == "dir"), UNKNOWN_FOLDER
    )


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
