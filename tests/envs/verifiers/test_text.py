"""Verifiers that compare text in this process, and tool calls."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from outloop.buffer.errors import EnvironmentFailure
from outloop.envs.verifiers.task_fields import code_of
from outloop.envs.verifiers.text import Exact, Number, last_number
from outloop.envs.verifiers.tool_calls import ToolCalls, read_calls

Judge = Callable[..., Any]
WEATHER = {"name": "weather", "arguments": {"city": "Bern", "days": 2}}
TIME = {"name": "time", "arguments": {}}


@pytest.mark.parametrize(
    ("given", "is_right"), [("Paris", 1.0), (" Paris\n", 1.0), ("paris", 0.0), ("Paris!", 0.0)]
)
def test_exact_ignores_white_space_at_the_ends_only(
    judge: Judge, given: str, is_right: float
) -> None:
    """Equal text is right, anything else is wrong; case counts unless it is said not to."""
    assert judge(Exact(), given, answer="Paris") == is_right
    assert judge(Exact(ignores_case=True), "paris", answer="Paris") == 1.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7", 7.0),
        ("-1,234.50 dollars", -1234.5),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("12,34", 34.0),
        ("7.", 7.0),
        ("none", None),
        ("9" * 500, None),
        ("1e999", None),
    ],
)
def test_the_last_number_is_read_as_people_write_it(text: str, number: float | None) -> None:
    """Signs, thousands, decimals and exponents are read; what is no finite number is none."""
    assert last_number(text) == number


def test_a_number_is_right_within_its_tolerance(judge: Judge) -> None:
    """Close is right; with a marker only what stands behind it counts."""
    assert judge(Number(), "it is 0.3333333", answer=1 / 3) == 1.0
    assert judge(Number(), "it is 0.333", answer=1 / 3) == 0.0
    assert judge(Number(), "no idea", answer="3") == 0.0
    marked = Number(marker="####")
    assert judge(marked, "72 #### 73", answer="#### 72") == 0.0
    assert judge(marked, "73 #### 72", answer="#### 72") == 1.0
    assert judge(marked, "72", answer="72") == 0.0


@pytest.mark.parametrize("verifier", [Exact(), Number(), ToolCalls(field="answer")])
def test_a_task_without_an_answer_is_no_failure_of_the_agent(judge: Judge, verifier: Any) -> None:
    """A missing field names itself and what the task has."""
    with pytest.raises(EnvironmentFailure, match="'answer'.*the task has: question"):
        judge(verifier, "x", question="?")


def test_calls_are_read_in_every_form() -> None:
    """OpenAI's form, plain JSON, a list of them and tags in text are the same calls."""
    call = ("weather", {"city": "Bern", "days": 2})
    wire = {"type": "function", "function": {"name": "weather", "arguments": json.dumps(call[1])}}
    tagged = f"Let me see.\n<tool_call>\n{json.dumps(WEATHER)}\n</tool_call>"
    for text in (json.dumps(WEATHER), json.dumps([wire]), tagged):
        assert read_calls(text) == [call]
    for text in ("", "[" * 100_000, '{"name": 3}', '{"name": "f", "arguments": "no"}', "null"):
        assert read_calls(text) == []


def test_tool_calls_match_in_any_order_unless_it_counts(judge: Judge) -> None:
    """The same calls are right; one too many or too few is not, and shares count both."""
    expected = [WEATHER, TIME]
    turned = json.dumps([TIME, WEATHER])
    assert judge(ToolCalls(), turned, tool_calls=expected) == 1.0
    assert judge(ToolCalls(is_ordered=True), turned, tool_calls=expected) == 0.0
    assert judge(ToolCalls(), json.dumps([TIME, TIME, WEATHER]), tool_calls=expected) == 0.0
    share = ToolCalls(gives_part=True)
    assert judge(share, json.dumps([TIME, TIME, TIME, WEATHER]), tool_calls=expected) == 0.5
    assert judge(share, "", tool_calls=expected) == 0.0
    assert judge(share, "just text", tool_calls=[]) == 1.0


def test_allowed_values_follow_the_leaderboard(judge: Judge) -> None:
    """Each argument may have several values, and be left out where "" is among them."""
    expected = [{"weather": {"city": ["Bern", "Berne"], "days": [1, ""]}}]

    def verdict(**arguments: object) -> float:
        call = {"name": "weather", "arguments": arguments}
        value: float = judge(ToolCalls(), json.dumps(call), tool_calls=expected)
        return value

    assert verdict(city="Berne") == verdict(city="Bern", days=1) == 1.0
    assert verdict(city="Basel") == verdict(days=1) == verdict(city="Bern", days=True) == 0.0
    assert verdict(city="Bern", wind=1) == 0.0


def test_code_is_the_last_fenced_block() -> None:
    """A block called python wins over others, the last over the first, and plain text is code."""
    assert code_of("a = 1") == "a = 1"
    assert code_of("x\n```python\na = 1\n```\n```\noutput\n```\n") == "a = 1\n"
    assert code_of("```\na\n```\nbetter:\n```\nb\n```") == "b\n"
