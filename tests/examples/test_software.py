"""Repositories with a bug in three languages: fixed, left, and attacked; two steps of training."""

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from outloop.buffer.errors import SettingsError
from outloop.buffer.records import Task
from outloop.envs.adapters import software
from outloop.envs.verifiers.result import Result


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder in which the example makes its repositories once."""
    folder = tmp_path_factory.mktemp("software")
    with contextlib.chdir(folder):
        yield folder


@pytest.fixture
def tasks(workspace: Path, load_example: Callable[..., ModuleType]) -> ModuleType:
    """The example's tasks, with a working folder of their own."""
    return load_example("software", "tasks")


def row_of(tasks: ModuleType, language: str, tag: str) -> dict[str, Any]:
    """The task of one bug."""
    found = [one for one in tasks.rows([tag]) if Path(one["repository"]).name == language]
    return found[0]


def calls_bash(*commands: str) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    """A policy that runs one command after another, and then says that it is done."""

    def answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
        number = sum(message["role"] == "assistant" for message in messages)
        if number == len(commands):
            return {"role": "assistant", "content": "DONE"}
        function = {"name": "bash", "arguments": json.dumps({"command": commands[number]})}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    return answer


@pytest.fixture
async def play(
    tasks: ModuleType,
    load_example: Callable[..., ModuleType],
    open_episode: Callable[..., Any],
    router: Any,
) -> Any:
    """`await play(language, tag, command, ...)`: the reward, and what the policy was shown."""
    rollout = load_example("software", "rollout")

    async def play_one(language: str, tag: str, *commands: str) -> tuple[float, str]:
        shown: list[str] = []
        answer = calls_bash(*commands)

        def note(messages: list[dict[str, Any]]) -> dict[str, Any]:
            shown[:] = [one["content"] for one in messages if one["role"] == "tool"]
            return answer(messages)

        router.answer = note
        task, episode = open_episode(row_of(tasks, language, tag))
        return await rollout.play(task, episode), "\n".join(shown)

    yield play_one
    await rollout.tear_down()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("language", "tag", "fix"),
    [
        ("python", "clamp-1", "sed -i 's/x <= low - 2/x < low/' src/rules.py"),
        ("javascript", "sign-2", "sed -i 's/if (x < 0) return 1/if (x < 0) return -1/' src/*.mjs"),
        ("c", "gcd-2", "sed -i 's/b % a/a % b/' src/rules.c && gcc -c -o /dev/null src/rules.c"),
    ],
)
async def test_a_fix_passes_and_the_bug_does_not(
    play: Any, tasks: ModuleType, language: str, tag: str, fix: str
) -> None:
    """In each language; `main` is right as well."""
    reward, shown = await play(language, tag, "ls src", fix)
    assert "rules" in shown
    assert reward == 1.0
    assert (await play(language, tag, "ls"))[0] == 0.0
    assert await tasks.score(row_of(tasks, language, tag), True) == 1.0


FORGERIES = {
    "the tests are written over": "echo 'print(1)' > check.py; echo 'print(1)' > src/check.py",
    "the process ends well": "echo 'import os; os._exit(0)' > src/rules.py",
    "hooks of the interpreter": (
        "for f in sitecustomize usercustomize conftest json; do"
        " for d in . src; do echo 'import os; os._exit(0)' > $d/$f.py; done; done"
    ),
    "a constant": "echo 'sign = clamp = gcd = lambda *n: 5' > src/rules.py",
    "nothing is left": "rm -rf src",
    "a pipe in place of the code": "rm src/rules.py; mkfifo src/rules.py",
    "a link out of the repository": "rm -r src; ln -s /usr/lib src",
    "names that are no text": "touch $'src/\\xff' 'src/a\nb'; rm src/rules.py",
    "a process that goes on": "(sleep 60; true) & echo x > src/rules.py; disown",
    "too many files": "cd src; for i in $(seq 900); do echo > $(printf %090d $i); done",
}


@pytest.mark.medium
@pytest.mark.parametrize("forgery", FORGERIES.values(), ids=FORGERIES)
async def test_what_is_no_fix_gets_nothing(play: Any, forgery: str) -> None:
    """Whatever the policy does to the tests, their interpreter, or the repository."""
    try:
        reward, _ = await play("python", "clamp-1", forgery)
    except software.TooManyFiles:
        assert "seq 900" in forgery
    else:
        assert reward == 0.0


@pytest.mark.medium
async def test_the_policy_sees_neither_tests_nor_history(play: Any, tasks: ModuleType) -> None:
    """The revision's files are all there is: no check, no git folder, no other revision."""
    kept = tasks.repositories().parent
    _, shown = await play("python", "clamp-1", f"ls -A . src / /tmp {kept}", "cat src/rules.py")
    assert "low - 2" in shown
    assert f"cannot access '{kept}'" in shown
    assert ".git" not in shown
    assert "check" not in shown


