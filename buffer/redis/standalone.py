"""A run's Redis as a process of its own, on TCP with a password."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, NoReturn

from outloop.buffer.redis.embedded import durable_options, find_server, take_lock

_LOCK_TIMEOUT_S = 60.0
"""Longer than the server of a run that is being moved takes to leave the folder."""


def become_redis(
    data_dir: Path,
    *,
    host: str,
    port: int,
    password: str,
    fsync: Literal["always", "everysec", "no"],
    max_memory_mb: int,
) -> NoReturn:
    """Replace this process by a server with an append-only file in `data_dir`.

    Guarantees: at most one server has the folder, over a shared file system too if it has locks;
    a full server refuses writes and evicts nothing; the password is in no command line and no file.

    Raises:
        SettingsError: no server program is installed.
        BufferUnavailable: another server has the folder.
    """
    program = find_server()
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = take_lock(data_dir, _LOCK_TIMEOUT_S)
    os.set_inheritable(lock, True)
    options = {
        "bind": host,
        "port": str(port),
        "dir": str(data_dir.absolute()),
        "requirepass": f'"{_quoted(password)}"',
        **durable_options(fsync, max_memory_mb),
    }
    options["save"] = '""'
    text = "".join(f"{name} {value}\n" for name, value in options.items())
    readable, writable = os.pipe()
    os.write(writable, text.encode())
    os.close(writable)
    os.dup2(readable, 0)
    os.execv(program, [str(program), "-"])


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
