"""Verifiers that run code: unit tests in another process, or inputs with expected outputs.

The code under test shares no process, file system or user id with the tests, the expected outputs
and the verdict. It can only answer calls (isolated_unit_tests).
"""

from __future__ import annotations

import ast
import builtins
import json
import re
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
from outloop.envs.verifiers.blame import lowest_if_it_raises
from outloop.envs.verifiers.result import Result
from outloop.envs.verifiers.task_fields import code_of, field_of, num_cores
from outloop.envs.verifiers.turns import SHORT_CPU_S, SHORT_S, Turns

_PACKAGE = Path(isolated_unit_tests.__file__).parent
_MAX_CALLS = 500
"""After so many calls a session is replaced."""
_ALIASES = {
    "np": "numpy",
    "pd": "pandas",
    "sp": "scipy",
    **{name: name for name in ("numpy", "pandas", "scipy", "sympy", "torch", "pytest")},
}
"""Modules that tests use without an import, by the names that everybody gives them."""
_READS_INPUT = re.compile(r"\binput\s*\(|\bstdin\b|\bopen\s*\(\s*0|\bfileinput\b|os\.read\(0")
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

    Of the code, tests reach the entry point, the names in the list `names_field`, and those that
    the source in `reference_field` defines, such as a reference solution. Without an entry point,
    that is also the only name that the tests use and nobody defines.

    A test that uses what a call returns finds the arguments as they were before, since
    `f(a) == sorted(a)` would say nothing if `f` emptied `a`. A call that is a statement of its own
    changes them. `changes_arguments`: every call does.
    """

    def __init__(
        self,
        *,
        field: str = "test",
        entry_point_field: str = "entry_point",
        prompt_field: str = "prompt",
        names_field: str = "names",
        reference_field: str = "code",
        changes_arguments: bool = False,
        gives_part: bool = False,
        sandbox: str | Sandbox = "bubblewrap",
        limits: Limits | None = None,
    ) -> None:
        super().__init__(sandbox=sandbox, limits=limits)
        self._field = field
        self._entry_point_field = entry_point_field
        self._prompt_field = prompt_field
        self._names_field = names_field
        self._reference_field = reference_field
        self._changes_arguments = changes_arguments
        self._gives_part = gives_part

    def check_task(self, task: Task) -> None:
        """Refuse a task whose tests cannot be run.

        Raises:
            EnvironmentFailure: they are no Python, there are none, or they use a name that nobody
                defines.
        """
        self._tests_of(task)

    def _tests_of(self, task: Task) -> _Tests:
        tests = task.payload.get(self._field)
        if not isinstance(tests, list):
            tests = [field_of(task, self._field, str)]
        sources = tuple(map(str, tests))
        entry_point = str(task.payload.get(self._entry_point_field) or "")
        prompt = str(task.payload.get(self._prompt_field) or "")
        is_code = bool(entry_point) and f"def {entry_point}" in prompt
        listed = task.payload.get(self._names_field)
        reference = task.payload.get(self._reference_field)
        try:
            read = names_read(
                sources,
                entry_point,
                prompt=prompt if is_code else "",
                listed=tuple(map(str, listed)) if isinstance(listed, list) else (),
                reference=reference if isinstance(reference, str) else "",
            )
        except EnvironmentFailure as error:
            raise EnvironmentFailure(f"task_id={task.task_id!r}: {error}") from error
        return _Tests(sources, entry_point, prompt if is_code else "", read)

    @lowest_if_it_raises
    async def __call__(self, task: Task, result: Result) -> float:
        """1.0 or 0.0, or with `gives_part` the share of the tests that passed.

        Raises:
            EnvironmentFailure: the tests cannot be run (see `check_task`), they pass without the
                code, or no session can be opened.
        """
        tests = self._tests_of(task)
        read, entry_point = tests.read, tests.entry_point
        job = {
            "before": [tests.prompt] if tests.prompt else [],
            "tests": list(zip(tests.sources, read.define_check, strict=True)),
            "entry_point": entry_point,
            "names": read.names,
            "modules": read.modules,
            "changes_arguments": self._changes_arguments,
        }
        wanted = re.compile(
            rf"^\s*(?:async\s+def|def|class)\s+(?:{'|'.join(map(re.escape, read.wanted))})\b"
            rf"|^(?:{'|'.join(map(re.escape, read.wanted))})\s*[:=]",
            re.MULTILINE,
        )
        code = code_of(result.answer, lambda code: wanted.search(code) is not None)
        if tests.prompt and f"def {entry_point}" not in code:
            code = f"{tests.prompt}\n{code}"
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
        share = int(str(verdict.get("passed", 0))) / len(tests.sources)
        return share if self._gives_part else float(share == 1.0)


@dataclass(frozen=True, slots=True)
class NamesRead:
    """The names that tests use and do not define."""

    names: tuple[str, ...]
    """Names that are the code's."""
    modules: tuple[tuple[str, str], ...]
    """(name, module) of modules that the tests use without an import; the code cannot replace
    them."""
    define_check: tuple[bool, ...]
    """For each test, whether it defines `check`."""
    wanted: tuple[str, ...]
    """What the code has to define: the entry point, or else `names`."""


