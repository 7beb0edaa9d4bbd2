"""Opens the Redis of a run that may not be up.

An embedded server that is started here is stopped here. The run's registry of processes does not
change.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import redis

from outloop.buffer.errors import BufferUnavailable, Conflict
from outloop.buffer.reader import BufferReader
from outloop.buffer.redis.client import connect_sync, translated
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.redis.keys import key, prefix
from outloop.buffer.run import Run, load_run

_UNLINK_CHUNK = 512


@contextmanager
def joined(run_dir: Path) -> Iterator[BufferReader]:
    """A reader of the run in `run_dir`, whether or not the run is up.

    Raises:
        SettingsError: the folder is not a run.
        BufferUnavailable: its Redis is not there, or does not hold the run.
    """
    with redis_of(load_run(run_dir)) as run:
        reader = BufferReader.connect(run)
        try:
            yield reader
        finally:
            reader.close()


def purge(run_dir: Path) -> int:
    """Remove all data of a run that is not up from Redis; returns the number of keys.

    Raises:
        Conflict: the run is up.
        SettingsError, BufferUnavailable: as joined().
    """
    run = load_run(run_dir)
    if _answers(run) and (run.settings.buffer.redis_url is None or _is_led(run)):
        raise Conflict(f"run_id={run.run_id} is up; stop it before its data is purged")
    with (
        redis_of(run) as run,
        closing(connect_sync(run.redis_url)) as client,
        translated(f"purging run_id={run.run_id}"),
    ):
        # First: without it every script refuses the run, so half of a run is never used.
        number: Any = client.unlink(key(run.run_id, "meta"))
        number += _unlink_all(client, prefix(run.run_id))
    return int(number)


def _unlink_all(client: redis.Redis, beginning: str) -> int:
    """Delete the keys that begin like this; their number."""
    number: Any = 0
    found: Iterator[bytes] = client.scan_iter(match=f"{beginning}*", count=_UNLINK_CHUNK)
    while names := list(islice(found, _UNLINK_CHUNK)):
        number += client.unlink(*names)
    return int(number)


@contextmanager
def redis_of(run: Run) -> Iterator[Run]:
    """The run, with the URL of a Redis that answers."""
    settings = run.settings.buffer
    data_dir = run.dir / "redis"
    if settings.redis_url is not None or _answers(run):
        yield run
        return
    if not data_dir.is_dir():
        raise BufferUnavailable(
            f"run_id={run.run_id} is not up and data_dir={str(data_dir)!r} does not exist; its "
            "data is gone. Give the folder of another run"
        )
    server = EmbeddedRedis(data_dir, fsync=settings.fsync, max_memory_mb=settings.max_memory_mb)
    with server:
        yield replace(run, redis_url=server.url)


def _answers(run: Run) -> bool:
    client = connect_sync(run.redis_url)
    try:
        with translated("joining"):
            client.ping()
    except BufferUnavailable:
        return False
    finally:
        client.close()
    return True


def _is_led(run: Run) -> bool:
    """True while a trainer renews its leases."""
    client = connect_sync(run.redis_url)
    try:
        with translated("looking for the trainer"):
            deadline: Any = client.hget(key(run.run_id, "state"), "fence_deadline")
    finally:
        client.close()
    return deadline is not None and int(deadline) / 1000 > time.time()
