"""The process that runs the tests: it calls code in another process and writes the verdict.

Everything that the code sends is hostile; the code itself never runs here. Tests compare plain data
that is made here. Only the methods of a stand-in reach the other process. At worst, what the code
sends fails a test.
"""

from __future__ import annotations

import ast
import builtins
import cmath
import importlib
import json
import math
import re
import types
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

from .serialization import MessageSocket, decode, encode


class CodeFailed(Exception):
    """The code under test raised an exception that is not built in, or its process ended."""


class BadTests(BaseException):
    """The tests themselves cannot be run; no test may catch it."""


_NOT_RAISED = (AssertionError, StopIteration, StopAsyncIteration)
"""Exceptions that have a meaning for the tests' own statements and loops."""
_MADE_BY_TESTS = (
    types.FunctionType,
    types.GeneratorType,
    types.CoroutineType,
    types.ModuleType,
    type,
)


class Code:
    """The code under test, as the tests reach it: one question at a time."""

    def __init__(self, line: MessageSocket) -> None:
        self._line = line
        self._num_answers = 0
        self.changes_arguments = False
        """Whether every call changes the tests' arguments as the code changed its own."""
        self.takes_nan = False
        self.takes_infinity = False
        """Of two infinities, the difference is not a number."""
        self.is_away = False
        """True: every question fails, as if the code were gone."""

    def names(self) -> list[str]:
        """The names that it defines; none if it could not be loaded."""
        try:
            found = self._line.receive()["names"]
            return [name for name in found if type(name) is str]
        except Exception:  # noqa: BLE001 - a process boundary: it may have sent anything
            return []

    def ask(
        self,
        on: int | None,
        path: tuple[str, ...],
        do: str,
        arguments: list[Any],
        names: dict[str, Any],
        *,
        changes: bool = False,
    ) -> Any:
        """Ask one question; the answer is plain data or a stand-in.

        Args:
            changes: the arguments are changed as the code changed its copies.

        Raises:
            CodeFailed, or the built-in exception that the code raised.
            BadTests: the arguments cannot be sent to another process.
        """
        message = {
            "on": on,
            "path": path,
            "do": do,
            "arguments": encode(arguments, self._refer),
            "names": encode(names, self._refer),
        }
        self._num_answers += 1
        if self.is_away:
            raise CodeFailed("the code under test is away")
        try:
            self._line.send(message)
            answer = self._line.receive()
            if "raised" in answer:
                kind, text = answer["raised"]
                raised = _exception(kind, text)
            else:
                raised = None
                value = decode(answer["value"], self._find)
                if not self.takes_nan and _has(_is_nan, value):
                    raise ValueError("it gave a value that is not a number")
                if not self.takes_infinity and _has(_is_infinite, value):
                    raise ValueError("it gave an infinite value")
                if (changes or self.changes_arguments) and answer.get("changed") is not None:
                    _change(arguments, decode(answer["changed"], self._find))
        except Exception as error:  # noqa: BLE001 - a process boundary: it may have sent anything
            raise CodeFailed(f"the code under test is gone: {type(error).__name__}") from None
        if raised is not None:
            raise raised
        return value

    def _find(self, number: object) -> StandIn:
        if type(number) is not int:
            raise ValueError("no number of an object")
        return StandIn(self, number, ())

    def _refer(self, value: Any) -> object:
        if type(value) is StandIn:
            _, on, path = value._where
            return [on, path]
        # An argument that the code's answers produced is a failure of the code. One that only the
        # tests can have made, or that came before any answer, is a mistake in the tests.
        # An exception that a test caught comes from the code as well.
        is_caught = isinstance(value, BaseException)
        if isinstance(value, _MADE_BY_TESTS) or not (self._num_answers or is_caught):
            raise BadTests(
                f"they give the code a {type(value).__name__}, and only plain data can be given to "
                "code that runs in another process"
            )
        raise CodeFailed(f"its answers made the tests give it a {type(value).__name__}")


class StandIn:
    """A function, class or object on the other side."""

    def __init__(self, code: Code, on: int | None, path: tuple[str, ...]) -> None:
        self._where = (code, on, path)

    def __call__(self, *arguments: object, **names: object) -> object:
        code, on, path = self._where
        return code.ask(on, path, "call", list(arguments), names)

    def _in_place(self, *arguments: object, **names: object) -> object:
        code, on, path = self._where
        return code.ask(on, path, "call", list(arguments), names, changes=True)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        code, on, path = self._where
        found = code.ask(on, (*path, name), "get", [], {})
        return StandIn(code, on, (*path, name)) if type(found) is StandIn else found

    def __iter__(self) -> Iterator[Any]:
        code, on, path = self._where
        found = code.ask(on, path, "list", [], {})
        if type(found) is not list:
            raise CodeFailed("the code under test gave no items")
        return iter(found)

    def __next__(self) -> Any:
        return self._special("__next__")

    def __contains__(self, item: object) -> bool:
        # Decided here, so that the other side does not learn what is looked for.
        return item in list(self)

    def __bool__(self) -> bool:
        # Decided here: the other side could give another answer each time.
        return True

    def __len__(self) -> int:
        return int(self._special("__len__"))

    def __getitem__(self, key: object) -> Any:
        return self._special("__getitem__", key)

    def __setitem__(self, key: object, value: object) -> None:
        self._special("__setitem__", key, value)

    def __str__(self) -> str:
        return str(self._special("__str__"))

    def _special(self, name: str, *arguments: object) -> Any:
        code, on, path = self._where
        try:
            return code.ask(on, (*path, name), "call", list(arguments), {})
        except AttributeError as error:
            # The error of Python for an object without that method.
            raise TypeError(str(error)) from None


