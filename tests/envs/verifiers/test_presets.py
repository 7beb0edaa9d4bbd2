"""Verifiers by import path, in the form that the runner takes."""

import subprocess
import sys
import time

import pytest

from outloop.buffer.errors import EnvironmentFailure, SettingsError
from outloop.buffer.records import Task
from outloop.buffer.settings.env import EnvSettings
from outloop.envs.command_agent.verifier import load_verifier, verify
from outloop.envs.verifiers import presets
from outloop.envs.verifiers.result import Result
from outloop.envs.verifiers.weighted_sum import Weighted


@pytest.mark.parametrize(
    "name", ["exact", "number", "math", "json_schema", "tool_calls", "unit_tests", "input_output"]
)
def test_the_runner_takes_every_one(name: str) -> None:
    """Each is callable with (task, result) as settings ask for it."""
    assert load_verifier(EnvSettings(verifier=f"outloop.envs.verifiers.presets:{name}"))


async def test_a_verifier_by_its_path_scores() -> None:
    """A reward comes out of the runner's own call."""
    env = EnvSettings(verifier="outloop.envs.verifiers.presets:number")
    task = Task(task_id="t", payload={"answer": "42"})
    result = Result(answer="I think 42")
    reward = await verify(load_verifier(env), task, result, timeout_s=10, deadline=time.time() + 20)
    assert reward.value == 1.0


@pytest.mark.medium
def test_importing_them_loads_nothing_heavy() -> None:
    """Symbolic mathematics and schemas are loaded by workers; redis and torch by nobody here."""
    code = (
        "import sys, outloop.envs.verifiers.presets, outloop.envs.verifiers.judge\n"
        "print(*{'sympy', 'math_verify', 'jsonschema', 'redis', 'torch'} & set(sys.modules))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == ""


@pytest.mark.parametrize(
    ("name", "payload"),
    [
        ("unit_tests", {"test": "assert helper(f(1))", "entry_point": "f"}),
        ("unit_tests", {"test": []}),
        ("unit_tests", {"question": "?"}),
        ("input_output", {"cases": []}),
        ("input_output", {"cases": [{"input": "1"}]}),
    ],
)
def test_a_task_that_cannot_be_judged_is_refused_before_the_start(
    name: str, payload: dict[str, object]
) -> None:
    """The sentence names the task; a task that can be judged passes."""
    verifier = load_verifier(EnvSettings(verifier=f"outloop.envs.verifiers.presets:{name}"))
    good = {"test": ["assert f(1) == 1"], "cases": [{"input": "1", "output": "1"}]}
    verifier.check_tasks((Task(task_id="good", payload=good),))
    with pytest.raises(SettingsError, match="task_id='bad'"):
        verifier.check_tasks((Task(task_id="bad", payload=payload),))
    weighted = Weighted({"code": (getattr(presets, name), 1.0), "exact": (presets.exact, 0.1)})
    weighted.check_task(Task(task_id="good", payload=good))
    with pytest.raises(EnvironmentFailure, match="task_id='bad'"):
        weighted.check_task(Task(task_id="bad", payload=payload))


async def test_a_sum_opens_the_sandbox_of_its_parts() -> None:
    """What a part cannot open is known before the start."""

    class NoSandbox:
        async def check_sandbox(self) -> None:
            raise SettingsError("no sandbox here")

        async def __call__(self, task: Task, result: Result) -> float:
            return 1.0

    await Weighted({"exact": (presets.exact, 1.0)}).check_sandbox()
    with pytest.raises(SettingsError, match="no sandbox here"):
        await Weighted({"exact": (presets.exact, 1.0), "code": (NoSandbox(), 1.0)}).check_sandbox()
