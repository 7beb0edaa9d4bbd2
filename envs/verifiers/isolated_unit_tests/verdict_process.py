"""The process of the tests: calls code that lives in another process, and writes the verdict.

Owns: stand-ins for what the code under test defines, running the tests, verdict.json. Does not own:
the code, which never runs here. Invariant: a test compares plain data, made here; only a stand-in's
methods reach the other side.
"""

from __future__ import annotations

import builtins
import json
import types
from collections.abc import Iterator
from typing import Any

from .serialization import Line, decode, encode


class CodeFailed(Exception):
    """The code under test raised something that is no built-in exception, or went away."""


class BadTests(BaseException):
    """The tests themselves cannot be run; no test may catch it."""


_Where = tuple[Line, "int | None", tuple[str, ...]]


class StandIn:
    """A function, class or object on the other side."""

    def __init__(self, line: Line, on: int | None, path: tuple[str, ...]) -> None:
        self._where: _Where = (line, on, path)

    def __call__(self, *arguments: object, **names: object) -> object:
        return _ask(self._where, "call", list(arguments), names)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        line, on, path = self._where
        found = _ask((line, on, (*path, name)), "get", [], {})
        return StandIn(line, on, (*path, name)) if isinstance(found, StandIn) else found

    def __iter__(self) -> Iterator[Any]:
        return iter(_ask(self._where, "list", [], {}))

    def __contains__(self, item: object) -> bool:
        # Decided here: the other side is not told what is looked for.
        return item in list(self)

    def __bool__(self) -> bool:
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
        line, on, path = self._where
        try:
            return _ask((line, on, (*path, name)), "call", list(arguments), {})
        except AttributeError as error:
            # What Python itself raises for an object without that method.
            raise TypeError(str(error)) from None


def _ask(where: _Where, do: str, arguments: list[Any], names: dict[str, Any]) -> Any:
    line, on, path = where

    def keep(value: Any) -> int:
        if isinstance(value, StandIn):
            _, number, inner = value._where
            if number is not None and not inner:
                return number
        raise BadTests(
            f"they give the code a {type(value).__name__}, and only plain data can be given to "
            "code that runs in another process"
        )

    def find(number: int) -> StandIn:
        return StandIn(line, number, ())

    message = {
        "on": on,
        "path": path,
        "do": do,
        "arguments": encode(arguments, keep),
        "names": encode(names, keep),
    }
    try:
        line.send(message)
        answer = line.receive()
        if "raised" in answer:
            raised = answer["raised"]
        else:
            raised = None
            value = decode(answer["value"], find)
            if answer.get("changed") is not None:
                _change(arguments, decode(answer["changed"], find))
    except (EOFError, OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CodeFailed(f"the code under test went away: {type(error).__name__}") from None
    if raised is not None:
        raise _exception(*raised)
    return value


def _exception(name: str, text: str) -> Exception:
    """The built-in exception of that name, so that tests can expect it; never AssertionError."""
    kind = getattr(builtins, name, None) if isinstance(name, str) else None
    if isinstance(kind, type) and issubclass(kind, Exception) and kind is not AssertionError:
        try:
            return kind(str(text))
        except TypeError:
            pass
    return CodeFailed(f"{name}: {text}")


def _change(mine: list[Any], theirs: list[Any]) -> None:
    """What the code did to its arguments, done to the tests' own."""
    for old, new in zip(mine, theirs, strict=False):
        if type(old) is not type(new):
            continue
        if isinstance(old, list):
            old[:] = new
        elif isinstance(old, (dict, set)):
            old.clear()
            old.update(new)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Run the tests; returns the verdict."""
    line = Line(3)
    space: dict[str, Any] = {"__name__": "tests"}
    for source in job["before"]:
        try:
            exec(_compile_stub(source), space)
        except Exception as error:
            raise BadTests(f"what stands before them raised {error!r}") from error
    try:
        compiled_tests = [compile(test, "tests.py", "exec") for test in job["tests"]]
    except (SyntaxError, ValueError) as error:
        raise BadTests(f"they are no Python: {error}") from error
    try:
        told = line.receive()
        names = told["names"] if isinstance(told, dict) and "names" in told else None
    except (EOFError, ValueError, RecursionError):
        told, names = {}, None
    if not isinstance(names, list):
        raised = told.get("raised") if isinstance(told, dict) else None
        return {"passed": 0, "words": f"the code could not be loaded: {raised}"}
    for name in names:
        if isinstance(name, str) and (name not in space or name == job["entry_point"]):
            space[name] = StandIn(line, None, (name,))
    space["candidate"] = space.get(job["entry_point"])
    num_passed, words = 0, ""
    for test in compiled_tests:
        try:
            exec(test, space)
            if job["calls_check"]:
                space["check"](space["candidate"])
            num_passed += 1
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a failed test, however
            words = words or f"{type(error).__name__}: {str(error)[:500]}"
    return {"passed": num_passed, "words": words}


def _compile_stub(source: str) -> types.CodeType:
    """Code that may end in the head of a function whose body is the answer's to write."""
    try:
        return compile(source, "before.py", "exec")
    except IndentationError:
        return compile(f"{source}\n    pass\n", "before.py", "exec")


def main() -> None:
    """Read job.json, run, write verdict.json."""
    with open("job.json") as file:
        job = json.load(file)
    try:
        verdict = run(job)
    except BadTests as error:
        verdict = {"broken": str(error)}
    with open("verdict.json", "w") as file:
        json.dump(verdict, file)
