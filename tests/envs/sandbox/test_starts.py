"""Starts of sessions: many at once, and some that hang."""

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outloop.buffer.errors import EnvironmentFailure
from outloop.envs.sandbox.api import Limits
from outloop.envs.sandbox.bubblewrap import BubblewrapSandbox

LIMITS = Limits(wall_s=20, memory_bytes=128 * 2**20)
NUM_SESSIONS = 40
HANGS = """#!/bin/sh
if mkdir {once} 2>/dev/null; then sleep 60; fi
exec {bwrap} "$@"
"""
BUSY = """
import os, time
end = time.monotonic() + 3
for _ in range(int(os.environ["NUM"])):
    if os.fork() == 0:
        os.setsid()
        while time.monotonic() < end: pass
        os._exit(0)
while True:
    try: os.wait()
    except ChildProcessError: break
"""


@pytest.fixture
def bwrap_that_hangs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Put a bwrap on PATH that hangs where the folder `once/taken` beside it can be made."""
    real = shutil.which("bwrap")
    with tempfile.TemporaryDirectory(prefix="outloop-bwrap-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "once").mkdir()
        (folder / "once").chmod(0o777)
        program = folder / "bwrap"
        program.write_text(HANGS.format(once=folder / "once/taken", bwrap=real))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        yield program


@pytest.mark.slow
async def test_a_start_that_hangs_costs_itself_and_is_made_again(bwrap_that_hangs: Path) -> None:
    """The others of the storm are served meanwhile."""
    sandbox = BubblewrapSandbox(LIMITS)
    started = time.monotonic()

    async def first_command() -> float:
        async with sandbox.session() as session:
            assert (await session.run({}, ("true",))).is_ok
        return time.monotonic() - started

    took = sorted(await asyncio.gather(*(first_command() for _ in range(8))))
    await sandbox.close()
    assert (bwrap_that_hangs.parent / "once/taken").exists()
    assert took[-2] < took[-1] / 2


async def test_a_start_that_fails_twice_is_the_environments_failure(
    bwrap_that_hangs: Path,
) -> None:
    """Its sentence holds what bubblewrap wrote."""
    bwrap_that_hangs.write_text("#!/bin/sh\necho no namespaces >&2; exit 1\n")
    sandbox = BubblewrapSandbox(LIMITS)
    with pytest.raises(EnvironmentFailure, match="no namespaces"):
        await sandbox.run({}, ("true",))
    await sandbox.close()


@pytest.mark.medium
async def test_of_many_starts_the_first_are_done_first() -> None:
    """Nobody waits until all have begun, and none fails."""
    sandbox = BubblewrapSandbox(LIMITS)
    started = time.monotonic()

    async def first_command() -> float:
        async with sandbox.session() as session:
            assert (await session.run({}, ("true",))).is_ok
            return time.monotonic() - started

    took = sorted(await asyncio.gather(*(first_command() for _ in range(NUM_SESSIONS))))
    await sandbox.close()
    assert took[0] < took[-1] / 3


@pytest.mark.medium
async def test_a_session_of_many_processes_has_the_share_of_one_session() -> None:
    """Wall time of a neighbour's program is its own, with setsid too."""
    num = 16 * (os.cpu_count() or 1)
    limits = Limits(wall_s=60, cpu_s=60, max_processes=num + 8, memory_bytes=2**30)
    sandbox = BubblewrapSandbox(limits)
    if "share" not in sandbox.enforcement:
        pytest.skip("this machine lends no cpu controller")
    async with sandbox.session() as many, sandbox.session() as one:
        crowd, alone = await asyncio.gather(
            *(
                session.run({"a.py": BUSY}, ("python", "a.py"), environ={"NUM": str(number)})
                for session, number in ((many, num), (one, 1))
            )
        )
    await sandbox.close()
    assert alone.cpu_s > 4 * crowd.cpu_s / num, (alone, crowd)
