"""Finding the user's rollout function, and what is said when it is not right."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from outloop.buffer.errors import SettingsError
from outloop.buffer.records import Task
from outloop.buffer.settings import Settings
from outloop.buffer.user_code import import_object
from outloop.envs.command_agent.verifier import load_verifier, verify
from outloop.envs.rollout.rollout_function import load_rollout
from outloop.envs.runner.preflight import check_rollout
from outloop.envs.verifiers.result import Result

GOOD = """
import functools


async def play(task, episode):
    return 1.0


async def play_default(task, episode, temperature=1.0):
    return 1.0


def blocking(task, episode):
    return 1.0


async def one(task):
    return 1.0


async def three(task, episode, more):
    return 1.0


async def keyword_only(*, task, episode):
    return 1.0


async def generator(task, episode):
    yield 1.0


class Player:
    async def __call__(self, task, episode):
        return 1.0


class Stateful:
    def __init__(self, size=1):
        self.size = size

    async def play(self, task, episode):
        return 1.0


class Picky(Stateful):
    def __init__(self, size):
        self.size = size


class Fragile(Stateful):
    def __init__(self):
        raise KeyError("x")


class Whole:
    async def rollout(self, tasks, context):
        pass


class Both(Stateful, Whole):
    pass


async def rollout(tasks, context):
    pass


async def mixed(tasks, episode):
    return 1.0


def blocking_rollout(tasks, context):
    pass


def from_slime(args, rollout_id, data_source, evaluation=False):
    pass


player = Player()
partial = functools.partial(play_default, temperature=0.5)
number = 3


def tasks():
    return [{"question": "1+1"}]
"""


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("play", "async"),
        ("play_default", "async"),
        ("player", "async"),
        ("partial", "async"),
        ("Stateful", "async"),
        ("blocking", "blocking"),
        ("rollout", "batch"),
        ("Whole", "batch"),
    ],
)
def test_every_form_is_recognised_by_its_signature(
    name: str, kind: str, folder: Path, make_settings: Callable[..., Settings]
) -> None:
    """Functions, callables, partials and classes; one task or many; async or blocking."""
    (folder / "user.py").write_text(GOOD)
    loaded = load_rollout(make_settings(rollout_function_path=f"user:{name}").env)
    assert callable(loaded.call)
    assert loaded.kind == kind


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("user", ["'user'", "package.module:function"]),
        ("user:plya", ["has no 'plya'", "did you mean 'play'?"]),
        ("usr:play", ["no module 'usr'", "did you mean 'user'?"]),
        ("user.sub:play", ["user.sub"]),
        ("user:one", ["signature (task)", "(task, episode)", "async def play(task, episode)"]),
        ("user:three", ["signature (task, episode, more)", "'more'"]),
        ("user:keyword_only", ["positional", "(task, episode)"]),
        ("user:blocking_rollout", ["blocking function", "async def rollout(tasks, context)"]),
        ("user:generator", ["is a generator", "return the reward"]),
        ("user:Player", ["is a class with neither play nor rollout", "async def play(self"]),
        ("user:Both", ["is a class with play and rollout", "one method"]),
        ("user:Picky", ["cannot be called without arguments", "'size'", "set_up"]),
        ("user:Fragile", ["its constructor raised KeyError", "set_up"]),
        ("user:mixed", ["(tasks, episode)", "neither (task, episode) nor (tasks, context)"]),
        ("user:from_slime", ["slime's signature", "docs/coming-from-slime.md"]),
        ("user:number", ["is a int"]),
        ("broken:play", ["ZeroDivisionError", "broken.py:1"]),
        ("needs:play", ["ModuleNotFoundError", "no_such_package"]),
        ("exits:play", ["SystemExit"]),
    ],
)
def test_a_wrong_path_is_a_sentence(
    path: str, words: list[str], folder: Path, make_settings: Callable[..., Settings]
) -> None:
    """Each wrong step names the setting, what is there, and what to do, in one line."""
    (folder / "user.py").write_text(GOOD)
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "needs.py").write_text("import no_such_package\n")
    (folder / "exits.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(SettingsError) as caught:
        load_rollout(make_settings(rollout_function_path=path).env)
    sentence = str(caught.value)
    assert "env.rollout_function_path" in sentence
    assert "\n" not in sentence
    assert [word for word in words if word not in sentence] == []


def test_a_missing_path_is_a_sentence(make_settings: Callable[..., Settings]) -> None:
    """Without a rollout function there is nothing to play with."""
    with pytest.raises(SettingsError, match="rollout_function_path is missing"):
        load_rollout(make_settings(rollout_function_path=None).env)


def test_import_dir_is_searched_after_the_working_directory(folder: Path) -> None:
    """The folder of the settings file serves when the working directory has no such module."""
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere/only_there.py").write_text("value = 'there'\n")
    (folder / "elsewhere/both_places.py").write_text("value = 'there'\n")
    (folder / "both_places.py").write_text("value = 'here'\n")
    found = [
        import_object(f"{name}:value", setting="s", import_dir=Path("elsewhere"))
        for name in ("only_there", "both_places")
    ]
    assert found == ["there", "here"]


@pytest.mark.medium
def test_the_check_is_a_program_with_a_sentence(
    folder: Path, make_settings: Callable[..., Settings]
) -> None:
    """The launcher's check ends with 0 or 2, and its last line is the sentence."""
    (folder / "user.py").write_text(GOOD)
    answers = [
        subprocess.run(
            [
                sys.executable,
                "-m",
                "outloop.envs.runner.preflight",
                settings.model_dump_json(),
                str(folder),
            ],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        for settings in (make_settings(), make_settings(rollout_function_path="user:plya"))
    ]
    assert [answer.returncode for answer in answers] == [0, 2]
    assert "did you mean 'play'?" in answers[1].stderr.strip().splitlines()[-1]


def test_the_check_reads_tasks_and_conversations_too(
    folder: Path, make_settings: Callable[..., Settings]
) -> None:
    """What the runner would stumble over later is refused before anything is started."""
    (folder / "user.py").write_text(GOOD)
    check_rollout(make_settings())
    with pytest.raises(SettingsError, match="did you mean 'tasks'"):
        check_rollout(make_settings(tasks="user:task"))
    with pytest.raises(SettingsError, match="needs env.conversations"):
        check_rollout(make_settings(trainer={"mode": "sft"}))
    with pytest.raises(SettingsError, match="holds no list of messages"):
        check_rollout(make_settings(trainer={"mode": "sft"}, conversations="user:tasks"))


USES_A_VERIFIER = """
from outloop.envs.verifiers.result import Result
from outloop.envs.verifiers.math_equivalence import Math

right = Math()


async def play(task, episode):
    return await right(task, Result(answer="4/2"))


async def verify(task, result):
    return await right(task, Result(answer="4/2"))


async def tear_down():
    await right.tear_down()


def tasks():
    return [{"question": "1+1", "answer": "2"}]
"""


@pytest.mark.medium
@pytest.mark.parametrize("is_rollout", [True, False])
async def test_a_module_is_called_when_the_run_is_over(
    is_rollout: bool, make_settings: Callable[..., Settings], folder: Path
) -> None:
    """Its `tear_down` is called for its functions: what their verifiers started has ended."""
    (folder / "user.py").write_text(USES_A_VERIFIER)
    env = make_settings(verifier="user:verify").env
    task = Task(task_id="t", payload={"question": "1+1", "answer": "2"})
    before = set(psutil.Process().children(recursive=True))
    if is_rollout:
        rollout = load_rollout(env)
        assert await rollout.call(task, None) == 1.0
    else:
        verifier = load_verifier(env)
        result = Result(answer="")
        reward = await verify(verifier, task, result, timeout_s=60, deadline=time.time() + 60)
        assert reward.value == 1.0
    assert set(psutil.Process().children(recursive=True)) - before
    await (rollout if is_rollout else verifier).tear_down()
    _, alive = psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, timeout=5)
    assert not alive


