"""Verifiers that run code: unit tests in another process, or inputs with expected outputs.

The code under test shares no process, file system or user id with the tests, the expected outputs
and the verdict. It can only answer calls (isolated_unit_tests).
"""

from __future__ import annotations

import ast
import builtins
import json
import symtable
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from outloop.buffer.errors import EnvironmentFailure
from outloop.buffer.records import Task
from outloop.envs.sandbox.api import Limits, Program, RunResult, Sandbox, Session
from outloop.envs.sandbox.backends import open_sandbox
from outloop.envs.verifiers import isolated_unit_tests
from outloop.envs.verifiers.result import Result
from outloop.envs.verifiers.task_fields import code_of, field_of, num_cores
from outloop.envs.verifiers.turns import SHORT_CPU_S, SHORT_S, Turns

_PACKAGE = Path(isolated_unit_tests.__file__).parent
_MAX_CALLS = 500
"""After so many calls a session is replaced."""
_MAX_EXPECTED_BYTES = 16 * 2**20
"""Of an expected output; the output of the code is kept as far as that reaches, and beyond."""


@dataclass(slots=True)
class _Open:
    """An open session."""

    stack: AsyncExitStack
    session: Session
    num_calls: int = 0


class _Sessions:
    """Open sessions, one for each place at which an answer is judged, made when needed."""

    def __init__(self, make_sandbox: Callable[[], Sandbox], limits: Limits) -> None:
        self._make_sandbox = make_sandbox
        self._limits = limits
        self._sandbox: Sandbox | None = None
        self._turns: Turns[_Open] | None = None

    @asynccontextmanager
    async def one(self, *, is_long: bool = False) -> AsyncIterator[Session]:
        """A session that is not in use."""
        if self._turns is None:
            self._sandbox = self._make_sandbox()
            self._turns = Turns(num_cores())
        assert self._sandbox is not None
        turns = self._turns
        async with turns.turn(is_long=is_long) as place:
            is_reusable = False
            try:
                if place.held is None:
                    stack = AsyncExitStack()
                    session = self._sandbox.session(self._limits)
                    place.held = _Open(stack, await stack.enter_async_context(session))
                yield place.held.session
                place.held.num_calls += 1
                is_reusable = place.held.num_calls <= _MAX_CALLS and turns is self._turns
            finally:
                if not is_reusable and place.held is not None:
                    held, place.held = place.held, None
                    await held.stack.aclose()

    async def close(self) -> None:
        """End the sessions that are not in use."""
        turns, self._turns = self._turns, None
        sandbox, self._sandbox = self._sandbox, None
        for held in turns.take_held() if turns is not None else ():
            await held.stack.aclose()
        if sandbox is not None:
            await sandbox.close()


class _JudgesPrograms:
    def __init__(
        self, *, sandbox: str | Sandbox = "bubblewrap", limits: Limits | None = None
    ) -> None:
        self._limits = limits or Limits(wall_s=20.0, cpu_s=10)
        # The output that is kept is set for each program.
        session = replace(
            self._limits, output_bytes=self._limits.output_bytes + _MAX_EXPECTED_BYTES
        )
        self._sessions = _Sessions(
            lambda: open_sandbox(sandbox) if isinstance(sandbox, str) else sandbox, session
        )

    async def _judge(self, judge: Callable[[Session, Limits, bool], Awaitable[bool]]) -> None:
        """Call `judge(session, limits, is_last)`; again, with the full limits, if it returns False
        for lack of time."""
        full = self._limits
        short = replace(full, wall_s=min(full.wall_s, SHORT_S), cpu_s=min(full.cpu_s, SHORT_CPU_S))
        for is_long, limits in ((False, short), (True, full)):
            async with self._sessions.one(is_long=is_long) as session:
                is_last = limits == full
                if await judge(session, limits, is_last) or is_last:
                    break

    async def check_sandbox(self) -> None:
        """Open a session as the first verification does, and end it.

        Raises:
            SettingsError: this machine does not support the sandbox.
            EnvironmentFailure: it supports it and cannot open a session.
        """
        try:
            async with self._sessions.one():
                pass
        finally:
            await self._sessions.close()

    async def tear_down(self) -> None:
        """End the sessions."""
        await self._sessions.close()


