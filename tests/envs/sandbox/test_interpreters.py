"""Shells and Pythons that keep their state, on every backend."""

import asyncio
import os
import time
from collections.abc import AsyncIterator

import pytest

from outloop.buffer.errors import SettingsError
from outloop.envs.sandbox.api import Limits, RunResult, Sandbox, Session
from outloop.envs.sandbox.backends import open_sandbox
from outloop.envs.sandbox.bubblewrap import BubblewrapSandbox
from outloop.envs.sandbox.container import ContainerSandbox
from outloop.envs.sandbox.session import SupervisedSession

MB = 2**20
LIMITS = Limits(
    wall_s=20,
    cpu_s=5,
    memory_bytes=256 * MB,
    max_processes=24,
    disk_bytes=8 * MB,
    output_bytes=4096,
)


@pytest.fixture(
    params=[
        "bubblewrap",
        "subprocess",
        pytest.param("container", marks=pytest.mark.container),
    ]
)
async def session(request: pytest.FixtureRequest) -> AsyncIterator[Session]:
    """A session of each backend; containers by `make test-container IMAGE=...`."""
    made: Sandbox
    if request.param == "bubblewrap":
        made = BubblewrapSandbox(LIMITS)
    elif request.param == "container":
        made = ContainerSandbox(LIMITS, image=os.environ["OUTLOOP_SANDBOX_IMAGE"])
    else:
        made = open_sandbox(request.param, LIMITS)
    async with made.session() as opened:
        yield opened
    await made.close()


def shown(result: RunResult) -> tuple[int | None, str]:
    """Exit code and stdout."""
    return result.exit_code, result.stdout.decode()


async def test_a_shell_keeps_its_state(session: Session) -> None:
    """Variables, functions, working folder, options and background processes; each input has an
    exit code and output of its own, and standard input is empty."""
    async with session.interpreter("bash") as shell:
        first = await shell.run("a=1; f() { echo f $1; }; mkdir -p sub; cd sub; sleep 60 & false")
        assert shown(first) == (1, "")
        kept = await shell.run('f "$a"; basename "$PWD"; jobs -r | wc -l | tr -d " "; cat')
        assert shown(kept) == (0, "f 1\nsub\n1\n")
        quoted = await shell.run(
            "echo 'it'\"'\"'s' \"\\$a\"\necho two; echo no >&2; break; (exit 7)"
        )
        assert shown(quoted) == (7, "it's $a\ntwo\n")
        assert quoted.stderr.startswith(b"no\n")
        wrong = await shell.run("if [")
        assert wrong.exit_code not in (0, None)
        assert b"syntax error" in wrong.stderr
        assert shown(await shell.run("echo $a; echo $((a + 1))\0")) == (0, "1\n2\n")
    kept = await session.run({}, ("ls",), keep_files=True)
    assert kept.stdout == b"sub\n", "its files are the session's"