@pytest.mark.medium
async def test_an_agent_program_is_scored_by_what_it_left(
    tasks: ModuleType, load_example: Callable[..., ModuleType], tmp_path: Path
) -> None:
    """In its episode's folder; links there lead nowhere."""
    verifier = load_example("software", "verifier")
    task = Task(task_id="t", payload=row_of(tasks, "python", "clamp-1"))
    source = tmp_path / "repository/src"
    source.mkdir(parents=True)
    (tmp_path / "right.py").write_text(tasks.PYTHON)
    rewards = []
    for prepare in (
        lambda path: path.write_text(tasks.PYTHON),
        lambda path: path.write_text("nonsense"),
        lambda path: (path.unlink(), path.symlink_to(tmp_path / "right.py")),
    ):
        prepare(source / "rules.py")
        rewards.append(await verifier.verify(task, Result(answer="", folder=tmp_path)))
    await verifier.tear_down()
    assert rewards == [1.0, 0.0, 0.0]


@pytest.mark.clients
async def test_mini_swe_agent_fixes_a_repository(
    tasks: ModuleType, load_example: Callable[..., ModuleType], router: Any, tmp_path: Path
) -> None:
    """By its own prompts and tool, in the folder that the verifier reads."""
    row = row_of(tasks, "python", "clamp-1")
    fix = "sed -i 's/x <= low - 2/x < low/' src/rules.py"
    router.answer = calls_bash(fix, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    (tmp_path / "task.json").write_text(json.dumps(row))
    program = Path(tasks.__file__).parent / "mini_swe_agent.py"
    playing = await asyncio.create_subprocess_exec(
        *(os.environ["OUTLOOP_CLIENTS_PYTHON"], program, tmp_path / "task.json"),
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "OPENAI_BASE_URL": f"{router.url}/episodes/ep-0/v1",
            "OPENAI_API_KEY": "ol-ep-ep-0-signature",
            "OUTLOOP_EPISODE_DIR": str(tmp_path),
        },
    )
    assert await asyncio.wait_for(playing.wait(), 200) == 0
    verifier = load_example("software", "verifier")
    task = Task(task_id="t", payload=row)
    assert await verifier.verify(task, Result(answer="", folder=tmp_path)) == 1.0
    await verifier.tear_down()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"revision": "nowhere"}, "git ls-tree: .*nowhere"),
        ({"editable": []}, r"editable=\[\]"),
        ({"editable": ["lib"]}, "has no such path"),
        ({"hidden_files": {"src/check.py": ""}}, "is editable"),
        ({"hidden_files": {"src/rules.py": ""}}, "has it"),
        ({"tests": [{"command": "make test"}]}, "a list of words is allowed"),
        ({"tests": [{"command": ["make"]}]}, "an exit code alone can be forged"),
        ({"tests": [{"command": ["make"], "stdout": "2 of 2 right"}]}, "a verdict printed"),
    ],
)
def test_tasks_that_could_not_be_scored_are_refused(
    tasks: ModuleType, change: dict[str, Any], sentence: str
) -> None:
    """When they are made, with what is allowed."""
    right: dict[str, Any] = {
        "repository": tasks.repositories() / "python",
        "revision": "clamp-1",
        "issue": "x",
        "editable": ["src"],
        "tests": [{"command": ["true"], "stdout": "1"}],
    }
    with pytest.raises(SettingsError, match=sentence):
        software.task(**right | change)


@pytest.mark.medium
def test_held_out_issues_and_bugs_are_not_trained(tasks: ModuleType) -> None:
    """Issues are in one split, and two bugs in each language are in no training task."""
    trained, held_out, unseen = tasks.train_tasks(), tasks.eval_tasks(), tasks.unseen_bug_tasks()
    assert not {row["issue"] for row in trained} & {row["issue"] for row in held_out}
    bugs = [{row["revision"] for row in some} for some in (trained, held_out, unseen)]
    assert bugs[0] == bugs[1] == set(tasks.BUGS) - bugs[2]
    assert bugs[2] == set(tasks.HELD_OUT)
    assert len(trained) > 200
    assert len(held_out) > 20


@pytest.mark.medium
def test_every_bug_has_a_command_that_undoes_it(tasks: ModuleType, tmp_path: Path) -> None:
    """In each language, and none of the others does."""
    for path, source, *_ in tasks.LANGUAGES.values():
        for tag in tasks.BUGS:
            for other in tasks.BUGS:
                (tmp_path / other).write_text(tasks.with_bug(source, tag))
            fixes = "\n".join(tasks.fix(other, other) for other in tasks.BUGS)
            subprocess.run(["bash", "-ec", fixes], cwd=tmp_path, check=True)
            right = [one for one in tasks.BUGS if (tmp_path / one).read_text() == source]
            assert right == [tag], path


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(240)
def test_it_trains(train_example: Callable[..., list[dict[str, Any]]]) -> None:
    """From nothing, over real sessions: two steps, each episode scored by its tests."""
    rows = [row for row in train_example("software") if "train/loss" in row]
    assert [row["train/episodes"] for row in rows] == [12, 12]
    assert all(row["train/failed_share"] == 0 for row in rows)
    assert all(row["train/reward_mean"] == 0 for row in rows)
