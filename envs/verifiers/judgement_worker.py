"""The processes of a JudgementPool: a template that forks workers, and the workers, which judge.

A worker can write no file and, unless it runs as root, start no process; no job ends the template.
The pool keeps deadlines: it closes a worker's socket, and the template then kills that worker.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import re
import resource
import select
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache
from typing import Any

import msgspec

from outloop.envs.verifiers.judgement_pool import Judgement
from outloop.envs.verifiers.task_fields import strict_json

_RIGHT, _WRONG = "right", "wrong"
_MAX_DIGITS = 400
_SPELLINGS = str.maketrans({"\u2212": "-", "\u2013": "-", "\uff0d": "-"})
_ROOT = "a division by a root"
_RESULTS = {"a fraction", "a division", "a division by a constant"}
"""What a result may leave that expects none of it."""
_WORKER_BYTES = 2 * 2**30
"""Address space of a worker."""


def judge_regex(pattern: str, answer: str) -> Judgement:
    """The first group of the last match, or the whole match; None without a match."""
    last = None
    for match in _compiled(pattern).finditer(answer):
        last = match
    if last is None:
        return Judgement()
    return Judgement(value=last[1] or "" if last.re.groups else last[0])


def judge_json_schema(schema: str, answer: str) -> Judgement:
    """ "valid" if the answer is JSON that the schema allows."""
    import jsonschema

    try:
        validator = _validator(schema)
    except jsonschema.SchemaError as error:
        return Judgement(error=f"the schema is none: {error.message}")
    try:
        is_valid = validator.is_valid(strict_json(answer))
    except (ValueError, RecursionError):
        is_valid = False
    return Judgement(value="valid" if is_valid else "invalid")


def judge_math(expected: str, answer: str, question: str, allows_unevaluated: str) -> Judgement:
    """Whether the answer is mathematically equal to the expected one, and worked out as far.

    Args:
        question: what else the task says.
        allows_unevaluated: empty: an answer must be worked out.
    """
    import math_verify

    gold = _gold(expected)
    if not gold:
        return Judgement(error=f"expected={expected!r} holds nothing that math-verify can read")
    given = math_verify.parse(_readable(answer), parsing_timeout=None)
    digits = _digits([*gold, *given])
    is_right = math_verify.verify(
        list(gold),
        given,
        timeout_seconds=None,
        float_rounding=digits,
        numeric_precision=digits + 9,
    )
    is_right = is_right and _is_exact(gold, given)
    if is_right and not allows_unevaluated:
        is_right = _is_result(gold, given, question)
    return Judgement(value=_RIGHT if is_right else _WRONG)


def _digits(values: list[Any]) -> int:
    """Decimals to compare: six, or enough for five digits of the smallest number."""
    import sympy

    digits = 6
    for value in values:
        if not isinstance(value, sympy.Basic):
            continue
        parts = value.args if isinstance(value, sympy.Tuple | sympy.Set) else (value,)
        for part in parts:
            size = abs(part.evalf(10)) if part.is_number else 1
            if isinstance(size, sympy.Float) and 0 < size < 1:
                digits = max(digits, 4 - math.floor(sympy.log(size, 10).evalf()))
    return min(digits, _MAX_DIGITS)


def _is_exact(gold: tuple[Any, ...], given: list[Any]) -> bool:
    """False if a whole number is expected, and a decimal near it was given."""
    import sympy

    if isinstance(gold[0], sympy.Integer) and given and isinstance(given[0], sympy.Float):
        return bool(gold[0] == sympy.nsimplify(given[0], rational=True))
    return True


def _is_result(gold: tuple[Any, ...], given: list[Any], question: str) -> bool:
    """Whether the answer leaves no operation that the expected answer does not leave."""
    import sympy

    from outloop.envs.verifiers.math_operations import left_open

    *_, gold_text = gold
    *trees, text = given
    if not trees or text == gold_text:
        return True
    tree = trees[0]
    if not isinstance(gold[0], sympy.core.relational.Relational | sympy.And):
        # Of a chain of equations, math-verify takes the end.
        while isinstance(tree, sympy.And) and tree.args:
            tree = tree._unsorted_args[-1]
        if isinstance(tree, sympy.Eq):
            tree, text = tree.rhs, text.rpartition("=")[2]
    of_gold = left_open(gold_text, gold[0])
    # Who expects a division takes one that is not rationalized.
    is_divided = bool(of_gold & {"a fraction", "a division"})
    left = left_open(text, tree) - of_gold - _RESULTS - ({_ROOT} if is_divided else set())
    numbers = set(re.findall(r"\d+", question.replace(",", "")))
    return all(re.fullmatch(r"\d+/\d+", one) and not {*one.split("/")} <= numbers for one in left)


JOBS: dict[str, Callable[..., Judgement]] = {
    "regex": judge_regex,
    "json_schema": judge_json_schema,
    "math": judge_math,
}


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


@lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    import jsonschema

    content = json.loads(schema)
    kind = jsonschema.validators.validator_for(content)
    kind.check_schema(content)
    return kind(content)


@lru_cache(maxsize=4096)
def _gold(expected: str) -> tuple[Any, ...]:
    import math_verify

    # A dollar that stands alone or behind a backslash is money, a pair is of mathematics.
    is_marked = "\\boxed" in expected or len(re.findall(r"(?<!\\)\$", expected)) > 1
    text = expected if is_marked else f"\\boxed{{{expected}}}"
    return tuple(math_verify.parse(_readable(text), parsing_timeout=None))


def _readable(text: str) -> str:
    """The text in the spelling that math-verify reads: minuses, decimals that repeat, dollars."""
    text = text.translate(_SPELLINGS)
    text = re.sub(r"\\(?:text|mbox|mathrm)\s*\{\s*\\?\$\s*\}", "", text)
    text = re.sub(r"\\dollar\b|\\textdollar\b|(?<=\\boxed\{)\s*\$(?=\s*[\d.])", "", text)
    text = re.sub(r"\\\$", "", text)
    text = re.sub(r"(?<![\w.\\])(\d+(?:\.\d+)?)[eE]([+-]?\d{1,2})(?![\w.])", _decimal, text)
    return re.sub(r"(\d*)\.(\d*)\\overline\s*\{(\d+)\}", _repeating, text)


def _decimal(found: re.Match[str]) -> str:
    return format(Decimal(f"{found[1]}e{found[2]}"), "f")


def _repeating(found: re.Match[str]) -> str:
    whole, head, tail = found.groups()
    below = (10 ** len(tail) - 1) * 10 ** len(head)
    above = int(whole + head + tail) - int(whole + head or 0)
    common = math.gcd(above, below)
    return rf"\frac{{{above // common}}}{{{below // common}}}"


def warm_up(modules: list[str]) -> None:
    """Import, and judge once: the first symbolic comparison takes as long as a hundred others."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    for name in modules:
        importlib.import_module(name)
    if "math_verify" in modules:
        judge_math(r"\frac{x^2-1}{2}", r"\boxed{\frac{(x-1)(x+1)}{2}}", "", "")
        judge_math(r"\{1,2\}", r"$\{2,1\}$ and 0.5 and 1,234", "", "")


