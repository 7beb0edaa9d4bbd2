"""How a run is entered in its Redis."""

from __future__ import annotations

from contextlib import closing

from outloop.buffer.errors import BufferUnavailable, SettingsError
from outloop.buffer.reader import BufferReader, init_run
from outloop.buffer.redis.client import connect_sync
from outloop.buffer.redis.requirements import read_server
from outloop.buffer.run import Run, create_run
from outloop.buffer.settings import Settings


def enter(run: Run) -> None:
    """Create the run in Redis, if that can hold it.

    Raises:
        SettingsError: it cannot, or a setting differs that a run cannot change.
        BufferUnavailable: it does not answer.
    """
    for url in (run.redis_url, *run.shard_urls):
        with closing(connect_sync(url)) as client:
            server = read_server(client)
        if server is not None:
            server.check()
    init_run(run)


def make_run(settings: Settings) -> Run:
    """Write the run's folder and enter it in Redis, for parts that are started one by one.

    A run that is there with the same settings is left as it is: its parts may be running.

    Raises:
        SettingsError: buffer.redis_url is not given.
        BufferUnavailable: Redis does not answer.
    """
    redis_url = settings.buffer.redis_url
    if redis_url is None:
        raise SettingsError(
            "buffer.redis_url is missing; parts that are started one by one meet in a Redis of "
            "their own: give buffer.redis_url='redis://HOST:PORT'"
        )
    run = create_run(settings, (settings.run.dir / settings.run.name).absolute(), redis_url)
    if not is_entered(run):
        enter(run)
    return run


def is_entered(run: Run) -> bool:
    """Whether Redis holds the run with the same settings: its parts may be running."""
    try:
        BufferReader.connect(run).close()
    except (BufferUnavailable, SettingsError):
        return False
    return True
