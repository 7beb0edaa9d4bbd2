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
        ("1e9999", None),
        ("move e4", 4.0),
        ("42 (case1)", 1.0),
        ("e", None),
        ("2\u22125 = \u22123", -3.0),
        ("\u22125", -5.0),
        ("\u20135", -5.0),
        ("\uff0d5", -5.0),
        ("3\u20135", 5.0),
        ("pages 3-5", 5.0),
        ("x = (-5)", -5.0),
        ("\uff11\uff12\uff13", 123.0),
        ("\u0663\u0664", 34.0),
        ("1\u2009234\u202f567", 1234567.0),
        ("1\u00a0234.5", 1234.5),
        ("1'234", 1234.0),
        ("1\u2019234", 1234.0),
        ("1{,}234", 1234.0),
        ("1,2345", 2345.0),
        ("5 m\u00b2", 5.0),
        ("\ud800 7 \udfff", 7.0),
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


def test_whole_numbers_are_equal_exactly(judge: Judge) -> None:
    """A tolerance is for numbers that are not whole, unless one is given."""
    for expected, given in (("2000000", "2000001"), ("9007199254740993", "9007199254740992")):
        assert judge(Number(), given, answer=expected) == 0.0
        assert judge(Number(), expected, answer=expected) == 1.0
    assert judge(Number(), "2,000,000.00", answer=2000000) == 1.0
    assert judge(Number(), "2e6", answer="2000000.0") == 1.0
    assert judge(Number(relative=1e-3), "2000001", answer=2000000) == 1.0
    assert judge(Number(absolute=1), "2000001", answer=2000000) == 1.0
    assert judge(Number(), "1e308", answer="1" + "0" * 307 + "1") == 0.0


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
    for text in (
        '{"name": "f", "arguments": {"x": NaN}}',
        '{"name": "f", "arguments": {"x": 1e999}}',
        '{"name": "f", "name": "g"}',
    ):
        assert read_calls(text) == []
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


@pytest.mark.parametrize(
    "beside",
    [
        "<tool_call>{'name': 'weather'}</tool_call>",
        "<tool_call>{",
        "</tool_call>",
        '<tool_call>{"name": "weather", "arguments": {"days": NaN}}</tool_call>',
        "<tool_call>[]</tool_call><tool_call>null</tool_call>",
        '<tool_call>[{"name": 5}]</tool_call>',
    ],
)
def test_a_call_that_cannot_be_read_is_a_wrong_call(judge: Judge, beside: str) -> None:
    """Beside right calls it is one too many, and alone it is no silence."""
    right = f"<tool_call>{json.dumps(WEATHER)}</tool_call>"
    assert judge(ToolCalls(), right, tool_calls=[WEATHER]) == 1.0
    assert judge(ToolCalls(), right + beside, tool_calls=[WEATHER]) == 0.0
    assert judge(ToolCalls(), beside, tool_calls=[]) == 0.0
    assert judge(ToolCalls(), json.dumps([WEATHER, {"name": 3}]), tool_calls=[WEATHER]) == 0.0


PROGRAM = "a, b = map(int, input().split())\nprint(a + b)\n"


@pytest.mark.parametrize(
    "answer",
    [
        PROGRAM,
        f"```python\n{PROGRAM}```",
        f"Here:\n```python\n{PROGRAM}",
        f"```\n{PROGRAM}",
        f"{PROGRAM}```",
        f"{PROGRAM}```\n",
        f"~~~python\n{PROGRAM}~~~",
        f"````python\n{PROGRAM}````",
        f"```Python title='x.py'\n{PROGRAM}```",
        f"``` {{.python}}\n{PROGRAM}```",
        f"```python\r\n{PROGRAM}```\r\n",
        f"```python\n{PROGRAM.rstrip()}```",
        f"```python\n{PROGRAM}```\nExample:\n```python\nprint(3)\n```",
        f"```\n{PROGRAM}```\nOutput:\n```\n3\n```",
        f"```text\n1 2\n```\n```\n{PROGRAM}```\n```bash\npython main.py\n```",
        "1. So:\n\n   ```python\n" + "".join(f"   {x}\n" for x in PROGRAM.splitlines()) + "   ```",
        "- So:\n\t```python\n" + "".join(f"\t{x}\n" for x in PROGRAM.splitlines()) + "\t```",
        "- ```python\n" + "".join(f"  {x}\n" for x in PROGRAM.splitlines()) + "  ```",
        "> ```python\n" + "".join(f"> {x}\n" for x in PROGRAM.splitlines()) + "> ```",
        f'```python\n"""Adds.\n\n```\n1 2\n```\n"""\n{PROGRAM}```\nDone.',
        f'```python\ndef f():\n    """\n    ```\n    x\n    ```\n    """\n{PROGRAM}```\nDone.',
        "```python print(sum(map(int, input().split())))```",
        f"Here it is:```python\n{PROGRAM}```",
        f"Here it is:```python\n{PROGRAM}```\nExample:```python\nprint(3)\n```",
        f"```python\n{PROGRAM}``` That is all.\n",
        f"```python\n{PROGRAM}```<|im_end|>",
        f"````markdown\n```python\n{PROGRAM}```\n````",
        f"<think>Perhaps ```python\nprint(input())\n``` no.</think>\n```python\n{PROGRAM}```",
        f"<think>\n```python\nprint(input())</think>\n{PROGRAM}",
        f"<think>\n```python\n{PROGRAM}```\n</think>\nDone.",
    ],
)
def test_code_is_read_as_models_write_it(answer: str) -> None:
    """Fences that are missing, indented, of another kind, or inside a docstring hide no program."""
    code = code_of(answer, lambda code: "input(" in code)
    printed: list[int] = []
    exec(code, {"input": lambda: "1 2", "print": printed.append})
    assert printed == [3]


def test_code_is_the_last_fenced_block() -> None:
    """A block called python wins over others, the last over the first, and plain text is code."""
    assert code_of("a = 1") == "a = 1"
    assert code_of("x\n```python\na = 1\n```\n```\noutput\n```\n") == "a = 1\n"
    assert code_of("```\na\n```\nbetter:\n```\nb\n```") == "b\n"