class UnitTests(_JudgesPrograms):
    """Scores code by the task's tests.

    `field`: source that asserts, or a list of such. A source that defines `check(candidate)`, as
    HumanEval's do, has it called with `entry_point_field`. Code that does not define the entry
    point continues `prompt_field`; the tests can use other definitions in the prompt too.
    """

    def __init__(
        self,
        *,
        field: str = "test",
        entry_point_field: str = "entry_point",
        prompt_field: str = "prompt",
        gives_part: bool = False,
        sandbox: str | Sandbox = "bubblewrap",
        limits: Limits | None = None,
    ) -> None:
        super().__init__(sandbox=sandbox, limits=limits)
        self._field = field
        self._entry_point_field = entry_point_field
        self._prompt_field = prompt_field
        self._gives_part = gives_part

    async def __call__(self, task: Task, result: Result) -> float:
        """1.0 or 0.0, or with `gives_part` the share of the tests that passed.

        Raises:
            EnvironmentFailure: the tests are no Python, or no session can be opened.
        """
        tests = field_of(task, self._field, object)
        sources = [str(test) for test in tests] if isinstance(tests, list) else [str(tests)]
        entry_point = str(task.payload.get(self._entry_point_field, ""))
        prompt = str(task.payload.get(self._prompt_field, ""))
        is_code = bool(entry_point) and f"def {entry_point}" in prompt
        read = names_read(tuple(sources), entry_point)
        job = {
            "before": [prompt] if is_code else [],
            "tests": list(zip(sources, read.define_check, strict=True)),
            "entry_point": entry_point,
            "names": read.names,
            "modules": read.modules,
        }
        code = code_of(result.answer)
        if is_code and f"def {entry_point}" not in code:
            code = f"{prompt}\n{code}"

        verdict: dict[str, object] = {}

        async def judge(session: Session, limits: Limits, is_last: bool) -> bool:
            tested, code_ran = await session.run_pair(_tests_side(job), _code_side(code), limits)
            if not is_last and (_is_late(tested) or _is_late(code_ran)):
                return False
            verdict.update(_verdict(tested))
            return True

        await self._judge(judge)
        if "broken" in verdict:
            raise EnvironmentFailure(
                f"task_id={task.task_id!r}: its tests cannot be run: {verdict['broken']}"
            )
        share = int(str(verdict.get("passed", 0))) / max(1, len(sources))
        return share if self._gives_part else float(share == 1.0)


@dataclass(frozen=True, slots=True)
class NamesRead:
    """The names that tests use and do not define."""

    names: tuple[str, ...]
    """Names of the code or the prompt: neither the tests nor Python define them."""
    modules: tuple[str, ...]
    """Modules of Python that the tests use without an import; the code cannot replace them."""
    define_check: tuple[bool, ...]
    """For each test, whether it defines `check`."""


@lru_cache(maxsize=1024)
def names_read(tests: tuple[str, ...], entry_point: str) -> NamesRead:
    """Find the names that the tests use and do not define.

    The code under test may define any name; names that Python or the tests define keep their
    meaning.

    Raises:
        EnvironmentFailure: the tests are no Python.
    """
    read: set[str] = set()
    used_alone: set[str] = set()
    defined_by: list[set[str]] = []
    for test in tests:
        try:
            tree = ast.parse(test)
            table = symtable.symtable(test, "tests.py", "exec")
        except (SyntaxError, ValueError) as error:
            raise EnvironmentFailure(f"tests that are no Python cannot be run: {error}") from error
        some_read, some_defined = _globals_of(table)
        read |= some_read
        defined_by.append(some_defined)
        bases = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        used_alone |= {
            node.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Name) and id(node) not in bases
        }
    defined = set[str]().union(*defined_by)
    free = {
        name
        for name in read - defined
        if name == entry_point or not (name in vars(builtins) or name.startswith("__"))
    }
    modules = {
        name for name in (free & sys.stdlib_module_names) - used_alone if name != entry_point
    }
    return NamesRead(
        names=tuple(sorted(free - modules)),
        modules=tuple(sorted(modules)),
        define_check=tuple("check" in names for names in defined_by),
    )


def _globals_of(table: symtable.SymbolTable) -> tuple[set[str], set[str]]:
    """Global names that a scope and its inner scopes read, and those that they define."""
    is_module = table.get_type() == "module"
    symbols = [one for one in table.get_symbols() if is_module or one.is_global()]
    read = {one.get_name() for one in symbols if one.is_referenced()}
    defined = {
        one.get_name()
        for one in symbols
        if one.is_assigned() or one.is_imported() or (is_module and one.is_namespace())
    }
    for child in table.get_children():
        child_read, child_defined = _globals_of(child)
        read |= child_read
        defined |= child_defined
    return read, defined


