"""Code judged by unit tests and by its output, and what hostile code can do about it."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from outloop.buffer.errors import EnvironmentFailure
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
        "assert list(count(3)) == [0, 1, 2] and 2 in count(3) and 5 not in count(3)",
        "try:\n    Box(1).get('b')\nexcept KeyError:\n    pass\nelse:\n    assert False",
        "import math\nassert math.isnan(Box(float('nan')).size)",
    ]
    part = UnitTests(limits=LIMITS, gives_part=True)
    assert await judge(part, code, entry_point="Box", test=tests) == 1.0
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
