"""Code judged by unit tests and by its output, and what hostile code can do about it."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from outloop.buffer.errors import EnvironmentFailure
from outloop.buffer.records import Task
from outloop.envs.sandbox.api import Limits
from outloop.envs.verifiers.code import InputOutput, UnitTests

Judge = Callable[..., Any]
pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = Limits(wall_s=20, memory_bytes=256 * 2**20, max_processes=8)
ADD = {
    "prompt": "def add(a, b):\n    '''Add.'''\n",
    "entry_point": "add",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3 == candidate(1, 1) + 1",
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def unit_tests() -> AsyncIterator[UnitTests]:
    """One verifier for all tests."""
    verifier = UnitTests(limits=LIMITS)
    yield verifier
    await verifier.tear_down()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("given", "is_right"),
    [
        ("    return a + b\n", 1.0),
        ("Here:\n```python\ndef add(a, b):\n    return a + b\n```", 1.0),
        ("    return 3\n", 0.0),
        ("    return (\n", 0.0),
        ("    raise KeyError(a)\n", 0.0),
    ],
)
async def test_code_is_right_if_its_tests_pass(
    judge: Judge, unit_tests: UnitTests, given: str, is_right: float
) -> None:
    """A continuation of the prompt and a whole function are both judged by what they do."""
    assert await judge(unit_tests, given, **ADD) == is_right


@pytest.mark.medium
@pytest.mark.parametrize(
    "given",
    [
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "class Yes:\n    def __eq__(self, other):\n        return True\n"
        "    def __contains__(self, other):\n        return True\n"
        "def add(a, b):\n    return Yes()",
        "import builtins\nbuiltins.AssertionError = Exception\ndef add(a, b): return 0",
        "def add(a, b):\n    raise AssertionError",
        "import os, signal\nos.kill(-1, signal.SIGKILL)\ndef add(a, b): return 0",
        # Writing to the line itself: it may say any value, and no verdict.
        "import os, json\ndef add(a, b):\n"
        "    data = json.dumps({'passed': 1, 'value': 0, 'verdict': 'passed'}).encode()\n"
        "    os.write(3, len(data).to_bytes(8, 'big') + data)\n    return 0",
        "import os\nos.write(3, b'\\xff' * 4096)\ndef add(a, b): return 0",
        "open('verdict.json', 'w').write('{\"passed\": 1}')\ndef add(a, b): return 0",
        "x = 'a'\nwhile True:\n    x += x",
        "import os\nfor fd in range(64):\n    try:\n        os.write(fd, b'{\"passed\": 1}')\n"
        "    except OSError:\n        pass\ndef add(a, b): return 0",
        "def add(a, b):\n    x = []\n    for i in range(10**5):\n        x = [x]\n    return x",
    ],
)
async def test_a_verdict_cannot_be_forged(judge: Judge, unit_tests: UnitTests, given: str) -> None:
    """Wrong code is wrong, whatever else it does: exit, claim to be equal, write verdicts."""
    assert await judge(unit_tests, given, **ADD) == 0.0


async def test_the_tests_cannot_be_read(judge: Judge) -> None:
    """Code that looks for its tests in files, memory and processes finds none of their text."""
    secret = "assert candidate(99) == 'k3y' + 'w0rd'"
    spy = (
        "import os, gc, sys\n"
        "seen = []\n"
        "for root, _, names in os.walk('/work'):\n"
        "    for name in names:\n"
        "        seen.append(open(os.path.join(root, name), errors='replace').read())\n"
        "for pid in os.listdir('/proc'):\n"
        "    for name in ('environ', 'cmdline'):\n"
        "        try: seen.append(open(f'/proc/{pid}/{name}', errors='replace').read())\n"
        "        except OSError: pass\n"
        "try:\n"
        "    for line in open('/proc/self/maps'):\n"
        "        low, high = (int(x, 16) for x in line.split()[0].split('-'))\n"
        "        if ' rw' in line and high - low < 2**26:\n"
        "            with open('/proc/self/mem', 'rb') as file:\n"
        "                file.seek(low)\n"
        "                seen.append(file.read(high - low).decode('latin1'))\n"
        "except OSError: pass\n"
        "found = any(chr(107) + '3y' + chr(39) in text for text in seen)\n"
        "def leak(x): return 'found' if found else 'nothing'\n"
    )
    tests = [secret, "assert candidate(1) == 'nothing', 'leaked'"]
    part = UnitTests(limits=LIMITS, gives_part=True)
    assert await judge(part, spy, entry_point="leak", test=tests) == 0.5
    await part.tear_down()


@pytest.mark.medium
async def test_a_prompt_may_be_a_head_without_a_body(judge: Judge, unit_tests: UnitTests) -> None:
    """Definitions of the prompt are the tests' too, though its last function has no body yet."""
    prompt = "def twice(x):\n    return 2 * x\n\n\ndef four(x):\n"
    test = "assert twice(candidate(1)) == 8"
    payload = {"prompt": prompt, "entry_point": "four", "test": test}
    assert await judge(unit_tests, "    return twice(twice(x))", **payload) == 1.0
    assert await judge(unit_tests, "    return 2", **payload) == 0.0