class InputOutput(_JudgesPrograms):
    """Scores a program by its output for each input.

    `field`: a list of {"input", "output"}; white space at the ends of lines is ignored. The
    expected outputs do not leave this process.
    """

    def __init__(
        self,
        *,
        field: str = "cases",
        gives_part: bool = False,
        sandbox: str | Sandbox = "bubblewrap",
        limits: Limits | None = None,
    ) -> None:
        super().__init__(sandbox=sandbox, limits=limits)
        self._field = field
        self._gives_part = gives_part

    async def __call__(self, task: Task, result: Result) -> float:
        """1.0 or 0.0, or with `gives_part` the share of the cases that came out right."""
        cases = [_case(task, case) for case in field_of(task, self._field, list)]
        files = {"main.py": code_of(result.answer).encode(errors="replace")}
        num_done = num_right = 0

        async def judge(session: Session, limits: Limits, is_last: bool) -> bool:
            nonlocal num_done, num_right
            end = time.monotonic() + limits.wall_s
            for given, expected in cases[num_done:]:
                left_s = limits.wall_s if is_last else end - time.monotonic()
                if left_s <= 0:
                    return False
                kept_bytes = limits.output_bytes + len(expected)
                each = replace(limits, wall_s=left_s, output_bytes=kept_bytes)
                ran = await session.run(files, ("python", "main.py"), each, stdin=given)
                if not is_last and _is_late(ran):
                    return False
                num_done += 1
                is_right = ran.is_ok and _lines(ran.stdout) == _lines(expected)
                num_right += is_right
                if not is_right and not self._gives_part:
                    break
            return True

        await self._judge(judge)
        share = num_right / max(1, len(cases))
        return share if self._gives_part else float(share == 1.0)


def _case(task: Task, case: object) -> tuple[bytes, bytes]:
    """The input and the expected output of a case.

    Raises:
        EnvironmentFailure: it has none, or an output that cannot be kept.
    """
    if not isinstance(case, dict) or not {"input", "output"} <= case.keys():
        raise EnvironmentFailure(
            f"task_id={task.task_id!r}: case={str(case)[:200]}; an object with input and output "
            "is allowed"
        )
    given, expected = (str(case[name]).encode(errors="replace") for name in ("input", "output"))
    if len(expected) > _MAX_EXPECTED_BYTES:
        raise EnvironmentFailure(
            f"task_id={task.task_id!r}: an expected output has {len(expected)} bytes; at most "
            f"{_MAX_EXPECTED_BYTES} are allowed: leave the case out"
        )
    return given, expected


def _is_late(ran: RunResult) -> bool:
    return ran.ended in ("wall_time", "cpu_time")


def _tests_side(job: dict[str, object]) -> Program:
    files = _side("verdict_process") | {"job.json": json.dumps(job)}
    return Program(command=("python", "main.py"), files=files, collect=("verdict.json",))


def _code_side(code: str) -> Program:
    files = _side("candidate_process") | {"code.txt": code.encode(errors="replace")}
    return Program(command=("python", "main.py"), files=files)


def _side(name: str) -> dict[str, bytes | str]:
    files: dict[str, bytes | str] = {
        "main.py": f"from isolated_unit_tests.{name} import main\n\nmain()\n"
    }
    for module in ("__init__", "serialization", name):
        files[f"isolated_unit_tests/{module}.py"] = (_PACKAGE / f"{module}.py").read_bytes()
    return files


def _verdict(tested: RunResult) -> dict[str, object]:
    """Read what the tests' process wrote; empty when a limit ended it first.

    Raises:
        EnvironmentFailure: the session could not take the tests' files.
    """
    if tested.ended == "refused":
        words = tested.stderr.decode(errors="replace")[-400:]
        raise EnvironmentFailure(f"the tests could not be started in the sandbox: {words}")
    data = tested.files.get("verdict.json")
    if data is not None:
        verdict: dict[str, object] = json.loads(data)
        return verdict
    if tested.ended == "exited":
        words = tested.stderr.decode(errors="replace")[-400:]
        return {"broken": f"their process ended with exit_code={tested.exit_code}: {words}"}
    return {}


def _lines(data: bytes) -> list[bytes]:
    return [line.rstrip() for line in data.rstrip().splitlines()]