def _exception(name: object, text: object) -> Exception:
    """The built-in exception of that name, so that tests can expect it."""
    kind = vars(builtins).get(name) if type(name) is str else None
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _NOT_RAISED):
        try:
            return kind(str(text))
        except TypeError:
            pass
    return CodeFailed(f"{name}: {text}")


def _change(mine: list[Any], theirs: list[Any]) -> None:
    """Change the tests' arguments as the code changed its copies."""
    for old, new in zip(mine, theirs, strict=False):
        if type(old) is not type(new):
            continue
        if isinstance(old, list):
            old[:] = new
        elif isinstance(old, (dict, set)):
            old.clear()
            old.update(new)


def _has(is_bad: Callable[[Any], bool], value: Any) -> bool:
    """Whether a value is a bad one, or holds one."""
    if isinstance(value, dict):
        return any(_has(is_bad, key) or _has(is_bad, item) for key, item in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(_has(is_bad, item) for item in value)
    return type(value) is not StandIn and is_bad(value)


def _is_nan(value: Any) -> bool:
    """Whether it is not equal to itself: it is neither below nor above any."""
    return bool(value != value)


def _is_infinite(value: Any) -> bool:
    if isinstance(value, complex):
        return cmath.isinf(value)
    return isinstance(value, (float, Decimal)) and math.isinf(value)


class _Statements(ast.NodeTransformer):
    """Marks calls that are statements of their own: these may change their arguments."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        """Put the call's function into a call of `_IN_PLACE`."""
        self.generic_visit(node)
        if isinstance(node.value, ast.Call):
            name = ast.Name(id=_IN_PLACE, ctx=ast.Load())
            node.value.func = ast.Call(func=name, args=[node.value.func], keywords=[])
        return node


_IN_PLACE = "__in_place__"
_NAN = re.compile(r"(?<![a-z])(?:is_?)?nan(?![a-z])", re.IGNORECASE)
"""Tests that speak of NaN may get it."""
_INFINITY = re.compile(
    r"(?<![a-z])(?:is_?|neg|pos|n|p)?inf(?![a-z])|infinit|finite|e\+?\d{3}", re.IGNORECASE
)
"""Tests that speak of infinity may get one."""


def _in_place(function: Any) -> Any:
    """The function, or of the code one whose call changes the arguments."""
    return function._in_place if type(function) is StandIn else function


def _compile_test(source: str) -> types.CodeType:
    tree = _Statements().visit(ast.parse(source, "tests.py"))
    # Without the `from __future__` of this file.
    return compile(ast.fix_missing_locations(tree), "tests.py", "exec", dont_inherit=True)


def run(job: dict[str, Any], code: Code) -> dict[str, Any]:
    """Run the tests; the verdict does not reveal what they expect.

    Raises:
        BadTests: they cannot be run, whatever the code is, or all pass without any.
    """
    # First, so that nothing can replace it.
    space: dict[str, Any] = {"__builtins__": vars(builtins), "__name__": "tests"}
    space[_IN_PLACE] = _in_place
    for source in job["before"]:
        try:
            exec(_compile_stub(source), space)
        except Exception as error:
            raise BadTests(f"the code before them raised {error!r}") from error
    for name, module in job["modules"]:
        try:
            space.setdefault(name, importlib.import_module(module))
        except ImportError as error:
            raise BadTests(f"they use {name}: {error}; the sandbox has no such module") from error
    try:
        tests = [(_compile_test(test), check) for test, check in job["tests"]]
    except (SyntaxError, ValueError, RecursionError) as error:
        raise BadTests(f"they are no Python: {error}") from error
    code.changes_arguments = job["changes_arguments"]
    code.takes_nan = any(_NAN.search(test) for test, _ in job["tests"])
    code.takes_infinity = any(_INFINITY.search(test) for test, _ in job["tests"])
    defined = set(code.names())
    entry_point = job["entry_point"]
    if entry_point and entry_point not in defined:
        return {"passed": 0}
    for name in job["names"]:
        if name in defined and (name not in space or name == entry_point):
            space[name] = StandIn(code, None, (name,))
    if entry_point:
        space["candidate"] = StandIn(code, None, (entry_point,))
    num_passed = sum(_passes(test, calls_check, space) for test, calls_check in tests)
    if num_passed == len(tests):
        # Right code passes. So may tests that assert nothing, or that nobody calls.
        code.is_away = True
        if all(_passes(test, calls_check, space) for test, calls_check in tests):
            raise BadTests("they pass although every call of the code fails: they test nothing")
    return {"passed": num_passed}


def _passes(test: types.CodeType, calls_check: bool, space: dict[str, Any]) -> bool:
    try:
        exec(test, space)
        if calls_check:
            space["check"](space["candidate"])
    except (Exception, SystemExit):  # noqa: BLE001 - a failed test, whatever it raised
        return False
    return True


def _compile_stub(source: str) -> types.CodeType:
    """Compile code that may end with the head of a function, without its body."""
    try:
        return compile(source, "before.py", "exec", dont_inherit=True)
    except IndentationError:
        return compile(f"{source}\n    pass\n", "before.py", "exec", dont_inherit=True)


def main() -> None:
    """Read job.json, run, write verdict.json."""
    with open("job.json") as file:
        job = json.load(file)
    try:
        verdict = run(job, Code(MessageSocket(3)))
    except BadTests as error:
        verdict = {"broken": str(error)}
    with open("verdict.json", "w") as file:
        json.dump(verdict, file)
