"""Choosing a sandbox: what is refused, and how each backend starts a session."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from outloop.buffer.errors import EnvironmentFailure, SettingsError
from outloop.envs.sandbox import cgroups
from outloop.envs.sandbox.api import Limits
from outloop.envs.sandbox.bubblewrap import BubblewrapSandbox
from outloop.envs.sandbox.container import ContainerSandbox, container_argv
from outloop.envs.sandbox.unprotected import SubprocessSandbox

LIMITS = Limits(memory_bytes=100 * 2**20, disk_bytes=10 * 2**20, max_processes=5, max_files=7)


def program(folder: Path, text: str) -> str:
    """An executable shell script in `folder`."""
    path = folder / "engine"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_missing_bubblewrap_is_reported_and_not_replaced(tmp_path: Path) -> None:
    """The package and the alternatives are named; nothing weaker is taken."""
    code = (
        "from outloop.envs.sandbox.backends import open_sandbox\n"
        "for name in ('bubblewrap', 'container', 'bwrap'):\n"
        "    try: open_sandbox(name)\n"
        "    except Exception as error: print(type(error).__name__, error)\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    bubblewrap, container, unknown = answer.stdout.splitlines()
    assert re.search(r"SettingsError.*install the package bubblewrap.*container.*subp", bubblewrap)
    assert "none of docker, podman is on PATH" in container
    assert "bubblewrap, container, subprocess are allowed" in unknown


def test_an_engine_that_does_not_answer_is_reported(tmp_path: Path) -> None:
    """What the engine said is in the sentence."""
    engine = program(tmp_path, "echo 'cannot connect to the daemon' >&2; exit 1")
    with pytest.raises(SettingsError, match="cannot connect to the daemon; start the engine"):
        ContainerSandbox(engine=engine)


RUNTIMES = """case "$*" in
  info) ;;
  info*) echo '{"runc": {"path": "runc"}, "runsc": {"path": "/usr/bin/runsc"}}' ;;
  *) echo "$@" >> "$0.words"; exit 125 ;;
esac"""


async def test_a_runtime_of_the_engine_runs_the_container(tmp_path: Path) -> None:
    """gVisor by its name; the sandbox says so."""
    engine = program(tmp_path, RUNTIMES)
    sandbox = ContainerSandbox(engine=engine, runtime="runsc")
    assert "runtime runsc" in sandbox.enforcement
    with pytest.raises(EnvironmentFailure):
        async with sandbox.session():
            pass
    await sandbox.close()
    assert (tmp_path / "engine.words").read_text().startswith("run --runtime runsc --rm ")


def test_a_runtime_that_the_engine_lacks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With those that it has; podman takes what is on PATH."""
    engine = program(tmp_path, RUNTIMES)
    with pytest.raises(SettingsError, match=r"runtime='kata': engine .*has runc, runsc"):
        ContainerSandbox(engine=engine, runtime="kata")
    podman = Path(engine).rename(tmp_path / "podman")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SettingsError, match="podman does not have it"):
        ContainerSandbox(engine=str(podman), runtime="runsc")
    argv = container_argv(str(podman), "s", "i", "python3", tmp_path, LIMITS, runtime="runsc")
    assert argv[1:4] == ["--runtime", "runsc", "run"]


async def test_a_session_that_does_not_start_is_an_environment_failure(tmp_path: Path) -> None:
    """With the words of whatever failed to start."""
    engine = program(tmp_path, '[ "$1" = info ] || { echo "no such image" >&2; exit 125; }')
    sandbox = ContainerSandbox(engine=engine)
    with pytest.raises(EnvironmentFailure, match="no such image"):
        await sandbox.run({}, ("true",))
    await sandbox.close()
    broken = BubblewrapSandbox(python="/usr/bin/no-such-python")
    with pytest.raises(EnvironmentFailure, match="no-such-python"):
        await broken.run({}, ("true",))
    await broken.close()