@dataclass(frozen=True, slots=True)
class _Tests:
    """What a task says of its tests."""

    sources: tuple[str, ...]
    entry_point: str
    prompt: str
    """The code that an answer may continue; empty: none."""
    read: NamesRead


@lru_cache(maxsize=1024)
def names_read(
    tests: tuple[str, ...],
    entry_point: str,
    *,
    prompt: str = "",
    listed: tuple[str, ...] = (),
    reference: str = "",
) -> NamesRead:
    """Find the names that the tests use and do not define.

    Names that Python or the tests define keep their meaning, whatever the code defines. The code
    may define `entry_point`, the names that are `listed`, and what `prompt` and `reference` define.

    Raises:
        EnvironmentFailure: the tests are no Python, there are none, or nobody may define a name.
    """
    if not tests:
        raise EnvironmentFailure("its tests cannot be run: there are none")
    read: set[str] = set()
    used_alone: set[str] = set()
    defined_by: list[set[str]] = []
    for test in tests:
        try:
            tree = ast.parse(test)
            table = symtable.symtable(test, "tests.py", "exec")
        except (SyntaxError, ValueError) as error:
            raise EnvironmentFailure(
                f"its tests cannot be run: tests that are no Python: {error}"
            ) from error
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
    by_prompt = _defined_by(prompt)
    known = {entry_point, *listed, *_defined_by(reference)} - {""}
    modules = {
        name: _ALIASES.get(name, name)
        for name in free - known - by_prompt
        if name in _ALIASES or (name in sys.stdlib_module_names and name not in used_alone)
    }
    unknown = free - known - by_prompt - set(modules) - ({"candidate"} if entry_point else set())
    if not known and len(unknown) == 1:
        known = unknown
    elif unknown:
        raise EnvironmentFailure(
            f"its tests cannot be run: they use {', '.join(sorted(unknown))}, which neither they "
            "nor Python nor the task defines; import them in the tests, name the function under "
            "test as entry_point, or list the names of the code in the field names"
        )
    names = tuple(sorted(free & (known | by_prompt)))
    wanted = (entry_point,) if entry_point else names
    return NamesRead(
        names=names,
        modules=tuple(sorted(modules.items())),
        define_check=tuple("check" in names for names in defined_by),
        wanted=wanted,
    )


def _defined_by(source: str) -> set[str]:
    """Global names that a source defines; it may end with the head of a function."""
    for text in (source, f"{source}\n    pass\n"):
        try:
            return _globals_of(symtable.symtable(text, "code.py", "exec"))[1]
        except (SyntaxError, ValueError):
            continue
    return set()


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

    def check_task(self, task: Task) -> None:
        """Refuse a task whose cases cannot be judged.

        Raises:
            EnvironmentFailure: there are none, or one has no input, no output, or too long a one.
        """
        self._cases_of(task)

    def _cases_of(self, task: Task) -> list[tuple[bytes, bytes]]:
        cases = field_of(task, self._field, list)
        if not cases:
            raise EnvironmentFailure(f"task_id={task.task_id!r}: {self._field!r} has no case")
        return [_case(task, case) for case in cases]

    @lowest_if_it_raises
    async def __call__(self, task: Task, result: Result) -> float:
        """1.0 or 0.0, or with `gives_part` the share of the cases that came out right."""
        cases = self._cases_of(task)
        code = code_of(result.answer, lambda code: _READS_INPUT.search(code) is not None)
        files = {"main.py": code.encode()}
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
        share = num_right / len(cases)
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
    files = _side("candidate_process") | {"code.txt": code.encode()}
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
