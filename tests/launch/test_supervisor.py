"""Processes that outlive who started them, and who finds them again."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from outloop.buffer.errors import PartFailed, SettingsError
from outloop.engine.launch.launcher_process import named_launcher
from outloop.engine.launch.supervisor.address import Address
from outloop.engine.launch.supervisor.client import Supervisor, end_living, supervised

LAUNCHER = """
import signal
import sys
from pathlib import Path
from outloop.engine.launch.supervisor.client import supervised

run_dir = Path(sys.argv[1])
with supervised(run_dir, "settings", float(sys.argv[2])) as supervisor:
    with supervisor.redis(run_dir / "redis", fsync="no", max_memory_mb=16) as redis:
        for order, name in enumerate(("last", "first")):
            command = [sys.executable, "-c", PART, str(run_dir / "stopped"), name]
            part = supervisor.start(
                name, command, run_dir / f"{name}.log", {}, stop_order=-order, stop_timeout_s=20
            )
            print(part.pid, flush=True)
        print(redis.pid, redis.url, flush=True)
        signal.pause()
"""
PART = textwrap.dedent("""
    import signal, sys
    def stop(number, frame):
        with open(sys.argv[1], "a") as file:
            file.write(sys.argv[2] + " ")
        sys.exit(3)
    signal.signal(signal.SIGTERM, stop)
    print("ready", flush=True)
    while True:
        signal.pause()
