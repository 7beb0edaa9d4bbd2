"""Containers by this machine's engines: `make test-container IMAGE=...`.

The image needs a Python 3.8 or newer as python3. Every engine that answers is tried.
"""

import os
import shutil
import subprocess
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from outloop.envs.sandbox.api import Limits, Program
from outloop.envs.sandbox.container import ContainerSandbox
from outloop.envs.sandbox.session import SupervisedSession

pytestmark = [pytest.mark.container, pytest.mark.asyncio(loop_scope="module")]
MB = 2**20
LIMITS = Limits(
    wall_s=30, cpu_s=5, memory_bytes=128 * MB, max_processes=12, disk_bytes=4 * MB, max_files=64
)
TOGETHER = (
    "import os\n"
    "first = os.getpid()\n"
    "for _ in range(6): os.fork() if os.getpid() == first else None\n"
    "x = bytearray(os.urandom(1024)) * (60 * 1024)\n"
    "import time; time.sleep(25)"
)


def engines() -> list[str]:
    """Those that are here and work; asked only by `make test-container`."""
    if "OUTLOOP_SANDBOX_IMAGE" not in os.environ:
        return ["none"]
    found = [name for name in ("docker", "podman") if shutil.which(name)]
    found = [
        name
        for name in found
        if not subprocess.run(
            [name, "info"], capture_output=True, check=False, timeout=60
        ).returncode
    ]
    return found or ["none"]


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=engines())
async def session(request: pytest.FixtureRequest) -> AsyncIterator[SupervisedSession]:
    """One container for all attacks."""
    assert request.param != "none", "neither docker nor podman answers `info` here"
    sandbox = ContainerSandbox(
        LIMITS, image=os.environ["OUTLOOP_SANDBOX_IMAGE"], engine=request.param
    )
    async with sandbox.session() as opened:
        yield opened
    await sandbox.close()


async def output(session: SupervisedSession, code: str, *, keep_files: bool = False) -> list[str]:
    """What the code prints, in words; the container outlives it."""
    pid = session.pid
    result = await session.run({"a.py": code}, ("python", "a.py"), keep_files=keep_files)
    assert session.pid == pid
    return (result.stdout + result.stderr).decode().split()


async def test_programs_run_and_leave_what_was_asked_for(session: SupervisedSession) -> None:
    """Files in, output and files out, and nothing of it in the next call."""
    result = await session.run(
        {"a.py": "open('out', 'w').write(open('data').read()); print('x')", "data": "42"},
        ("python", "a.py"),
        collect=("out",),
    )
    assert (result.ended, result.stdout, result.files) == ("exited", b"x\n", {"out": b"42"})
    assert await output(session, "import os; print(os.listdir())") == ["['a.py']"]


async def test_the_sum_of_memory_is_bounded(session: SupervisedSession) -> None:
    """Seven processes that together take too much are ended; the container stays."""
    pid = session.pid
    result = await session.run({"a.py": TOGETHER}, ("python", "a.py"))
    assert result.ended == "memory"
    assert session.pid == pid


async def test_processes_and_disk_are_bounded(
    session: SupervisedSession, request: pytest.FixtureRequest
) -> None:
    """A fork bomb is refused more processes, a writer more room; not all count files."""
    brief = Limits(wall_s=2, cpu_s=5, memory_bytes=128 * MB, max_processes=12, disk_bytes=4 * MB,
                   max_files=64)  # fmt: skip
    bomb = (
        "import os\n"
        "while True:\n"
        "    try: os.fork()\n"
        "    except OSError: print('no more', flush=True)\n"
    )
    result = await session.run({"a.py": bomb}, ("python", "a.py"), brief)
    assert result.ended in ("wall_time", "output")
    assert b"no more" in result.stdout
    assert "OSError:" in await output(session, "open('big', 'wb').write(bytes(64 * 2**20))")
    if request.node.callspec.params["session"] == "podman":
        return
    many = "n = 0\nwhile n < 999: open(f'f{n}', 'w').close(); n += 1"
    assert "OSError:" in await output(session, many)


async def test_nothing_outside_can_be_reached(session: SupervisedSession) -> None:
    """No network, no writable system, no signals to others; daemons end with their call."""
    code = (
        "import os, signal, socket\n"
        "try: socket.create_connection(('1.1.1.1', 53), 1); print('network')\n"
        "except OSError: pass\n"
        "for path in ('/etc/x', '/usr/x', '/outloop/x'):\n"
        "    try: open(path, 'w'); print(path)\n"
        "    except OSError: pass\n"
        "for pid in range(1, 100):\n"
        "    if pid == os.getpid(): continue\n"
        "    try: os.kill(pid, 0); print(pid)\n"
        "    except OSError: pass\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    import time; time.sleep(60)\n"
        "print(os.getuid() > 1000)\n"
    )
    assert await output(session, code) == ["True"]
    look = (
        "import os\n"
        "mine = [p for p in os.listdir('/proc') if p.isdigit() "
        "and os.stat(f'/proc/{p}').st_uid == os.getuid()]\n"
        "print(len(mine))"
    )
    assert await output(session, look) == ["1"]


async def test_a_pair_shares_a_socket_and_no_files(session: SupervisedSession) -> None:
    """What unit tests rely on."""
    first = (
        "import socket; s = socket.socket(fileno=3); s.sendall(b'x'); print(s.recv(99).decode())"
    )
    second = (
        "import os, socket; s = socket.socket(fileno=3); s.recv(1)\n"
        "s.send(str(os.listdir()).encode()); s.recv(1)"
    )
    one, _ = await session.run_pair(
        Program(command=("python", "a.py"), files={"a.py": first, "secret": "1"}),
        Program(command=("python", "b.py"), files={"b.py": second}),
    )
    assert one.stdout == b"['b.py']\n"