async def test_objects_work_across_the_wall(judge: Judge) -> None:
    """Classes, methods, iteration, changed arguments and expected exceptions behave as at home."""
    code = (
        "class Box:\n"
        "    def __init__(self, size): self.size, self.items = size, {}\n"
        "    def put(self, key, value): self.items[key] = value\n"
        "    def get(self, key): return self.items[key]\n"
        "    def __len__(self): return len(self.items)\n"
        "def sort(values): values.sort()\n"
        "def count(n):\n    yield from range(n)\n"
    )
    tests = [
        "box = Box(2)\nbox.put('a', (1, {2.5: {3}}))\nassert box.get('a') == (1, {2.5: {3}})",
        "assert Box(3).size == 3 and len(Box(3)) == 0",
        "values = [3, 1]\nsort(values)\nassert values == [1, 3]",
        "some = count(3)\nassert next(some) == 0 and next(some) == 1 and list(some) == [2]",
        "assert list(count(3)) == [0, 1, 2] and 2 in count(3) and 5 not in count(3)",
        "try:\n    Box(1).get('b')\nexcept KeyError:\n    pass\nelse:\n    assert False",
        "import math\nassert math.isnan(Box(float('nan')).size)",
    ]
    part = UnitTests(limits=LIMITS, gives_part=True)
    assert await judge(part, code, entry_point="Box", names=["sort", "count"], test=tests) == 1.0
    await part.tear_down()


@pytest.mark.parametrize(
    "test", ["assert (", "def check(candidate):\n    candidate(lambda x: x, 1)\n"]
)
async def test_tests_that_cannot_be_run_are_no_reward(
    judge: Judge, unit_tests: UnitTests, test: str
) -> None:
    """Broken tests, and tests that hand functions over, are the task's failure."""
    with pytest.raises(EnvironmentFailure, match="cannot be run"):
        await judge(unit_tests, "    return 0\n", **{**ADD, "test": test})


@pytest.mark.medium
async def test_a_program_is_judged_by_its_output(judge: Judge) -> None:
    """Every case must come out right; expected outputs are never in the sandbox."""
    cases = [{"input": "1 2", "output": "3\n"}, {"input": "2 2", "output": "4"}]
    verifier = InputOutput(limits=LIMITS)
    part = InputOutput(limits=LIMITS, gives_part=True)
    right = "print(sum(map(int, input().split())), '')"
    assert await judge(verifier, right, cases=cases) == 1.0
    assert await judge(verifier, "print(3)", cases=cases) == 0.0
    assert await judge(part, "print(3)", cases=cases) == 0.5
    assert await judge(verifier, f"{right}\nraise SystemExit(1)", cases=cases) == 0.0
    await verifier.tear_down()
    await part.tear_down()


