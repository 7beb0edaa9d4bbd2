"""The auditor of chaos: what checkpoints, metrics and Redis prove about slots and tokens.

Owns: reading what Redis holds of a run, the lineage of the surviving weights, the verdict and its
line. Does not own: who is killed and when (chaos, whole, forked). Invariant: it only reads; a
verdict is an AssertionError that names the slots, or the number of slots without a place.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from outloop.buffer.reader import BufferReader
from outloop.buffer.redis.client import connect_sync
from outloop.buffer.redis.keys import prefix
from outloop.buffer.run import Run
from outloop.buffer.telemetry import read_metrics

_MAX_GAP = 0.02
"""Nats, on average over a step's tokens of the trainer's version. Who goes on with a turn after a
publish still has keys and values of the version before."""
Mark = Mapping[str, Any]
"""The mark of a checkpoint, as its JSON holds it."""


class Audited(Protocol):
    """A run that was made to suffer."""

    def suffered(self) -> str:
        """What was done to it."""

    def audit(self) -> str:
        """What can be said for it; AssertionError where it broke a promise."""

    def stop(self) -> None:
        """Nothing of it is left."""


@dataclass(frozen=True)
class Held:
    """What Redis holds of a run."""

    cursor: int
    """Every slot below it was admitted once, or is in `window`."""
    replay: frozenset[int]
    """Slots to be played again."""
    window: frozenset[int]
    """Slots of a step that are not started yet."""
    live: tuple[int, ...]
    """Slots of the groups that are neither acknowledged nor dropped."""
    num_leased: int
    dropped: frozenset[int]
    parents: Mapping[int, int]
    """Version -> the version whose weights it was made from."""
    stats: Mapping[str, float]
    attempts: Mapping[str, int]
    """By the column of the ledger in which they ended."""


def read_held(reader: BufferReader, run: Run) -> Held:
    """What Redis holds of the run now."""
    ledger = reader.ledger()
    numbers = {name: column.num_attempts for name, column in ledger.columns.items()}
    assert sum(numbers.values()) == ledger.num_started, f"the ledger does not close: {numbers}"
    client: Any = connect_sync(run.redis_url)
    name = prefix(run.run_id)
    dropped = set()
    for group in client.scan_iter(match=f"{name}group:*", count=1000, _type="hash"):
        slot, state = client.hmget(group, "slot", "state")
        if state == b"dropped":
            dropped.add(int(slot))
    held = Held(
        cursor=int(client.hget(f"{name}state", "cursor")),
        replay=frozenset(map(int, client.zrange(f"{name}replay", 0, -1))),
        window=frozenset(map(int, client.zrange(f"{name}window", 0, -1))),
        live=tuple(int(s) for _, s in client.zrange(f"{name}groups", 0, -1, withscores=True)),
        num_leased=client.zcard(f"{name}leases"),
        dropped=frozenset(dropped),
        parents={
            int(version): int(parent)
            for version, parent in client.hgetall(f"{name}version_parents").items()
            if parent
        },
        stats=reader.stats(),
        attempts=numbers,
    )
    client.close()
    return held


def lineage_of(version: int, parents: Mapping[int, int]) -> set[int]:
    """The version and those it came from."""
    lineage = {version}
    while (parent := parents.get(version)) is not None:
        version = parent
        lineage.add(version)
    return lineage


def read_marks(run_dir: Path) -> list[Mark]:
    """The mark of every complete checkpoint, by step."""
    paths = (run_dir / "checkpoints").glob("step_*")
    found = sorted(paths, key=lambda path: int(path.name.partition("_")[2]))
    return [json.loads((path / "state.json").read_text())["mark"] for path in found]


def surviving_groups(marks: Sequence[Mark], parents: Mapping[int, int]) -> list[str]:
    """Every group in the weights of the last checkpoint, once for each time it was trained."""
    assert marks, "no checkpoint was written"
    lineage = lineage_of(marks[-1]["policy_version"], parents)
    return [
        group_id
        for mark in marks
        if mark["policy_version"] in lineage
        for group_id in mark["group_ids"]
    ]


def slot_of(group_id: str) -> int:
    """The slot that a group's id begins with."""
    return int(group_id[1:].partition("-")[0])


