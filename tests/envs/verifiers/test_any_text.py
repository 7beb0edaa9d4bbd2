"""Whatever an answer is, no verifier raises, and it is not free."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outloop.buffer.errors import EnvironmentFailure
from outloop.buffer.records import Task
from outloop.envs.verifiers import presets
from outloop.envs.verifiers.blame import lowest_if_it_raises
from outloop.envs.verifiers.judgement_pool import JudgementPool
from outloop.envs.verifiers.math_equivalence import Math
from outloop.envs.verifiers.result import Result
from outloop.envs.verifiers.task_fields import code_of, end_of
from outloop.envs.verifiers.text import Exact, JsonSchema, Number, Regex, last_number
from outloop.envs.verifiers.tool_calls import ToolCalls, read_calls
from outloop.envs.verifiers.weighted_sum import Weighted

Judge = Callable[..., Any]
pytestmark = pytest.mark.asyncio(loop_scope="module")
CALL = {"name": "f", "arguments": {"x": 1}}
PAYLOAD = {
    "answer": "4271",
    "schema": {"type": "object", "required": ["zyx"]},
    "tool_calls": [{"name": "zyx", "arguments": {"x": 1}}],
    "test": ["assert f(1) == 4271"],
    "cases": [{"input": "1", "output": "4271"}],
}
PIECES = st.one_of(
    st.text(max_size=20),
    st.text(st.characters(categories=["Cs", "Nd", "No", "Cc", "Pd", "Sm", "Zs"]), max_size=20),
    st.sampled_from(
        [
            *(
                "e4",
                "1e999",
                "-",
                "1,234",
                "\u2212",
                "\ud800",
                "\x00",
                "NaN",
                "9" * 5000,
                "1e-9999",
            ),
            *("```", "```python\n", "~~~", '"""', "\\boxed{", "}", "$", "\\frac", "\\sqrt[", "^{"),
            *("<tool_call>", "</tool_call>", json.dumps(CALL), '{"name": "\\ud800"}', "[" * 2000),
            *('{"name": "f", "arguments": "{"}', '{"score": 1}', "def f(x): return 4271\n"[:9]),
            *("<|im_end|>", "####", "\\left(", "\\begin{pmatrix}", "&", "\\\\", "=", "<", "%", "_"),
        ]
    ),
)
TEXTS = st.lists(PIECES, max_size=8).map("".join)
LARGE = ["x" * 2**20, "9" * 2**20, "[" * 2**20, "```\n" * 2**18, "e4 " * 2**18, "\ud800" * 2**20]
NOW = [Exact(), Number(), Number(marker="####"), ToolCalls(), ToolCalls(gives_part=True)]


@given(TEXTS)
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow], deadline=None)
async def test_no_text_makes_a_reader_raise(text: str) -> None:
    """Numbers, calls and code are found in anything, or not found."""
    last_number(text)
    read_calls(text)
    code_of(text).encode()
    end_of(text).encode()
    for verifier in NOW:
        assert verifier(Task(task_id="t", payload=PAYLOAD), Result(answer=text)) == 0.0


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pooled() -> AsyncIterator[list[Any]]:
    """Verifiers that judge in worker processes, on one pool."""
    math = Math(timeout_s=10)
    workers = math.workers
    made = [
        math,
        Regex(r"^zyx(\\w+)$", workers=workers),
        JsonSchema(workers=workers),
        Weighted({"math": (math, 1.0), "number": (Number(), 0.5)}),
    ]
    yield made
    await workers.close()


@pytest.mark.parametrize("text", ["", "\ud800", "\x00", "e4", "move e4", *LARGE])
async def test_no_text_is_free(pooled: list[Any], text: str) -> None:
    """A score of 0 for halves of pairs, NUL, and a megabyte of anything."""
    task = Task(task_id="t", payload=PAYLOAD)
    for verifier in [*NOW, presets.exact, presets.number, presets.tool_calls]:
        assert verifier(task, Result(answer=text)) == 0.0
    for verifier in pooled:
        scored = await verifier(task, Result(answer=text))
        assert getattr(scored, "value", scored) == 0.0


@given(st.lists(TEXTS, min_size=20, max_size=20))
@settings(max_examples=4, suppress_health_check=list(HealthCheck), deadline=None)
async def test_whatever_is_written_is_scored(pooled: list[Any], texts: list[str]) -> None:
    """No answer is a failure of the environment for a verifier with worker processes."""
    for text in texts:
        for verifier in pooled:
            scored = await verifier(Task(task_id="t", payload=PAYLOAD), Result(answer=text))
            assert getattr(scored, "value", scored) == 0.0


class Fragile:
    """A verifier of ours with a bug."""

    lowest = -1.0

    @lowest_if_it_raises
    def __call__(self, task: Task, result: Result) -> float:
        return 1.0 / (len(result.answer) * task.payload["factor"])


async def test_a_bug_that_an_answer_finds_is_not_free(judge: Judge) -> None:
    """The answer gets the lowest score; a task on which any answer raises is at fault itself."""
    assert judge(Fragile(), "", factor=1) == -1.0
    with pytest.raises(EnvironmentFailure, match="cannot be judged: ZeroDivisionError"):
        judge(Fragile(), "", factor=0)


async def test_a_pool_survives_text_that_cannot_be_encoded() -> None:
    """Half a surrogate pair costs no worker."""
    workers = JudgementPool(1)
    verifier = Regex("b", workers=workers)
    assert await verifier(Task(task_id="t", payload={}), Result(answer="a\ud800b")) == 1.0
    assert workers.num_replaced == 0
    await workers.close()