@pytest.mark.parametrize(
    ("test", "code"),
    [
        ("assert np.allclose(f(1), 2)", "class np:\n    allclose = lambda *a: True\n"),
        ("assert f(1) == pytest.approx(2)", "class pytest:\n    approx = lambda x: 0\n"),
        ("assert is_close(f(1), 2)", "def is_close(*a): return True\n"),
        ("import math\nassert close(f(1), 2) and other(f(2), 3)", "def close(*a): return True\n"),
        ("assert Counter(f(1)) == {}", "def Counter(x): return {}\n"),
    ],
)
@pytest.mark.parametrize("entry", ["", "f"])
async def test_a_name_that_nobody_defines_is_not_the_codes(
    judge: Judge, unit_tests: UnitTests, test: str, code: str, entry: str
) -> None:
    """Helpers that tests forgot to import are refused, not taken from the code under test."""
    with pytest.raises(EnvironmentFailure, match="cannot be run"):
        await judge(unit_tests, f"{code}def f(x): return 0", test=test, entry_point=entry)


async def test_names_of_the_code_are_listed_or_come_from_a_reference(
    judge: Judge, unit_tests: UnitTests
) -> None:
    """A list of names, or the source of a solution, says what else the tests may reach."""
    code = "class Pair:\n    def __init__(self, a): self.a = a\ndef f(p): return p.a"
    test = ["assert f(Pair(3)) == 3"]
    assert await judge(unit_tests, code, test=test, names=["f", "Pair"]) == 1.0
    assert await judge(unit_tests, code, test=test, code=code) == 1.0
    with pytest.raises(EnvironmentFailure, match="Pair, f"):
        await judge(unit_tests, code, test=test)


@pytest.mark.parametrize(
    "test",
    [
        "a = [3, 1]\nassert f(a) == sorted(a)",
        "a = [3, 1]\nassert len(f(a)) == len(a)",
        "a = [3, 1]\nb = f(a)\nassert b == sorted(a)",
        "for a in ([3, 1], [2]):\n    assert f(a) == sorted(a), f(a)",
        "def check(candidate):\n    a = [3, 1]\n    assert candidate(a) == sorted(a)",
    ],
)
async def test_an_argument_is_what_it_was_when_the_value_is_used(
    judge: Judge, unit_tests: UnitTests, test: str
) -> None:
    """Code that empties its argument is not equal to the sorted argument."""
    emptied = "def f(a):\n    a.clear()\n    return []"
    assert await judge(unit_tests, emptied, test=test, entry_point="f") == 0.0
    assert await judge(unit_tests, "f = sorted", test=test, entry_point="f") == 1.0


async def test_a_call_that_is_a_statement_changes_its_arguments(judge: Judge) -> None:
    """Tests of functions that work in place need nothing; others say that every call does."""
    test = "a = [3, 1]\nf(a)\nassert a == [1, 3]"
    every = UnitTests(limits=LIMITS, changes_arguments=True)
    assert await judge(every, "def f(a): a.sort()", test=test) == 1.0
    test = "a = [3, 1]\nassert f(a) is None and a == [1, 3]"
    assert await judge(every, "def f(a): a.sort()", test=test) == 1.0
    await every.tear_down()


@pytest.mark.parametrize(
    "test",
    [
        "",
        "def test_f():\n    assert f(1) == 1",
        "if __name__ == '__main__':\n    assert f(1) == 1",
        "try:\n    assert f(1) == 1\nexcept Exception:\n    pass",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): assert f(1) == 1",
        "def check(candidate):\n    pass",
        "assert True",
        [],
    ],
)
async def test_tests_that_test_nothing_are_refused(
    judge: Judge, unit_tests: UnitTests, test: str
) -> None:
    """Tests that pass although every call of the code fails are the task's fault."""
    with pytest.raises(EnvironmentFailure, match="cannot be run"):
        await judge(unit_tests, "def f(x): return 1", test=test, entry_point="f")