async def test_a_python_keeps_its_state(session: Session) -> None:
    """Names and modules; the value of a last expression is shown, and a traceback of the input's
    own frames. `exit` ends the input alone; a fork that is left answers nothing."""
    async with session.interpreter("python") as python:
        assert shown(await python.run("import os\nx = [1]\ndef f(y):\n    return y / 0")) == (0, "")
        assert shown(await python.run("x.append(2)\nx")) == (0, "[1, 2]\n")
        failed = await python.run("print('before')\nf(1)")
        assert shown(failed) == (1, "before\n")
        lines = failed.stderr.decode().splitlines()
        assert lines[-1].startswith("ZeroDivisionError")
        assert [line.split(",")[0] for line in lines if "File" in line] == [
            '  File "<input 3>"',
            '  File "<input 1>"',
        ]
        assert (await python.run("raise SystemExit(4)")).exit_code == 4
        assert (await python.run("def")).stderr.rstrip().endswith(b"invalid syntax")
        assert (await python.run("os.fork() and None")).exit_code == 0
        assert shown(await python.run("x and '\ud83d'.isalpha()"))[0] in (0, 1)
        assert "[1, 2]" in (await python.run("x")).stdout.decode()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("kind", "ending", "check"),
    [
        ("bash", "sleep 30", "echo [$x]"),
        ("python", "while True: pass", "print(globals().get('x'))"),
    ],
)
async def test_one_that_takes_too_long_is_begun_again(
    session: Session, kind: str, ending: str, check: str
) -> None:
    """Which the result says; files stay, and what it had left running is gone."""
    async with session.interpreter(kind) as one:  # type: ignore[arg-type]
        await one.run("x=1" if kind == "bash" else "x = 1; open('left', 'w').close()")
        began = time.monotonic()
        late = await one.run(ending, wall_s=0.5)
        assert (late.ended, late.exit_code, late.lost_state) == ("wall_time", None, True)
        assert 0.4 < late.wall_s < time.monotonic() - began < 10
        again = await one.run(check)
        assert (shown(again), again.lost_state) == (
            (0, "[]\n" if kind == "bash" else "None\n"),
            False,
        )
    if kind == "python":
        assert (await session.run({}, ("ls",), keep_files=True)).stdout == b"left\n"


@pytest.mark.medium
async def test_one_that_ends_is_begun_again(session: Session) -> None:
    """By its own exit, by a signal, or by closing the line to us; never an error of ours."""
    async with session.interpreter("bash") as shell:
        gone = await shell.run("x=1; echo bye; exit 3")
        assert (gone.ended, shown(gone), gone.lost_state) == ("exited", (3, "bye\n"), True)
        assert shown(await shell.run("echo [$x]")) == (0, "[]\n")
        killed = await shell.run("kill -9 $$")
        assert (killed.ended, killed.signal, killed.lost_state) == ("signaled", 9, True)
        replaced = await shell.run("exec sleep 0")
        assert (replaced.ended, replaced.lost_state) == ("exited", True)
        assert shown(await shell.run("echo fine")) == (0, "fine\n")
    async with session.interpreter("python") as python:
        assert (await python.run("import os; os.close(3)")).lost_state
        assert shown(await python.run("1 + 1")) == (0, "2\n")
        await python.run("import os; null = os.open('/dev/null', 2)")
        silent = await python.run("os.dup2(null, 3) and None", wall_s=0.5)
        assert (silent.ended, silent.lost_state) == ("wall_time", True)


@pytest.mark.medium
async def test_each_input_has_its_own_output(session: Session) -> None:
    """Of which so much is kept as the limits say; a flood ends it; what is written between two
    inputs is in the second's."""
    async with session.interpreter("bash") as shell:
        long = await shell.run("head -c 10000 /dev/zero | tr '\\0' x")
        assert (long.is_output_cut, len(long.stdout), long.lost_state) == (True, 4096, False)
        assert shown(await shell.run("echo short")) == (0, "short\n")
        await shell.run("(sleep 0.3; echo later; touch done) &")
        late = await shell.run("while [ ! -e done ]; do sleep 0.05; done; echo now")
        assert shown(late) == (0, "later\nnow\n")
        flood = await shell.run("yes")
        assert (flood.ended, flood.lost_state) == ("output", True)
        await shell.run("(sleep 0.1; exec yes) &")
        await asyncio.sleep(2)
        after = await shell.run("echo hi")
        assert (after.ended, after.lost_state) == ("output", True), "between inputs too"
        assert b"the input was not run" in after.stderr
        assert shown(await shell.run("echo hi")) == (0, "hi\n")


