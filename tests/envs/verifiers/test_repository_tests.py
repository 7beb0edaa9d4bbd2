"""Tests of a repository: what tests leave to each other, what they may say, what can be left."""

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from outloop.buffer.errors import EnvironmentFailure, SettingsError
from outloop.buffer.records import Task
from outloop.envs.adapters import software
from outloop.envs.adapters.software import Software, TooManyFiles
from outloop.envs.verifiers.repository_tests import RepositoryTests, read_files, says_so

FIXED = b"def double(x):\n    return 2 * x\n"
CHECK = "import sys, src.code as c, lib.base as b; print(c.double(int(sys.stdin.read())) + b.add)"
TESTS = [
    {"command": ["python3", "check.py"], "stdin": "4", "stdout": "18"},
    {"command": ["python3", "check.py"], "stdin": "5", "stdout": "20"},
]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A revision `first`: a wrong function in src, and what it needs in lib."""
    folder = tmp_path / "project"
    for name, text in {
        "src/code.py": "def double(x):\n    return x\n",
        "lib/base.py": "add = 10\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (["init", "-q"], ["add", "--all"], ["commit", "-qm", "one"], ["tag", "first"]):
        subprocess.run(["git", "-C", folder, *who, *words], check=True)
    return folder


@pytest.fixture
async def verifier() -> AsyncIterator[RepositoryTests]:
    """A verifier that gives the share of the tests."""
    made = RepositoryTests(gives_part=True)
    yield made
    await made.tear_down()


def task_of(project: Path, **fields: Any) -> Task:
    """A task on the project."""
    payload = {
        "repository": str(project),
        "revision": "first",
        "issue": "Doubling is wrong.",
        "editable": ["src"],
        "tests": TESTS,
        "hidden_files": {"check.py": CHECK},
    }
    return Task(task_id="t", payload=payload | fields)


def leaves(code: str) -> bytes:
    """A wrong function that runs `code` when it is called."""
    return f"import os\ndef double(x):\n{code}\n    return x\n".encode()


@pytest.mark.medium
@pytest.mark.parametrize(
    "code",
    [
        "    open('lib/base.py', 'w').write('add = 15')",
        "    os.rename('lib', 'old'); os.mkdir('lib'); open('lib/base.py', 'w').write('add = 15')",
        "    open('lib/__init__.py', 'w').write('import sys; sys.stdout.write(\"20\"); import os; "
        "sys.stdout.flush(); os._exit(0)')",
        "    open('sitecustomize.py', 'w').write('print(20)'); open('src/code.py', 'w').write('x')",
        "    open('/tmp/left', 'w').write('x') if not os.path.exists('/tmp/left') else print(20)",
        "    open('/dev/shm/x', 'w') if not os.path.exists('/dev/shm/x') else print(20)",
        "    os.chmod('lib/base.py', 0)\n    os.chmod('lib', 0)",
        "    import shutil; shutil.rmtree('lib')",
        "    os.fork() or (os.setsid(), __import__('time').sleep(30))",
    ],
)
async def test_what_one_test_leaves_the_next_does_not_find(
    project: Path, verifier: RepositoryTests, code: str
) -> None:
    """The first test runs the policy's code; the third is right whatever that left."""
    untouched = {"command": ["python3", "-c", "import lib.base as b; print(b.add)"], "stdout": "10"}
    task = task_of(project, tests=[*TESTS, untouched])
    files = {"src/code.py": leaves(code)}
    assert await verifier.score(task, files) == pytest.approx(1 / 3)


@pytest.mark.medium
async def test_every_test_finds_what_the_build_made(
    project: Path, verifier: RepositoryTests
) -> None:
    """In the folder and in /tmp, with its modes."""
    build = ["sh", "-c", "echo 10 > made; echo 7 > /tmp/made; chmod 400 made; mkdir -p out/deep"]
    test = {"command": ["sh", "-c", "cat made /tmp/made; rm -f made /tmp/made; ls out"],
            "stdout": "10\n7\ndeep"}  # fmt: skip
    task = task_of(project, build=build, tests=[TESTS[0], test, test])
    assert await verifier.score(task, {"src/code.py": FIXED}) == 1.0


@pytest.mark.medium
async def test_a_file_may_become_a_folder_and_a_folder_a_file(
    project: Path, verifier: RepositoryTests
) -> None:
    """A module that grew into a package is scored as it is; so is the way back."""
    package = {"src/code/__init__.py": b"from src.code.it import double\n", "src/code/it.py": FIXED}
    assert await verifier.score(task_of(project), package) == 1.0
    both = task_of(project, editable=["src", "lib"])
    assert await verifier.score(both, {"src/code.py": FIXED, "lib": b"no folder"}) == 0.0


