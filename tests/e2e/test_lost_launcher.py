"""A launcher that is gone while its parts go on, and the next one."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from outloop.buffer.events import read_events

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
WriteConfig = Callable[..., Path]
ReadMetrics = Callable[[Path], list[dict[str, float]]]
PARTS = ("server", "router", "trainer", "runner")


@contextmanager
def launcher(folder: Path, grace_s: float, *changes: str) -> Iterator[subprocess.Popen[str]]:
    """`outloop train` whose parts outlive it for so long."""
    words = [f"run.launcher_grace_s={grace_s}", *changes]
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "outloop.cli", "train", "run.toml"),
            *(word for change in words for word in ("--set", change)),
        ],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until(is_true: Callable[[], bool], timeout_s: float = 100.0) -> None:
    """Until it is; fails after the time."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def processes_of(folder: Path) -> dict[str, psutil.Process]:
    """Those of the run in this folder that run, by part: also its Redis and the supervisor."""
    found = {}
    for process in psutil.process_iter(["cmdline", "cwd", "status"]):
        words = process.info["cmdline"] or []
        if process.info["cwd"] == str(folder / "runs/tiny/redis"):
            found["redis"] = process
        if str(folder) not in " ".join(words) or process.info["status"] == psutil.STATUS_ZOMBIE:
            continue
        if words[1:3] == ["-m", "outloop.cli"]:
            found[words[3] if words[3] not in found else f"another {words[3]}"] = process
        elif words[1:3] == ["-m", "outloop.engine.launch.supervisor.program"]:
            found["supervisor"] = process
    return found


@pytest.fixture
def last_step(workspace: Path, read_metrics: ReadMetrics) -> Callable[[], float]:
    """The newest step that was recorded; 0 before the first."""

    def read() -> float:
        rows = read_metrics(workspace / "runs/tiny")
        return max((row["step"] for row in rows if "train/loss" in row), default=0)

    return read


def test_the_same_command_goes_on_over_living_parts(
    workspace: Path,
    write_config: WriteConfig,
    outloop: Callable[..., subprocess.CompletedProcess[str]],
    read_metrics: ReadMetrics,
    allow: Callable[..., None],
    last_step: Callable[[], float],
) -> None:
    """kill -9 of the launcher: steps go on without one, the next one leads the same processes,
    starts again what is killed then, each step is there once, and nothing is left."""
    write_config(steps=6, held_s=100)
    allow(1)
    words = (100, "router.num_processes=2", "telemetry.view_port=0")
    with launcher(workspace, *words) as first:
        wait_until(lambda: last_step() >= 1)
        first.kill()
    before = processes_of(workspace)
    assert {*PARTS, "another router", "viewer", "redis", "supervisor"} <= before.keys()
    status = outloop("status", "runs/tiny").stdout
    assert (
        f"parts wait for the next one as children of process {before['supervisor'].pid}" in status
    )
    allow(3)
    wait_until(lambda: last_step() >= 3)
    with launcher(workspace, *words) as second:
        assert second.stdout is not None
        said = [second.stdout.readline()]
        while "earlier launcher" not in said[-1]:
            assert said[-1], "".join(said)
            said.append(second.stdout.readline())
        assert processes_of(workspace) == before
        before["another router"].kill()
        before["server"].kill()
        wait_until(lambda: before["another router"] not in processes_of(workspace).values())
        wait_until(lambda: "another router" in processes_of(workspace))
        wait_until(lambda: processes_of(workspace).get("server") not in (None, before["server"]))
        allow()
        output, _ = second.communicate(timeout=200)
    assert second.returncode == 0, output
    rows = [row for row in read_metrics(workspace / "runs/tiny") if "train/loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert "launcher_lost" in {event["kind"] for event in read_events(workspace / "runs/tiny")}
    _, alive = psutil.wait_procs(list(before.values()), timeout=20)
    assert not alive
    assert not processes_of(workspace)


def test_a_launcher_with_other_settings_stops_what_runs(
    workspace: Path,
    write_config: WriteConfig,
    allow: Callable[..., None],
    last_step: Callable[[], float],
) -> None:
    """The trainer with a checkpoint of its last step, from which the next one goes on; and a run
    that has finished without a launcher is ended by the next."""
    write_config(steps=4, held_s=100)
    allow(1)
    changed = (100, "trainer.learning_rate=0.0002")
    with launcher(workspace, 100) as first:
        wait_until(lambda: last_step() >= 1)
        first.kill()
    left = processes_of(workspace)
    with launcher(workspace, *changed) as second:
        wait_until(lambda: processes_of(workspace).get("trainer") not in (None, left["trainer"]))
        assert not [process for process in left.values() if process.is_running()]
        # Every second step has one of its own.
        assert (workspace / "runs/tiny/checkpoints/step_1").is_dir()
        second.kill()
    allow()
    wait_until(lambda: (workspace / "runs/tiny/hf/config.json").is_file())
    with launcher(workspace, *changed) as third:
        output, _ = third.communicate(timeout=100)
    assert third.returncode == 0, output
    assert "has made all of its 4 steps" in output
    assert not processes_of(workspace)


def test_a_launcher_without_its_supervisor_ends_with_a_sentence(
    workspace: Path, write_config: WriteConfig, last_step: Callable[[], float]
) -> None:
    """As its parts end with it, and within seconds, although their Redis is gone, for which they
    would wait a minute; a second launcher meanwhile is refused."""
    write_config(steps=1000)
    with launcher(workspace, 100) as process:
        wait_until(lambda: last_step() >= 1)
        with launcher(workspace, 100) as other:
            output, _ = other.communicate(timeout=100)
        assert other.returncode == 2, output
        assert f"process {process.pid} leads the parts" in output
        left = processes_of(workspace)
        left["supervisor"].send_signal(signal.SIGKILL)
        output, _ = process.communicate(timeout=100)
    assert process.returncode == 1, output
    assert "start the same command again" in output
    _, alive = psutil.wait_procs(list(left.values()), timeout=30)
    assert not alive
