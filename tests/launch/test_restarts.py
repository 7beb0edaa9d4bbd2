"""Parts that end are started again, without a limit over a run's life and not in a circle."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from outloop.buffer.errors import PartFailed
from outloop.buffer.events import read_events
from outloop.buffer.settings import Settings
from outloop.engine.launch.launcher import Launcher, running
from outloop.engine.launch.restarts import Backoff, Restarts


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


def test_a_part_that_lives_long_enough_is_started_again_without_limit(tmp_path: Path) -> None:
    """More often than `max_short_lives`, when each life was a healthy one."""
    with launched(tmp_path, Backoff(healthy_s=0, max_short_lives=1)) as (launcher, kill):
        for _ in range(4):
            kill()
        assert launcher.parts["runner-0"].exit_code is None
