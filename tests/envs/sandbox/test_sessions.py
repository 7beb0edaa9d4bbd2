"""Calls in a sandbox: what goes in, what comes back, what stays."""

import asyncio
from pathlib import Path

import pytest

from outloop.buffer.errors import SettingsError
from outloop.envs.sandbox.api import Limits, Program, Sandbox
from outloop.envs.sandbox.bubblewrap import BubblewrapSandbox
from outloop.envs.sandbox.session import SupervisedSession

LIMITS = Limits(wall_s=20, memory_bytes=256 * 2**20, max_processes=16)


async def test_a_program_runs_and_leaves_what_was_asked_for(sandbox: Sandbox) -> None:
    """Files and input go in; output, exit code and collected files come back."""
    code = "import sys; open('out/b', 'w').write(sys.stdin.read()); print(sys.argv); sys.exit(3)"
    result = await sandbox.run(
        {"main.py": code, "out/a": b"1"},
        ("python", "main.py", "x"),
        stdin=b"hello",
        collect=["out/a", "out/b", "out/c"],
    )
    assert (result.ended, result.exit_code) == ("exited", 3)
    assert result.stdout == b"['main.py', 'x']\n"
    assert result.files == {"out/a": b"1", "out/b": b"hello"}


@pytest.mark.medium
async def test_a_fork_of_the_interpreter_looks_like_python(sandbox: Sandbox) -> None:
    """`python script` in the warm interpreter prints what a new interpreter would."""
    code = (
        "import sys, os, atexit\n"
        "atexit.register(print, 'bye')\n"
        "print(__name__, sys.argv[1:], os.path.basename(__file__), __spec__, __doc__)\n"
        "import other\n"
        "print(other.x, sys.stdin.read(), os.environ['A'], os.getcwd())\n"
        "print('to err', file=sys.stderr)\n"
        "def f():\n    raise ValueError('no')\n"
        "f()\n"
    )
    files = {"main.py": code, "other.py": "x = 1"}
    async with sandbox.session() as session:
        forked, fresh = [
            await session.run(files, (name, "main.py", "a"), stdin=b"in", environ={"A": "b"})
            for name in ("python", "python3")
        ]
    assert forked.stdout == fresh.stdout
    assert forked.stderr.replace(b"/work/", b"") == fresh.stderr.replace(b"/work/", b"")
    assert forked.exit_code == fresh.exit_code == 1


@pytest.mark.medium
async def test_files_stay_only_where_they_are_asked_to(sandbox: Sandbox) -> None:
    """Kept files are there for later calls that keep files, and for no others."""
    write = {"w.py": "open('note', 'w').write('x'); open('/tmp/t', 'w').write('y')"}
    read = {"r.py": "import os; print(os.path.exists('note'), os.path.exists('/tmp/t'))"}
    async with sandbox.session() as session:
        await session.run(write, ("python", "w.py"))
        assert (
            await session.run(read, ("python", "r.py"), keep_files=True)
        ).stdout == b"False False\n"
        await session.run(write, ("python", "w.py"), keep_files=True)
        assert (await session.run(read, ("python", "r.py"))).stdout == b"False False\n"
        assert (
            await session.run(read, ("python", "r.py"), keep_files=True)
        ).stdout == b"True True\n"


@pytest.mark.medium
async def test_a_pair_talks_over_its_line_only(sandbox: Sandbox) -> None:
    """Two programs have a socket in common, no files and no processes; the first ends both."""
    first = (
        "import socket; s = socket.socket(fileno=3); s.sendall(b'ping'); print(s.recv(99).decode())"
    )
    second = (
        "import os, socket; s = socket.socket(fileno=3); s.recv(9)\n"
        "pids = [p for p in os.listdir('/proc') if p.isdigit()]\n"
        "s.send(f'{os.listdir()}{len(pids)}'.encode()); s.recv(9)"
    )
    async with sandbox.session() as session:
        one, other = await session.run_pair(
            Program(command=("python", "a.py"), files={"a.py": first, "secret": "42"}),
            Program(command=("python", "b.py"), files={"b.py": second}),
            Limits(wall_s=10, memory_bytes=64 * 2**20, max_processes=4),
        )
    assert one.stdout == b"['b.py']2\n"
    assert one.exit_code == 0
    assert other.ended in ("exited", "partner")


async def test_what_no_session_can_do_is_refused(sandbox: Sandbox) -> None:
    """Limits above the session's, paths outside of the workspace and empty commands are refused."""
    async with sandbox.session() as session:
        with pytest.raises(
            SettingsError, match="limits.memory_bytes=.* is above the session's own"
        ):
            await session.run({}, ("true",), Limits(memory_bytes=2**40))
        for path in ("../x", "/etc/x", "."):
            with pytest.raises(SettingsError, match="below the working directory"):
                await session.run({}, ("true",), collect=[path])
        for command in ((), "ls -l"):
            with pytest.raises(SettingsError, match="a sequence is allowed"):
                await session.run({}, command)
    with pytest.raises(SettingsError, match="max_processes=0"):
        Limits(max_processes=0)


@pytest.mark.medium
async def test_calls_of_one_session_wait_for_each_other(sandbox: Sandbox) -> None:
    """Ten calls at once are ten answers, each its own."""
    async with sandbox.session() as session:
        results = await asyncio.gather(
            *(session.run({"a.py": f"print({n})"}, ("python", "a.py")) for n in range(10))
        )
    assert [int(result.stdout) for result in results] == list(range(10))


async def test_closing_leaves_nothing_behind() -> None:
    """No process, no folder and no control group of a closed sandbox is there."""
    made = BubblewrapSandbox(LIMITS)
    bundle = made.bundle.path
    async with made.session() as session:
        assert isinstance(session, SupervisedSession)
        pid = session.pid
        folders = [*session.cgroup.folders.values()] if session.cgroup else []
        assert Path(f"/proc/{pid}").exists()
    await made.close()
    assert not [path for path in (bundle, Path(f"/proc/{pid}"), *folders) if path.exists()]