@pytest.mark.parametrize(
    "value", ["float('nan')", "[1.0, float('nan')]", "__import__('decimal').Decimal('NaN')"]
)
async def test_a_value_that_compares_with_nothing_is_wrong(
    judge: Judge, unit_tests: UnitTests, value: str
) -> None:
    """NaN passes no test that says only what a value must not be."""
    test = "x = f(1)\nx = x[-1] if isinstance(x, list) else x\nassert not x > 2 and not x < 2"
    assert await judge(unit_tests, f"def f(x): return {value}", test=test) == 0.0
    assert await judge(unit_tests, "def f(x): return 2", test=test) == 1.0


@pytest.mark.parametrize(
    "value", ["float('inf')", "-1e999", "__import__('decimal').Decimal('Infinity')", "1e999j"]
)
async def test_an_infinity_is_wrong_where_the_tests_speak_of_none(
    judge: Judge, unit_tests: UnitTests, value: str
) -> None:
    """The difference of two is not a number, and passes tests of what a value must not be."""
    code = f"def f(x): return {value}"
    test = "assert f(1) == f(1)\nassert not abs(f(1) - f(2)) > 1e-6"
    assert await judge(unit_tests, code, test=test) == 0.0
    spoken = f"import math\nassert f(1) == {value}  # inf"
    assert await judge(unit_tests, code, test=spoken) == 1.0


async def test_a_failure_that_the_tests_hand_on_is_the_codes(
    judge: Judge, unit_tests: UnitTests
) -> None:
    """Tests that catch what a call raised, and give it to the code, are not broken by that."""
    test = "try:\n    x = f(1)\nexcept Exception as error:\n    x = error\nassert g(x) == 1"
    payload = {"test": test, "names": ["f", "g"]}
    for code in ("import os\ndef f(x): os._exit(0)", "def f(x): raise KeyError", ""):
        assert await judge(unit_tests, f"{code}\ndef g(x): return 1", **payload) == 0.0
    assert await judge(unit_tests, "def f(x): return 1\ndef g(x): return 1", **payload) == 1.0


@pytest.mark.parametrize(
    "program",
    [
        "print(input())\nexit()",
        "print(input())\nquit()",
        "def main():\n    print(input())\n    exit(0)\nmain()",
        "import sys\nprint(sys.stdin.readline().strip())\nsys.exit()",
        "print(open(0).read())",
        "import sys\nfor line in sys.stdin: print(line)",
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(2**26)\n"
        "def main():\n    def deep(n): return n and deep(n - 1)\n    deep(20000)\n"
        "    print(input())\nt = threading.Thread(target=main)\nt.start()\nt.join()",
        "if __name__ == '__main__':\n    print(input())",
        "import sys\nassert sys.argv == ['main.py'] and copyright and license and help\n"
        "print(input())",
        "def f(x: int): pass\nassert f.__annotations__ == {'x': int}\nprint(input())",
        "print(input())\nprint('\u00e9', file=__import__('sys').stderr)",
        "import atexit\nx = input()\natexit.register(lambda: print(x))",
    ],
)
async def test_a_program_runs_as_python_runs_it(judge: Judge, program: str) -> None:
    """The sandbox's Python has what programs are written for."""
    verifier = InputOutput(limits=LIMITS)
    assert await judge(verifier, program, cases=[{"input": "1", "output": "1"}]) == 1.0
    await verifier.tear_down()


async def test_a_long_expected_output_is_compared_whole(judge: Judge) -> None:
    """The output is kept as far as the expected one reaches; a longer one is refused at once."""
    verifier = InputOutput(limits=LIMITS)
    cases = [{"input": "300000", "output": "x" * 300_000}]
    assert await judge(verifier, "print('x' * int(input()))", cases=cases) == 1.0
    assert await judge(verifier, "print('x' * 299999)", cases=cases) == 0.0
    assert await judge(verifier, "print('x' * 10**6)", cases=cases) == 0.0
    with pytest.raises(EnvironmentFailure, match="leave the case out"):
        verifier.check_task(
            Task(task_id="t", payload={"cases": [{"input": "", "output": "x" * 2**25}]})
        )
    await verifier.tear_down()
