"""How a run is entered in its Redis."""

from __future__ import annotations

from contextlib import closing

from outloop.buffer.errors import BufferUnavailable, SettingsError
from outloop.buffer.reader import BufferReader, init_run
from outloop.buffer.redis.client import connect_sync
from outloop.buffer.redis.keys import hash_tag
from outloop.buffer.redis.requirements import read_server
from outloop.buffer.redis.rights import check_rights
from outloop.buffer.run import Run, create_run
from outloop.buffer.settings import Settings
from outloop.buffer.settings.trajectories import TrajectorySettings
from outloop.buffer.trajectories.trained import keeps_trajectories


def enter(run: Run) -> None:
    """Create the run in Redis, if that can hold it and our user may use it.

    Raises:
        SettingsError: it cannot, or a setting differs that a run cannot change.
        BufferUnavailable: it does not answer.
    """
    with closing(connect_sync(run.redis_url)) as client:
        server = read_server(client)
        if server is not None:
            server.check()
        check_rights(client, hash_tag(run.run_id))
    init_run(run)


def make_run(settings: Settings) -> Run:
    """Write the run's folder and enter it in Redis, for parts that are started one by one.

    A run that is there with the same settings is left as it is: its parts may be running. Episodes
    that end wait for an archiver from now on, where the run keeps trajectories.

    Raises:
        SettingsError: buffer.redis_url is not given, or trajectories.enabled=true without pyarrow.
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
    with closing(BufferReader.connect(run)) as reader:
        # Also in a run that is there: a process that was killed may have entered it and not come
        # so far.
        open_archive(reader, settings.trajectories)
    return run


def is_entered(run: Run) -> bool:
    """Whether Redis holds the run with the same settings: its parts may be running."""
    try:
        BufferReader.connect(run).close()
    except (BufferUnavailable, SettingsError):
        return False
    return True


def open_archive(reader: BufferReader, settings: TrajectorySettings) -> bool:
    """Have ended episodes wait for an archiver where the run keeps trajectories, else none; whether
    it does. Twice is once.

    Raises:
        SettingsError: trajectories.enabled=true without pyarrow.
        BufferUnavailable: Redis does not answer.
    """
    is_kept = keeps_trajectories(settings)
    if settings.enabled and not is_kept:
        raise SettingsError(
            "trajectories.enabled=true needs the package pyarrow, which is not installed; run "
            "pip install 'outloop[view]', or set it to false"
        )
    if is_kept:
        reader.trajectories.open(settings.max_waiting_tokens)
    else:
        reader.trajectories.abandon()
    return is_kept
