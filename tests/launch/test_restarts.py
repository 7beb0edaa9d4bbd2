"""Parts that end are started again, without a limit over a run's life and not in a circle."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import structlog

from fakes.small_disk import small_disk
from outloop.buffer.errors import BufferUnavailable, PartFailed
from outloop.buffer.events import read_events
from outloop.buffer.reader import BufferReader
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.redis.run_meta import init_run
from outloop.buffer.run import create_run
from outloop.buffer.settings import Settings
from outloop.engine.launch.gpu_placement import NOT_PLACED
from outloop.engine.launch.launcher import Launcher, running
from outloop.engine.launch.restarts import DEFAULT_BACKOFF, Backoff, Restarts


def test_the_wait_doubles_and_a_healthy_life_forgets() -> None:
    """No wait at first, then twice the last one up to the bound; each part by itself."""
    restarts = Restarts(Backoff(first_s=1, max_s=5, healthy_s=60, max_short_lives=5))
    waits = [restarts.wait_s("server-0", lived_s=1) for _ in range(5)]
    assert waits == [0, 1, 2, 4, 5]
    assert restarts.wait_s("server-1", lived_s=1) == 0
    assert restarts.wait_s("server-0", lived_s=1) is None
    assert restarts.wait_s("server-0", lived_s=60) == 0
    assert restarts.wait_s("server-0", lived_s=1) == 1


@contextmanager
def launched(folder: Path, backoff: Backoff) -> Iterator[tuple[Launcher, Callable[..., None]]]:
    """A runner that waits for a router, and what ends it and waits until there is another."""
    settings = Settings(
        model={"path": folder},
        run={"dir": folder},
        env={"rollout_function_path": "rollouts:play", "tasks": "rollouts:tasks"},
    )
    with running(settings, threading.Event(), backoff=backoff) as launcher:
        launcher.start("runner-0", "runner")

        def kill(number: int = signal.SIGKILL) -> None:
            process = psutil.Process(launcher.parts["runner-0"].pid)
            process.send_signal(number)
            deadline = time.monotonic() + 30
            while launcher.parts["runner-0"].pid == process.pid:
                assert time.monotonic() < deadline
                launcher.check()

        yield launcher, kill


@pytest.mark.medium
def test_a_part_that_dies_soon_again_and_again_is_given_up(tmp_path: Path) -> None:
    """The error names the part; each restart left its reason and came later than the one before."""
    backoff = Backoff(first_s=0.3, max_short_lives=2)
    with launched(tmp_path, backoff) as (launcher, kill):
        started = time.monotonic()
        kill()
        kill()
        assert time.monotonic() - started >= 0.3
        with pytest.raises(PartFailed, match="runner-0 ended with exit_code=-9"):
            kill()
        events = [event for event in read_events(launcher.run.dir) if "reason" in event]
    assert [event["reason"] for event in events] == ["ended by SIGKILL"] * 2


@pytest.mark.medium
def test_a_part_that_lives_long_enough_is_started_again_without_limit(tmp_path: Path) -> None:
    """More often than `max_short_lives`, when each life was a healthy one."""
    with launched(tmp_path, Backoff(healthy_s=0, max_short_lives=1)) as (launcher, kill):
        for _ in range(4):
            kill()
        assert launcher.parts["runner-0"].exit_code is None


class Failing:
    """In the place of every part: a program that says why it fails, and then says more."""

    def command(self, name: str, part: str, command: Sequence[str]) -> list[str]:
        """Of the program."""
        code = (
            "print('out of memory', *['later'] * 15, 'see above', sep='\\n'); raise SystemExit(1)"
        )
        return [sys.executable, "-c", code]


def test_a_part_that_fails_twice_alike_shows_the_end_of_its_log(tmp_path: Path) -> None:
    """Once on the terminal, and in the error with which the run ends."""
    settings = Settings(
        model={"path": tmp_path}, run={"dir": tmp_path}, env={"tasks": "rollouts:tasks"}
    )
    with EmbeddedRedis(tmp_path / "redis", fsync="no") as redis:
        run = create_run(settings, tmp_path / "run", redis.start())
        init_run(run)
        reader = BufferReader.connect(run)
        backoff = Backoff(first_s=0.01, max_short_lives=4)
        launcher = Launcher(run, reader, threading.Event(), NOT_PLACED, backoff, Failing())
        launcher.start("server-0", "server")
        with structlog.testing.capture_logs() as logs, pytest.raises(PartFailed) as raised:
            look_until(lambda: False, launcher)
        reader.close()
    ended = [log for log in logs if log["event"] == "part_ended"]
    assert [log["reason"] for log in ended] == ["exit_code=1: see above"] * 3
    assert ["out of memory" in log.get("exception", "") for log in ended] == [True, False, False]
    assert "out of memory" in str(raised.value)


@contextmanager
def watched(
    folder: Path, backoff: Backoff = DEFAULT_BACKOFF, **buffer: object
) -> Iterator[Launcher]:
    """A launcher without parts."""
    # A Redis that is killed has what it acknowledged, however busy its disk is.
    settings = Settings(
        model={"path": folder}, run={"dir": folder}, buffer={"fsync": "always"} | buffer
    )
    with running(settings, threading.Event(), backoff=backoff) as launcher:
        yield launcher


def kill_redis(folder: Path) -> None:
    """kill -9 of the embedded one that has its data there."""
    for process in psutil.Process().children():
        if process.status() != psutil.STATUS_ZOMBIE and process.cwd() == str(folder / "run/redis"):
            kill(process)


def kill(process: psutil.Process) -> None:
    """kill -9; its end is left for who started it to see."""
    process.kill()
    while process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.001)


def look_until(is_true: Callable[[], bool], launcher: Launcher) -> None:
    """Have the launcher watch."""
    deadline = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < deadline
        with launcher.redis.riding_out():
            launcher.check()


@pytest.mark.medium
def test_the_run_s_own_redis_is_started_again_over_its_folder(tmp_path: Path) -> None:
    """At the same address, with what it held; each restart is an event."""
    with watched(tmp_path) as launcher:
        launcher.reader.set_steps_left(7)
        for number in (1, 2):
            kill_redis(tmp_path)
            look_until(lambda: is_up(launcher), launcher)
            events = [event for event in read_events(launcher.run.dir) if "reason" in event]
            assert [event["part"] for event in events] == ["redis"] * number
        assert launcher.reader.run_state() == "running"


def is_up(launcher: Launcher) -> bool:
    """Whether Redis answers."""
    try:
        launcher.reader.check_run()
    except BufferUnavailable:
        return False
    return True


@pytest.mark.medium
def test_a_redis_that_ends_again_and_again_is_given_up(tmp_path: Path) -> None:
    """The error says how it ended."""
    with watched(tmp_path, Backoff(max_short_lives=1)) as launcher:
        kill_redis(tmp_path)
        look_until(lambda: is_up(launcher), launcher)
        kill_redis(tmp_path)
        # The launcher may look while the last threads of the process still end.
        with pytest.raises(PartFailed, match="Redis ended too often .ended by SIGKILL."):
            look_until(lambda: False, launcher)


@pytest.mark.medium
def test_a_redis_that_ended_for_want_of_room_is_started_until_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often: one that must sync every write ends with each. The run says why."""
    with (
        small_disk(tmp_path / "run/redis", monkeypatch, mounts=True) as disk,
        watched(tmp_path, Backoff(max_short_lives=0), fsync="always") as launcher,
    ):
        disk.fill()
        for _ in range(2):
            with pytest.raises(BufferUnavailable):
                # More than what is left of its file's last page.
                launcher.reader.registry.report_status("part", {"text": "x" * 10_000})
            look_until(lambda: launcher.redis.write_obstacle is not None, launcher)
            look_until(lambda: is_up(launcher), launcher)
        assert (
            f"disk full at {disk.folder} (it ended, 0.0 MiB free)" in launcher.redis.write_obstacle
        )
        disk.make_room()
        launcher.reader.set_steps_left(3)
        look_until(lambda: launcher.redis.write_obstacle is None, launcher)
        kinds = [event["kind"] for event in read_events(launcher.run.dir)]
        assert kinds.count("redis_cannot_write") == kinds.count("redis_writes_again") == 1


@pytest.mark.medium
def test_a_redis_of_somebody_else_is_waited_for_until_the_bound(tmp_path: Path) -> None:
    """Then the run ends with one sentence; one that is back in time ends nothing."""
    with (
        EmbeddedRedis(tmp_path / "theirs", fsync="always") as redis,
        watched(tmp_path, redis_url=redis.url, max_outage_s=3.0) as launcher,
    ):
        kill(psutil.Process(redis.pid))
        with launcher.redis.riding_out():
            launcher.check()
        while redis.exit_code is None:
            time.sleep(0.001)
        redis.start_again()
        look_until(lambda: is_up(launcher), launcher)
        with launcher.redis.riding_out():
            launcher.check()
        began_at = time.monotonic()
        kill(psutil.Process(redis.pid))
        with pytest.raises(BufferUnavailable, match=r"buffer\.max_outage_s=3; start the same"):
            look_until(lambda: False, launcher)
        assert time.monotonic() - began_at >= 3.0
