"""Moments at which a part of a real run is killed, by name.

Owns: which calls are moments, and dying before or after one of them. Does not own: who is watched
for what (forked). Invariant: parts run as they are; the interpreter tells of calls, as it tells a
debugger, and only public ones are moments. Nothing changes but that the process, or the one that
the tap names, gets SIGKILL at its moment; what it did is on disk before.
"""

from __future__ import annotations

import dis
import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

_READER = "outloop.buffer.reader:BufferReader"
_WRITER = "outloop.buffer.writer:BufferWriter"
MOMENTS: dict[str, dict[str, str]] = {
    "trainer": {
        "recover": f"{_READER}.recover",
        "take": f"{_READER}.take",
        "step": "outloop.engine.train.ranks.rank_worker:RankWorker.train_step",
        "announce": f"{_READER}.announce_version",
        "publish": "outloop.engine.publish.publisher:Publisher.publish",
        "bucket": "outloop.engine.train.ranks.controller:RankController.read",
        "acknowledge_version": f"{_READER}.acknowledge_version",
        "mark_trained": f"{_READER}.mark_trained",
        "checkpoint": "outloop.engine.train.ranks.rank_worker:RankWorker.save",
        "checkpoint_rename": "outloop.engine.train.checkpoint.async_writer:sync_to_disk",
        "checkpoint_cleanup": "outloop.engine.train.checkpoint.checkpoint_format:remove_old",
        "acknowledge": f"{_READER}.acknowledge",
    },
    "router": {
        "claim": f"{_WRITER}.claim",
        "open": f"{_WRITER}.open_episodes",
        "turn": f"{_WRITER}.append_turn",
        "close": f"{_WRITER}.close_episode",
    },
    "runner": {
        "claim": "outloop.envs.runner.router_client:RouterClient.claim",
        "close": "outloop.envs.runner.router_client:RouterClient.close_episode",
    },
}
"""Part -> name -> where the call is."""
Side = Literal["before", "after"]
OnCall = Callable[[Side, FrameType], None]
"""Called with the frame of a call that is watched."""


@dataclass(frozen=True)
class Tap:
    """`victim` dies before or after the `count`-th call of a moment of `part`."""

    part: str
    moment: str
    side: Side
    count: int
    victim: str

    def __str__(self) -> str:
        killed = "" if self.victim == self.part else f" kills {self.victim}"
        return f"{self.part} {self.side} {self.moment}{killed}"


def points_of(part: str) -> list[tuple[str, Side]]:
    """Every moment of a part with its two sides."""
    sides: tuple[Side, Side] = ("before", "after")
    return [(moment, side) for moment in MOMENTS[part] for side in sides]


def check_moments() -> None:
    """Every moment is a call that exists.

    Raises:
        AttributeError, ModuleNotFoundError: it was renamed; change MOMENTS.
    """
    for moments in MOMENTS.values():
        for where in moments.values():
            _find(where)


def put_on(tap: Tap, folder: Path) -> OnCall:
    """Kills the victim at the tap's moment.

    The victim's process id is in `folder`/pids; what was done goes to `folder`/fired.
    """
    calls = [0]

    def pass_by(side: Side, frame: FrameType) -> None:
        if side != tap.side:
            return
        calls[0] += 1
        if calls[0] == tap.count:
            _strike(tap, folder)

    return pass_by


def witness_steps(folder: Path) -> OnCall:
    """Writes down which groups each published version was trained on, before it is marked."""

    def witness(side: Side, frame: FrameType) -> None:
        if side == "before":
            given = frame.f_locals
            line = {"version": given["policy_version"], "group_ids": list(given["group_ids"])}
            append_line(folder / "witness", json.dumps(line))

    return witness


def watch(watched: Mapping[str, Sequence[OnCall]]) -> None:
    """Have every thread of this process call back before and after calls, by where they are.

    After: only of those that returned. An async call begins and ends once, however often it waits.
    """
    by_code = {_find(where).__code__: on_calls for where, on_calls in watched.items()}

    def on_call(frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        on_calls = by_code.get(frame.f_code)
        if on_calls is None:
            return None
        frame.f_trace_lines = False
        if _is_first(frame):
            for one in on_calls:
                one("before", frame)
        return on_return

    def on_return(frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
        if event == "return" and _instruction(frame) in ("RETURN_VALUE", "RETURN_CONST"):
            for one in by_code[frame.f_code]:
                one("after", frame)
        return on_return

    threading.settrace(on_call)
    sys.settrace(on_call)


def _is_first(frame: FrameType) -> bool:
    """False where an async call goes on after it waited."""
    return frame.f_code.co_code[frame.f_lasti + 1] == 0


def _instruction(frame: FrameType) -> str:
    """Where the frame is: a call that raises, or waits, is at another one than its return."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]]


def _strike(tap: Tap, folder: Path) -> None:
    victim = os.getpid()
    if tap.victim != tap.part:
        victim = int((folder / "pids" / tap.victim).read_text())
    append_line(folder / "fired", str(tap))
    try:
        os.kill(victim, signal.SIGKILL)
    except ProcessLookupError:
        # It is dead already and not started again yet.
        return


def append_line(path: Path, line: str) -> None:
    """Write a line that is on disk when this returns."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(descriptor, f"{line}\n".encode())
    os.fsync(descriptor)
    os.close(descriptor)


def _find(where: str) -> Callable[..., Any]:
    """A method or a function of a module."""
    module, _, path = where.partition(":")
    found: Any = importlib.import_module(module)
    for word in path.split("."):
        found = getattr(found, word)
    return found