@pytest.mark.medium
async def test_a_wrong_answer_is_its_own(session: Session) -> None:
    """A policy that finds the line says nothing of other inputs: each has a token of its own."""
    async with session.interpreter("python") as python:
        for spam in ("b'0 9\\n' * 9999", "b'no line'", "bytes(5000)"):
            await python.run(f"import os; os.write(3, {spam}) and None", wall_s=1)
            late = await python.run("2 + 2", wall_s=1)
            assert shown(late) == (0, "4\n") or late.lost_state
    async with session.interpreter("bash") as shell:
        assert shown(await shell.run("echo fine")) == (0, "fine\n")


async def test_what_it_cannot_do_is_refused(session: Session) -> None:
    """Other calls while it is open, a second one, and more time than the limits'."""
    async with session.interpreter("bash") as shell:
        for other in (session.run({}, ("true",)), session.interpreter("python").__aenter__()):
            with pytest.raises(SettingsError, match="an interpreter of this session is open"):
                await other
        with pytest.raises(SettingsError, match=r"wall_s=60; above 0 and at most limits.wall_s=20"):
            await shell.run("true", wall_s=60)
        assert (await shell.run("true")).is_ok
    assert (await session.run({}, ("true",))).is_ok
    with pytest.raises(SettingsError, match=r"limits.wall_s=99"):
        await session.interpreter("bash", Limits(wall_s=99)).__aenter__()
    with pytest.raises(SettingsError, match="kind='ruby'"):
        await session.interpreter("ruby").__aenter__()  # type: ignore[arg-type]


@pytest.mark.medium
@pytest.mark.parametrize("uses_cgroups", [True, False])
async def test_nothing_outlives_it(uses_cgroups: bool) -> None:
    """Its processes, detached ones too, end with the context; memory is bounded over all of them,
    also between inputs."""
    sandbox = BubblewrapSandbox(LIMITS, uses_cgroups=uses_cgroups)
    async with sandbox.session() as session:
        async with session.interpreter("bash") as shell:
            beat = "while true; do echo x >> beat; sleep 0.02; done"
            await shell.run(f"setsid bash -c {beat!r} > /dev/null 2>&1 &")
            grown = await shell.run(
                "while [ ! -s beat ]; do sleep 0.02; done; echo beats", wall_s=10
            )
            assert shown(grown) == (0, "beats\n")
        size = [await session.run({}, ("wc", "-c", "beat"), keep_files=True) for _ in range(2)]
        assert size[0].stdout == size[1].stdout
        async with session.interpreter("python") as python:
            greedy = "x = bytearray(b'x') * (400 * 2**20)"
            result = await python.run(greedy)
            assert result.ended == "memory" or b"MemoryError" in result.stderr
            assert shown(await python.run("1")) == (0, "1\n")
            await python.run(f"import threading\ndef grow():\n    global x\n    {greedy}")
            await python.run("threading.Timer(0.2, grow).start()")
            await asyncio.sleep(2)
            result = await python.run("len(x)")
            assert result.ended == "memory" or b"MemoryError" in result.stderr
    await sandbox.close()


@pytest.mark.medium
async def test_a_cancelled_input_does_not_answer_the_next(sandbox: Sandbox) -> None:
    """The session begins again, and so do the files."""
    async with sandbox.session() as session, session.interpreter("bash") as shell:
        await shell.run("x=1; touch file")
        running = asyncio.create_task(shell.run("sleep 5; echo late"))
        await asyncio.sleep(0.2)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert shown(await shell.run("echo [$x]; ls")) == (0, "[]\n")


@pytest.mark.medium
async def test_a_session_that_is_killed_is_a_result(sandbox: Sandbox) -> None:
    """Of the input under way; then it begins again."""
    async with sandbox.session() as session:
        assert isinstance(session, SupervisedSession)
        async with session.interpreter("bash") as shell:
            await shell.run("true")
            pid = session.pid
            running = asyncio.create_task(shell.run("sleep 10"))
            await asyncio.sleep(0.2)
            os.kill(pid, 9)
            result = await running
            assert (result.ended, result.lost_state) == ("killed", True)
            assert shown(await shell.run("echo on")) == (0, "on\n")
