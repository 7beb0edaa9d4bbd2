"""Sessions of one test each: what is killed in them, and what ends them from outside.

Where cgroups can be had they bound these sessions, otherwise the supervisor does.
"""

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest

from outloop.envs.sandbox.api import Limits
from outloop.envs.sandbox.bubblewrap import BubblewrapSandbox

MB = 2**20
LIMITS = Limits(
    wall_s=20, cpu_s=5, memory_bytes=128 * MB, max_processes=12, disk_bytes=4 * MB, max_files=64
)
TOGETHER = (
    "import os\n"
    "first = os.getpid()\n"
    "for _ in range(6): os.fork() if os.getpid() == first else None\n"
    "x = bytearray(os.urandom(1024)) * (60 * 1024)\n"
    "import time; time.sleep(15)"
)


@pytest.mark.medium
async def test_the_sum_is_bounded_from_the_first_call() -> None:
    """Everything that runs in a new session is in its group, which kept its limit."""
    sandbox = BubblewrapSandbox(LIMITS)
    async with sandbox.session() as session:
        assert (await session.run({"a.py": TOGETHER}, ("python", "a.py"))).ended == "memory"
        cgroup = session.cgroup
        peaks = {
            "memory.max_usage_in_bytes": "memory.limit_in_bytes",
            "memory.peak": "memory.max",
        }
        for peak, limit in peaks.items() if cgroup else ():
            folder = cgroup.folders["memory"]
            if (folder / peak).exists():
                assert int((folder / peak).read_text()) <= int((folder / limit).read_text())
    await sandbox.close()


@pytest.mark.medium
async def test_a_child_that_the_kernel_killed_ends_its_call() -> None:
    """A parent that outlives it and exits with 0 has not kept the limits."""
    code = (
        "import os, time\n"
        "if os.fork() == 0: x = bytearray(os.urandom(1024)) * (400 * 1024)\n"
        "else: os.wait()\n"
    )
    sandbox = BubblewrapSandbox(LIMITS)
    async with sandbox.session() as session:
        result = await session.run({"a.py": code}, ("python", "a.py"))
        is_grouped = session.cgroup is not None
        assert result.ended == "memory" or (not is_grouped and b"MemoryError" in result.stderr)
        assert (await session.run({"b.py": "print(1)"}, ("python", "b.py"))).is_ok
    await sandbox.close()


@pytest.mark.medium
async def test_the_supervisors_death_is_survived() -> None:
    """A session whose processes are killed from outside says so once and is replaced."""
    sandbox = BubblewrapSandbox(LIMITS)
    async with sandbox.session() as session:
        first = session.pid
        killer = threading.Timer(0.5, os.kill, (first, signal.SIGKILL))
        killer.start()
        lost = await session.run({"a.py": "import time; time.sleep(60)"}, ("python", "a.py"))
        killer.join()
        assert lost.ended == "killed"
        again = await session.run({"a.py": "print(1)"}, ("python", "a.py"))
        assert again.stdout == b"1\n"
        assert session.pid != first
    await sandbox.close()


@pytest.mark.medium
async def test_an_abandoned_call_ends_with_its_session() -> None:
    """Whoever gives up waiting leaves no program behind, and the next call starts again."""
    sandbox = BubblewrapSandbox(LIMITS)
    async with sandbox.session() as session:
        pid = session.pid
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await session.run({"a.py": "import time; time.sleep(60)"}, ("python", "a.py"))
        assert not Path(f"/proc/{pid}").exists()
        assert (await session.run({"a.py": "print(1)"}, ("python", "a.py"))).stdout == b"1\n"
    await sandbox.close()