""")


class Left:
    """What a launcher that was killed has left."""

    def __init__(self, lines: list[str]) -> None:
        last, first, redis = lines
        self.last, self.first = psutil.Process(int(last)), psutil.Process(int(first))
        self.redis = psutil.Process(int(redis.split()[0]))
        self.redis_url = redis.split()[1]

    def is_there(self) -> list[bool]:
        """Whether each of its three processes runs."""
        return [process.is_running() for process in (self.last, self.first, self.redis)]


@contextmanager
def killed_launcher(run_dir: Path, grace_s: float) -> Iterator[Left]:
    """One that started two parts and a Redis, each of which has begun."""
    code = f"PART = {PART!r}\n{LAUNCHER}"
    words = [sys.executable, "-c", code, str(run_dir), str(grace_s)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        lines = [launcher.stdout.readline() for _ in range(3)]
        while not all("ready" in log.read_text() for log in run_dir.glob("*t.log")):
            assert launcher.poll() is None
        launcher.kill()
    yield Left(lines)
    found = Address(run_dir).find()
    if found is not None:
        found[0].terminate()
        found[0].wait(30)


def has_ended(process: psutil.Process) -> bool:
    """With its last thread, before which its parent is not told."""
    threads = list(Path(f"/proc/{process.pid}/task").iterdir())
    return process.status() == psutil.STATUS_ZOMBIE and len(threads) == 1


def pause(supervisor: Supervisor, run_dir: Path) -> None:
    """Start a part that does nothing."""
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    supervisor.start("part", command, run_dir / "part.log", {}, stop_order=0, stop_timeout_s=20)


def test_the_next_launcher_goes_on_with_what_runs(tmp_path: Path) -> None:
    """Their ids, their ends and what they said are known; at the end nothing runs."""
    with killed_launcher(tmp_path, 60) as left:
        with supervised(tmp_path, "settings", 60) as supervisor:
            assert supervisor.has_living
            first = supervisor.take_living("first")
            assert first is not None
            assert first.part.pid == left.first.pid
            assert first.part.exit_code is None
            assert supervisor.take_living("first") is None
            with supervisor.redis(tmp_path / "redis", fsync="no", max_memory_mb=16) as redis:
                assert (redis.pid, redis.url) == (left.redis.pid, left.redis_url)
                first.part.stop(20)
                assert first.part.exit_code == 3
                assert first.part.last_words(1) == "ready"
                assert left.is_there() == [True, False, True]
        assert left.is_there() == [False, False, False]
        assert (tmp_path / "stopped").read_text() == "first last "
        assert Address(tmp_path).find() is None


def test_what_ended_while_nobody_led_is_seen(tmp_path: Path) -> None:
    """A part that did is not living; Redis is there again at its address."""
    with killed_launcher(tmp_path, 60) as left:
        left.first.kill()
        left.redis.kill()
        while not (has_ended(left.first) and has_ended(left.redis)):
            pass
        with supervised(tmp_path, "settings", 60) as supervisor:
            assert supervisor.take_living("first") is None
            assert supervisor.take_living("last") is not None
            with supervisor.redis(tmp_path / "redis", fsync="no", max_memory_mb=16) as redis:
                assert redis.url == left.redis_url
                assert redis.exit_code is None
                assert redis.pid != left.redis.pid


def test_when_no_launcher_comes_all_is_stopped_in_order(tmp_path: Path) -> None:
    """The lowest order first."""
    with killed_launcher(tmp_path, 0.1) as left:
        psutil.wait_procs([left.last, left.first, left.redis], timeout=30)
        assert left.is_there() == [False, False, False]
        assert (tmp_path / "stopped").read_text() == "first last "


def test_a_launcher_with_other_settings_stops_what_runs(tmp_path: Path) -> None:
    """Then it begins with nothing; so does one whose parts end with it."""
    with (
        killed_launcher(tmp_path, 60) as left,
        supervised(tmp_path, "other settings", 60) as supervisor,
    ):
        assert left.is_there() == [False, False, False]
        assert not supervisor.has_living
    with killed_launcher(tmp_path, 60) as left:
        end_living(tmp_path)
        assert left.is_there() == [False, False, False]


def test_rubbish_is_no_launcher(tmp_path: Path) -> None:
    """Whoever says it is left alone, and the next launcher is led to what runs."""
    with killed_launcher(tmp_path, 60) as left:
        found = Address(tmp_path).find()
        assert found is not None
        for rubbish in (b"", b"\x00\x00\x00\x05wrong", b"\xff" * 7):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(str(found[1]))
                stranger.sendall(rubbish)
        with supervised(tmp_path, "settings", 60) as supervisor:
            assert supervisor.has_living
            assert left.is_there() == [True, True, True]


def test_two_launchers_of_a_run_are_refused(tmp_path: Path) -> None:
    """By the process that leads it."""
    with (
        supervised(tmp_path, "settings", 60),
        named_launcher(tmp_path),
        pytest.raises(SettingsError, match=f"process {os.getpid()} leads"),
        supervised(tmp_path, "settings", 60),
    ):
        pass


def test_a_supervisor_that_was_killed_is_named(tmp_path: Path) -> None:
    """Its parts end with it, and stopping them is no error."""
    with supervised(tmp_path, "settings", 60) as supervisor:
        pause(supervisor, tmp_path)
        found = Address(tmp_path).find()
        assert found is not None
        (part,) = found[0].children()
        found[0].kill()
        with pytest.raises(PartFailed, match=f"process {found[0].pid}"):
            pause(supervisor, tmp_path)
        psutil.wait_procs([part], timeout=20)
        assert not part.is_running()


def test_an_interrupted_launcher_leaves_nothing(tmp_path: Path) -> None:
    """A second Ctrl-C, while it waits for a part that does not stop."""
    code = textwrap.dedent("""
        import signal, sys
        from pathlib import Path
        from outloop.engine.launch.supervisor.client import supervised
        # A shell has what it starts in the background ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stubborn = "import signal; signal.signal(15, signal.SIG_IGN); print(1, flush=True); "
        with supervised(Path(sys.argv[1]), "settings", 60.0) as supervisor:
            command = [sys.executable, "-c", stubborn + "signal.pause()"]
            log = Path(sys.argv[1]) / "part.log"
            part = supervisor.start("part", command, log, {}, stop_order=0, stop_timeout_s=60)
            while not part.last_words():
                pass
            print(part.pid, flush=True)
            part.stop(60)
    """)
    words = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        part = psutil.Process(int(launcher.stdout.readline()))
        found = Address(tmp_path).find()
        assert found is not None
        launcher.send_signal(signal.SIGINT)
        _, error = launcher.communicate(timeout=30)
    assert "KeyboardInterrupt" in error
    assert not found[0].is_running()
    part.kill()


def test_a_part_that_cannot_be_started_is_a_sentence(tmp_path: Path) -> None:
    """And the supervisor goes on."""
    with supervised(tmp_path, "settings", 60) as supervisor:
        with pytest.raises(PartFailed, match="No such file"):
            supervisor.start(
                "part", ["/nowhere"], tmp_path / "part.log", {}, stop_order=0, stop_timeout_s=1
            )
        pause(supervisor, tmp_path)
