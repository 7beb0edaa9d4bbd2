"""The weights of a run's task sources: how they are stored, and how they change.

A change holds from the first unclaimed slot (with priorities: from the first window without a
claimed slot), so no claimed slot changes its task.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import redis
import redis.asyncio

from outloop.buffer.errors import NotFound, SettingsError
from outloop.buffer.redis.client import translated
from outloop.buffer.redis.scripts import SyncScripts
from outloop.buffer.tasks.mixture import Mixture, TaskSource, WeightsFrom, check_weights
from outloop.buffer.tasks.priorities import read_priorities

_sources = msgspec.json.Decoder(tuple[TaskSource, ...])
_weights = msgspec.json.Decoder(tuple[float, ...])


def encode_sources(sources: Sequence[TaskSource]) -> bytes:
    """Sources as they are stored."""
    return msgspec.json.encode(list(sources))


def encode_weights(weights: Sequence[float]) -> bytes:
    """Weights as they are stored, behind the slot that the script puts before them."""
    return msgspec.json.encode([float(weight) for weight in weights])


def decode_sources(data: bytes) -> tuple[TaskSource, ...]:
    """What encode_sources wrote."""
    return _sources.decode(data)


def decode_schedule(entries: Sequence[bytes]) -> tuple[WeightsFrom, ...]:
    """Every entry of `task_weights`, oldest first."""
    found = []
    for entry in entries:
        slot, _, data = entry.partition(b" ")
        found.append(WeightsFrom(int(slot), _weights.decode(data)))
    return tuple(found)


async def load_mixture(client: redis.asyncio.Redis, prefix: str, seed: int) -> tuple[int, Mixture]:
    """The task order as it is now, and the revision of its weights."""
    with translated("reading the weights of tasks"):
        async with client.pipeline(transaction=True) as pipeline:
            pipeline.hmget(f"{prefix}state", ["sources", "weights_revision", "priority_window"])
            pipeline.lrange(f"{prefix}task_weights", 0, -1)
            pipeline.get(f"{prefix}task_priorities")
            (sources, revision, window), entries, priorities = await pipeline.execute()
    order = read_priorities(priorities, int(window or 1))
    mixture = Mixture(decode_sources(sources), decode_schedule(entries), seed, order)
    return int(revision or 0), mixture


class TaskWeights:
    """The weights of one run."""

    def __init__(self, client: redis.Redis, prefix: str, scripts: SyncScripts) -> None:
        self._client = client
        self._prefix = prefix
        self._scripts = scripts

    def read(self) -> tuple[tuple[TaskSource, ...], tuple[WeightsFrom, ...]]:
        """The sources, and their weights by slot.

        Raises:
            NotFound: no tasks are registered yet.
        """
        with (
            translated("reading the weights of tasks"),
            self._client.pipeline(transaction=True) as pipeline,
        ):
            pipeline.hget(f"{self._prefix}state", "sources")
            pipeline.lrange(f"{self._prefix}task_weights", 0, -1)
            sources, entries = cast(Any, pipeline.execute())
        if sources is None:
            raise NotFound("the run has no tasks yet; wait until its runner has started")
        return decode_sources(sources), decode_schedule(entries)

    def change(self, weights: Mapping[str, float]) -> WeightsFrom:
        """Change the weights of the named sources from the next slot on; others keep theirs.

        Raises:
            SettingsError: no such source; the nearest is named.
            RecordError: the weights choose nothing.
            NotFound: no tasks are registered yet.
        """
        sources, schedule = self.read()
        names = [source.name for source in sources]
        for name in weights:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise SettingsError(
                    f"the run has no task source {name!r}; {hint}it has: {', '.join(names)}"
                )
        before = dict(zip(names, schedule[-1].weights, strict=True))
        after = tuple(float(weights.get(name, before[name])) for name in names)
        check_weights(after, names)
        (slot,) = self._scripts.call(
            "set_task_weights", encode_weights(after), what="changing the weights of tasks"
        )
        return WeightsFrom(int(slot), after)