@pytest.mark.medium
def test_the_check_opens_the_sandbox_of_verifiers(
    folder: Path, make_settings: Callable[..., Settings], tmp_path: Path
) -> None:
    """Those that the module of the function holds; else the sentence says why."""
    verifier = "from outloop.envs.verifiers.code import UnitTests\nverifier = UnitTests()\n"
    (folder / "user.py").write_text(GOOD + verifier)
    check_rollout(make_settings())
    answer = subprocess.run(
        [
            *(sys.executable, "-m", "outloop.envs.runner.preflight"),
            make_settings().model_dump_json(),
        ],
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert answer.returncode == 2
    sentence = answer.stderr.strip().splitlines()[-1]
    assert "UnitTests: its sandbox cannot be used here: sandbox='bubblewrap'" in sentence
    assert "install the package bubblewrap" in sentence


SHADOWS = ("secrets", "calendar", "queue", "random", "types", "json")


async def test_files_named_like_pythons_modules_break_no_part(
    router: Any, play_with: Callable[..., Any], folder: Path
) -> None:
    """Each imports Python's own, and the rollout function is found."""
    for name in SHADOWS:
        (folder / f"{name}.py").write_text("KEY = 'the user has keys here'\n")
    imports = "\n    ".join(f"import {name}; assert not hasattr({name}, 'KEY')" for name in SHADOWS)
    source = f"async def play(task, episode):\n    {imports}\n    return 1.0\n"
    await play_with(router, source, num_workers=1, timeout_s=60)
    assert router.closed("error") == [""] * 4


def test_a_file_that_python_has_a_module_of_is_named(
    folder: Path, make_settings: Callable[..., Settings]
) -> None:
    """As the module of the function, and as what that imports."""
    (folder / "queue.py").write_text("def play(task, episode):\n    return 1.0\n")
    (folder / "own.py").write_text("from queue import play\n")
    for path in ("queue:play", "own:play"):
        with pytest.raises(SettingsError, match=r"names of queue\.py"):
            load_rollout(make_settings(rollout_function_path=path).env)