class Template:
    """Forks a worker for every socket that it receives, and ends it when the socket closes."""

    def __init__(self) -> None:
        self._control = socket.socket(fileno=0)
        self._poll = select.poll()
        self._workers: dict[int, tuple[int, int, int]] = {}
        """By line and by pidfd: pid, line and pidfd."""

    def serve(self) -> None:
        """Serve until the pool closes the socket."""
        self._poll.register(0, select.POLLIN)
        self._control.sendall(b"+")
        while True:
            for fd, _ in self._poll.poll():
                if fd == 0:
                    data, lines, _, _ = socket.recv_fds(self._control, 1, 1)
                    if not data:
                        return
                    self._fork(lines[0])
                else:
                    self._end(fd)

    def _fork(self, line: int) -> None:
        pid = os.fork()
        if pid == 0:
            try:
                self._become_worker(line)
            finally:
                os._exit(1)
        pidfd = os.pidfd_open(pid)
        self._workers[line] = self._workers[pidfd] = (pid, line, pidfd)
        self._poll.register(line, 0)
        self._poll.register(pidfd, select.POLLIN)

    def _end(self, fd: int) -> None:
        """End a worker, when its socket closed or its process ended."""
        found = self._workers.get(fd)
        if found is None:
            return
        pid, *both = found
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for key in both:
            self._poll.unregister(key)
            del self._workers[key]
            os.close(key)

    def _become_worker(self, line: int) -> None:
        for fd in [0, *self._workers]:
            os.close(fd)
        for name, most in (
            (resource.RLIMIT_AS, _WORKER_BYTES),
            (resource.RLIMIT_FSIZE, 0),
            (resource.RLIMIT_NPROC, 0),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(name, (most, most))
        work(socket.socket(fileno=line))


def work(line: socket.socket) -> None:
    """Judge jobs until the line closes."""
    stream = line.makefile("rwb")
    while head := stream.read(8):
        cpu_s, job, *arguments = msgspec.json.decode(stream.read(int.from_bytes(head, "big")))
        # The signal ends the process.
        signal.setitimer(signal.ITIMER_PROF, float(cpu_s))
        try:
            judgement = JOBS[job](*arguments)
        except Exception as error:  # noqa: BLE001 - libraries raise anything on hostile text
            judgement = Judgement()
            os.write(2, f"{job}: {type(error).__name__} counts as wrong\n".encode())
        signal.setitimer(signal.ITIMER_PROF, 0)
        data = msgspec.json.encode(judgement)
        stream.write(len(data).to_bytes(8, "big") + data)
        stream.flush()


def main(arguments: list[str]) -> None:
    """Run as `python -m ... MODULE ...`, with its socket on descriptor 0."""
    warnings.simplefilter("ignore")
    warm_up(arguments)
    Template().serve()


if __name__ == "__main__":
    main(sys.argv[1:])
