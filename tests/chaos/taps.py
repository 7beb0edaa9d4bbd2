"""Moments at which a part of a real run is killed, by name.

Owns: which calls are moments, and dying before or after one of them. Does not own: who is tapped
with what (forked). Invariant: only public calls are tapped, of real parts, inside the part's own
process before it starts; nothing changes but that the process, or the one that the tap names, gets
SIGKILL at its moment; what it did is on disk before.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
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


def put_on(tap: Tap, folder: Path) -> None:
    """Make this process kill the victim at the tap's moment.

    The victim's process id is in `folder`/pids; what was done goes to `folder`/fired.
    """
    calls = [0]

    def pass_by(side: Side) -> None:
        if side != tap.side:
            return
        calls[0] += 1
        if calls[0] == tap.count:
            _strike(tap, folder)

    _wrap(MOMENTS[tap.part][tap.moment], pass_by)


def witness_steps(folder: Path) -> None:
    """Write down which groups each published version was trained on, before it is marked."""

    owner, name, function = _find(f"{_READER}.mark_trained")

    @functools.wraps(function)
    def watched(self: Any, group_ids: Sequence[str], *, fence: int, policy_version: int) -> None:
        line = {"version": policy_version, "group_ids": list(group_ids)}
        append_line(folder / "witness", json.dumps(line))
        function(self, group_ids, fence=fence, policy_version=policy_version)

    setattr(owner, name, watched)


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


def _find(where: str) -> tuple[Any, str, Callable[..., Any]]:
    """(owner, name, function) of a method or module function."""
    module, _, path = where.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for word in owners:
        owner = getattr(owner, word)
    return owner, name, getattr(owner, name)


def _wrap(where: str, pass_by: Callable[[Side], None]) -> None:
    owner, name, function = _find(where)
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def tapped_async(*args: Any, **words: Any) -> Any:
            pass_by("before")
            answer = await function(*args, **words)
            pass_by("after")
            return answer

        setattr(owner, name, tapped_async)
        return

    @functools.wraps(function)
    def tapped(*args: Any, **words: Any) -> Any:
        pass_by("before")
        answer = function(*args, **words)
        pass_by("after")
        return answer

    setattr(owner, name, tapped)