def test_a_container_gets_every_limit(tmp_path: Path) -> None:
    """No network, no rights but those of the supervisor, read-only, memory, processes and disk."""
    argv_of = ("session-1", "image:1", "python3", tmp_path, LIMITS)
    argv = container_argv("docker", *argv_of)
    text = " ".join(argv)
    for words in (
        "--network none",
        "--read-only",
        "--cap-drop ALL",
        "--security-opt no-new-privileges",
        f"--memory {174 * 2**20}b --memory-swap {174 * 2**20}b",
        "--pids-limit 26",
        f"--tmpfs /box:rw,nosuid,nodev,exec,size={10 * 2**20},nr_inodes=15",
        f"--volume {tmp_path}:/outloop:ro",
        "--name session-1",
    ):
        assert words in text
    added = {argv[i + 1] for i, word in enumerate(argv) if word == "--cap-add"}
    assert added == {"SETUID", "SETGID", "CHOWN", "KILL", "DAC_OVERRIDE"}
    assert argv.index("image:1") > max(i for i, word in enumerate(argv) if word == "--cap-add")
    assert "--privileged" not in argv
    assert "nr_inodes" not in " ".join(container_argv("/usr/bin/podman", *argv_of))


@pytest.mark.medium
async def test_plain_programs_are_limited_and_cleaned_up() -> None:
    """The subprocess backend bounds each process, keeps nothing, and says what it is."""
    sandbox = SubprocessSandbox(Limits(memory_bytes=200 * 2**20, wall_s=20))
    assert "nothing protects this machine" in sandbox.enforcement
    async with sandbox.session() as session:
        place = await session.run({"a.py": "import os; print(os.getcwd())"}, ("python", "a.py"))
        assert not Path(place.stdout.decode().strip()).exists()
        big = await session.run({"a.py": "bytearray(2**30)"}, ("python", "a.py"))
        assert b"MemoryError" in big.stderr
        slow = Limits(memory_bytes=200 * 2**20, wall_s=0.5)
        code = {"a.py": "import os, time; print(os.getpid(), flush=True); time.sleep(60)"}
        late = await session.run(code, ("python", "a.py"), slow)
        assert late.ended == "wall_time"
    await sandbox.close()
    assert not Path(place.stdout.decode().strip()).parent.exists()


def test_why_there_are_no_cgroups_is_reported(tmp_path: Path) -> None:
    """A delegated group that cannot be used says so in words."""
    assert cgroups.find_cgroups(tmp_path / "no-such-group")[0] is None
    assert "no-such-group" in cgroups.find_cgroups(tmp_path / "no-such-group")[1]


def test_a_delegated_group_of_version_2_is_used(tmp_path: Path) -> None:
    """Limits are written where the kernel looks for them, below the group that was named."""
    (tmp_path / "cgroup.subtree_control").write_text("memory pids")
    found, reason = cgroups.find_cgroups(tmp_path)
    assert found is not None, reason
    assert found.version == 2
    made = found.create(LIMITS)
    folder = made.folders["memory"]
    assert (folder / "memory.max").read_text() == str((100 + 10 + 64) * 2**20)
    assert (folder / "pids.max").read_text() == "26"
    (folder / "memory.events").write_text("oom 4\noom_kill 3\n")
    assert made.oom_kills() == 3


def test_groups_of_killed_runners_are_removed(tmp_path: Path) -> None:
    """Those of a process that is no more go; those of living ones stay."""
    (tmp_path / "cgroup.subtree_control").write_text("memory pids")
    ended = subprocess.Popen(["true"])
    ended.wait()
    dead, alive = (tmp_path / f"outloop-{pid}-0" for pid in (ended.pid, os.getpid()))
    dead.mkdir()
    alive.mkdir()
    assert cgroups.find_cgroups(tmp_path)[0] is not None
    assert (dead.exists(), alive.exists()) == (False, True)