def check_slots(slots: Collection[int], held: Held) -> int:
    """Each slot was trained at most once, and none below the cursor is lost.

    Returns the number of slots that were dropped with a reason and not played again.

    Raises:
        AssertionError: a slot was trained twice, is in two places, or in none.
    """
    trained, live = set(slots), set(held.live)
    assert len(slots) == len(trained), f"trained twice: {Counter(slots).most_common(3)}"
    assert len(held.live) == len(live), f"two live groups of one slot: {sorted(held.live)}"
    assert not trained & live, f"live and in a checkpoint: {trained & live}"
    assert not trained & held.replay, f"in a checkpoint and to be played: {trained & held.replay}"
    assert not held.window & (trained | live), f"started and in the window: {held.window}"
    missing = set(range(held.cursor)) - trained - live - held.replay - held.window
    assert missing <= held.dropped, f"lost: {missing - held.dropped}"
    dropped = sum(n for name, n in held.stats.items() if name.startswith("buffer/dropped/"))
    assert len(missing) <= dropped, f"dropped without a reason: {missing}, {dropped} counted"
    assert held.stats["buffer/dropped/malformed"] == 0
    return len(missing)


@dataclass(frozen=True)
class Account:
    """What the surviving weights were trained on, by everybody who knows of it."""

    held: Held
    groups: Sequence[str]
    num_dropped: int
    """Slots that were dropped with a reason and are not played again."""
    num_checkpoints: int

    def __str__(self) -> str:
        return (
            f"{len(self.groups)} slots trained, {self.num_dropped} dropped, "
            f"{self.num_checkpoints} checkpoints"
        )


def check_gaps(run_dir: Path) -> None:
    """Tokens were sampled with the weights of the version that they are recorded as.

    Raises:
        AssertionError: the trainer computes other logprobs of a step's tokens.
    """
    gaps = {
        row["step"]: gap
        for row in read_metrics(run_dir)
        if (gap := row.get("train/logprob_gap_mean")) is not None and not gap <= _MAX_GAP
    }
    assert not gaps, f"sampled with other weights, by the logprob gaps of steps: {gaps}"


def account_of(run: Run, witness: Path | None = None) -> Account:
    """What checkpoints, Redis, metrics and, if there is one, the file of a witness of updates say.

    Raises:
        AssertionError: a slot was trained twice or lost, tokens were not sampled with the weights
            of their version, or they say different things.
    """
    check_gaps(run.dir)
    reader = BufferReader.connect(run)
    held = read_held(reader, run)
    reader.close()
    marks = read_marks(run.dir)
    groups = surviving_groups(marks, held.parents)
    if witness is not None:
        lineage = lineage_of(marks[-1]["policy_version"], held.parents)
        lines = map(json.loads, witness.read_text().splitlines())
        seen = [name for line in lines if line["version"] in lineage for name in line["group_ids"]]
        assert sorted(seen) == sorted(groups), f"trained {sorted(seen)}, marked {sorted(groups)}"
    num_dropped = check_slots([slot_of(name) for name in groups], held)
    return Account(held, groups, num_dropped, len(marks))


def is_sound(name: str, run: Audited, play: Callable[[], None]) -> bool:
    """Play a run, audit and stop it, and print the verdict with its name."""
    before = time.monotonic()
    try:
        play()
        verdict, is_good = run.audit(), True
    except AssertionError as error:
        verdict, is_good = f"FAILED after {run.suffered()}: {error}", False
    finally:
        run.stop()
    print(f"{name}: {time.monotonic() - before:.1f} s, {verdict}", flush=True)
    return is_good