@pytest.mark.medium
@pytest.mark.parametrize(
    ("check", "stdout"),
    [
        ("n = sum(c.double(i) == 2 * i for i in range(5)); print('n', n, 'of 5')", "n 5 of 5"),
        ("assert c.double(4) == 8; print('checked 4711')", "checked 4711"),
        ("print('0x10' if c.double(3) in [6] and not c.double(1) != 2 else 'no')", "0x10"),
        ("print({True: 'a', False: 'b'}[bool(c.double(3) - 6 >= 0)] * 9)", "aaaaaaaaa"),
    ],
)
async def test_tests_that_judge_by_themselves_are_refused(
    project: Path, verifier: RepositoryTests, check: str, stdout: str
) -> None:
    """An object that is equal to everything would pass them; no attempt is scored by them."""
    hidden = {"check.py": f"import src.code as c; {check}"}
    test = {"command": ["python3", "check.py"], "stdout": stdout}
    task = task_of(project, tests=[test], hidden_files=hidden)
    with pytest.raises(EnvironmentFailure, match="a verdict printed"):
        await verifier.score(task, {"src/code.py": FIXED})


@pytest.mark.medium
async def test_tests_that_the_revision_passes_are_refused(
    project: Path, verifier: RepositoryTests
) -> None:
    """Nothing would have to be done."""
    test = {"command": ["python3", "-c", "print(6 * 7)"], "stdout": "42"}
    with pytest.raises(EnvironmentFailure, match="all tests pass on the revision as it is"):
        await verifier.score(task_of(project, tests=[test]), {"src/code.py": FIXED})


@pytest.mark.parametrize(
    ("stdout", "is_verdict"),
    [
        *((text, True) for text in (None, "", " \n", "ok", "OK.", "2 of 2 right", "3 passed",
                                    "All tests passed!", "passed", "5/5 correct", "tests ok")),
        *((text, False) for text in ("-165", "True", "3", "pass 4 of 5", "right: 8", "ok then",
                                     "{}x", "Passau", "yes", "1 2 3")),
    ],
)  # fmt: skip
def test_an_output_that_only_says_that_all_is_well_is_a_verdict(
    project: Path, stdout: str | None, is_verdict: bool
) -> None:
    """It is refused when the task is made, too."""
    assert says_so(stdout) == is_verdict
    test = {"command": ["make"], "stdout": stdout}
    if is_verdict:
        with pytest.raises(SettingsError, match="a verdict printed"):
            software.task(project, "first", "x", editable=["src"], tests=[test])


@pytest.mark.medium
async def test_a_large_file_costs_the_runner_neither_memory_nor_its_loop(project: Path) -> None:
    """One of 200 MB is left out; many of 5 MB are too many; the event loop goes on meanwhile."""
    adapter = Software()
    task = task_of(project, memory_mb=512)
    gaps: list[float] = []

    async def tick() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - before)

    ticking = asyncio.create_task(tick())
    async with adapter.attempt(task) as attempt:
        await attempt.bash("head -c 200M /dev/zero > src/big")
        assert await attempt.score() == 0.0
        await attempt.bash(
            "rm src/big; for i in 1 2 3 4 5 6; do head -c 7M /dev/zero > src/$i; done"
        )
        assert await attempt.score() == 0.0
        await attempt.bash("for i in $(seq 12); do head -c 7M /dev/zero > src/$i; done")
        with pytest.raises(TooManyFiles, match="at most 67108864"):
            await attempt.score()
    ticking.cancel()
    await adapter.tear_down()
    assert max(gaps) < 1.0


@pytest.mark.medium
def test_what_an_agent_left_is_read_whatever_its_shape(tmp_path: Path) -> None:
    """Deep folders, links, FIFOs and names that are no text are no trouble."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src/code.py").write_bytes(FIXED)
    (tmp_path / "src/link").symlink_to("/etc/passwd")
    (tmp_path / "out").symlink_to("/etc")
    os.mkfifo(tmp_path / "src/pipe")
    (tmp_path / os.fsdecode(b"src/\xff")).write_bytes(b"x")
    here = os.open(tmp_path / "src", os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    found = read_files(tmp_path, ["src", "out", "none"])
    subprocess.run(["rm", "-rf", tmp_path / "src/d"], check=True)
    assert found == {"src/code.py": FIXED, os.fsdecode(b"src/\xff"): b"x"}
