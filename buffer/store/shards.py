"""The bytes of turns on shards: parts of a Redis Cluster, each under a hash tag of its own.

The run's primary has the list of an episode's turns, and the scripts that enter them there. The
shard of the episode's group has the hash `bytes:EPISODE`, in which the bytes of a turn are under
their digest. Promises:

* A list names only what its shard has acknowledged before: bytes are written first. So bytes that
  are missing were lost by the shard, and `read` says so.
* What is named is not deleted: bytes go when a script has freed their episode, in the step that
  takes the list away and enters the episode into `freed`; or if the run does not know the episode.
* Nothing is overwritten: other bytes have another name. The same turn again writes the same.
* What a writer that died left without a name goes with its episode's other bytes; if they went
  before, at the next start of the trainer (`free_unknown`).
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import redis
import redis.asyncio

from outloop.buffer.errors import NotFound
from outloop.buffer.records import Opening
from outloop.buffer.redis.keys import shard_of, shard_tags
from outloop.buffer.redis.pipelining import PipelinedCommands
from outloop.buffer.redis.refused_writes import UNKNOWN_FOLDER, folder_of, probe, write_obstacle
from outloop.buffer.redis.scripts import AsyncScripts, SyncScripts
from outloop.buffer.store.turns import Listed, Stored

_DIGEST_BYTES = 16
_NAME = re.compile(rb"(\d+) ([0-9a-f]{%d})" % (2 * _DIGEST_BYTES))
"""Number of a shard, and a digest."""
_CACHED_EPISODES = 2**16
_SCAN_COUNT = 1000


class ShardedTurns:
    """For blocking clients; may be used from several threads."""

    def __init__(
        self,
        client: redis.Redis,
        run_id: str,
        prefix: str,
        scripts: SyncScripts,
        shards: Sequence[redis.Redis],
    ) -> None:
        self._client = client
        self._prefix = prefix
        self._scripts = scripts
        self._shards = shards
        self._prefixes = _prefixes(run_id, len(shards))
        self._threads = ThreadPoolExecutor(len(shards), thread_name_prefix="shard")

    def read(self, listed: Listed) -> list[Stored]:
        """As `TurnStore.read`; from all shards at once."""
        request = _Request(self._prefixes, listed)
        numbers = list(request.wanted)
        if len(numbers) == 1:
            request.note(numbers[0], self._ask(request, numbers[0]))
        else:
            answers = self._threads.map(lambda number: self._ask(request, number), numbers)
            for number, values in zip(numbers, answers, strict=True):
                request.note(number, values)
        if request.lacking:
            with self._client.pipeline(transaction=False) as pipeline:
                for episode_id in request.lacking:
                    pipeline.lrange(f"{self._prefix}episode:{episode_id}:turns", 0, 0)
                request.note_freed(pipeline.execute())
        return request.found

    def free(self) -> None:
        """As `TurnStore.free`; twice is once."""
        deleted: list[bytes] = []
        while due := self._scripts.call(
            "freed", *deleted, what="deleting freed turns", is_counted=False
        ):
            for number, names in _by_shard(self._prefixes, due).items():
                self._shards[number - 1].unlink(*names)
            deleted = due

    def free_unknown(self) -> None:
        """As `TurnStore.free_unknown`: an episode is known from before its first turn is written
        until after it was freed."""
        for shard, prefix in zip(self._shards, self._prefixes, strict=True):
            names: Iterator[bytes] = shard.scan_iter(f"{prefix}*", count=_SCAN_COUNT)
            while some := list(islice(names, _SCAN_COUNT)):
                with self._client.pipeline(transaction=False) as pipeline:
                    for name in some:
                        episode_id = name.decode().removeprefix(prefix)
                        pipeline.exists(f"{self._prefix}episode:{episode_id}")
                    are_known = pipeline.execute()
                unknown = [n for n, is_known in zip(some, are_known, strict=True) if not is_known]
                if unknown:
                    shard.unlink(*unknown)

    def write_obstacle(self) -> str | None:
        """As `TurnStore.write_obstacle`, of the first shard that has one."""
        for number, shard in enumerate(self._shards, 1):
            try:
                shard.execute_command(*probe(f"{self._prefixes[number - 1]}nothing"))
            except redis.RedisError as error:
                return f"shard {number}: {write_obstacle(error, folder_of(shard))}"
        return None

    def close(self) -> None:
        """Close the connections."""
        self._threads.shutdown()
        for shard in self._shards:
            shard.close()

    def _ask(self, request: _Request, number: int) -> list[Any]:
        with self._shards[number - 1].pipeline(transaction=False) as pipeline:
            for name, digests in request.commands(number):
                pipeline.hmget(name, digests)
            return pipeline.execute()


class AsyncShardedTurns:
    """The same for asyncio."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        run_id: str,
        prefix: str,
        scripts: AsyncScripts,
        shards: Sequence[redis.asyncio.Redis],
        *,
        min_replicas: int,
    ) -> None:
        """`min_replicas`: so many replicas of a shard have a turn before its name is given out."""
        self._client = client
        self._prefix = prefix
        self._scripts = scripts
        self._shards = shards
        self._prefixes = _prefixes(run_id, len(shards))
        self._writing = [PipelinedCommands(shard, min_replicas) for shard in shards]
        self._numbers: OrderedDict[str, int] = OrderedDict()
        """The shards of the episodes that were opened or written last."""
        self._is_freeing = False

    def place(self, opening: Opening) -> str:
        """The shard of its group; of an evaluation, whose episodes are read one by one, of its own.

        It is noted for `keep`.
        """
        number = shard_of(opening.group_id or opening.episode_id, len(self._shards))
        self._note(opening.episode_id, number)
        return str(number)

    async def keep(self, episode_id: str, record: bytes) -> bytes:
        """Write the turn to its shard, and return its name."""
        number = self._numbers.get(episode_id) or await self._look_up(episode_id)
        digest = hashlib.blake2b(record, digest_size=_DIGEST_BYTES).hexdigest()
        name = self._prefixes[number - 1] + episode_id
        await self._writing[number - 1].execute(("HSET", name, digest, record))
        return f"{number} {digest}".encode()

    async def read(self, listed: Listed) -> list[Stored]:
        """As `ShardedTurns.read`."""
        request = _Request(self._prefixes, listed)
        numbers = list(request.wanted)
        answers = await asyncio.gather(*(self._ask(request, number) for number in numbers))
        for number, values in zip(numbers, answers, strict=True):
            request.note(number, values)
        if request.lacking:
            async with self._client.pipeline(transaction=False) as pipeline:
                for episode_id in request.lacking:
                    pipeline.lrange(f"{self._prefix}episode:{episode_id}:turns", 0, 0)
                request.note_freed(await pipeline.execute())
        return request.found

    async def free(self) -> None:
        """As `ShardedTurns.free`."""
        if self._is_freeing:
            return
        self._is_freeing = True
        try:
            deleted: list[bytes] = []
            while due := await self._scripts.call("freed", *deleted, what="deleting freed turns"):
                for number, names in _by_shard(self._prefixes, due).items():
                    await self._shards[number - 1].unlink(*names)
                deleted = due
        finally:
            self._is_freeing = False

    async def write_obstacle(self) -> str | None:
        """As `ShardedTurns.write_obstacle`."""
        for number, shard in enumerate(self._shards, 1):
            try:
                await shard.execute_command(*probe(f"{self._prefixes[number - 1]}nothing"))
            except redis.RedisError as error:
                return f"shard {number}: {write_obstacle(error, UNKNOWN_FOLDER)}"
        return None

    async def close(self) -> None:
        """Close the connections."""
        for writing in self._writing:
            await writing.close()
        for shard in self._shards:
            await shard.aclose()

    async def _ask(self, request: _Request, number: int) -> list[Any]:
        async with self._shards[number - 1].pipeline(transaction=False) as pipeline:
            for name, digests in request.commands(number):
                pipeline.hmget(name, digests)
            return await pipeline.execute()

    async def _look_up(self, episode_id: str) -> int:
        found: Any = await self._client.hget(f"{self._prefix}episode:{episode_id}", "shard")
        if found is None:
            raise NotFound(f"no episode_id={episode_id}")
        self._note(episode_id, int(found))
        return int(found)

    def _note(self, episode_id: str, number: int) -> None:
        self._numbers[episode_id] = number
        while len(self._numbers) > _CACHED_EPISODES:
            self._numbers.popitem(last=False)


class _Request:
    """The names in the lists of some episodes, sorted by shard, and what shards answered."""

    def __init__(self, prefixes: Sequence[str], listed: Listed) -> None:
        self._prefixes = prefixes
        self._ids = [episode_id for episode_id, _ in listed]
        self.found: list[Stored] = []
        self.wanted: dict[int, list[tuple[int, dict[int, bytes]]]] = defaultdict(list)
        """Number of a shard -> (place of an episode, digests by the places of their turns)."""
        self._lacking: list[int] = []
        for place, (_, names) in enumerate(listed):
            found = {turn: _NAME.fullmatch(name) for turn, name in enumerate(names)}
            digests = {turn: match[2] for turn, match in found.items() if match}
            number = next((int(match[1]) for match in found.values() if match), 0)
            if 1 <= number <= len(prefixes):
                self.wanted[number].append((place, digests))
            # What is no name stays: decoding says that it is damaged.
            self.found.append(list(names))

    @property
    def lacking(self) -> list[str]:
        """Episodes of which a shard lacks something."""
        return [self._ids[place] for place in self._lacking]

    def commands(self, number: int) -> Iterator[tuple[str, list[bytes]]]:
        """Keys of a shard, and the digests that are wanted of each."""
        for place, digests in self.wanted[number]:
            yield self._prefixes[number - 1] + self._ids[place], list(digests.values())

    def note(self, number: int, values: Sequence[list[bytes | None]]) -> None:
        """The shard's answers to `commands`."""
        for (place, digests), records in zip(self.wanted[number], values, strict=True):
            turns = list(self.found[place])
            for turn, record in zip(digests, records, strict=True):
                turns[turn] = record
            self.found[place] = turns
            if None in records:
                self._lacking.append(place)

    def note_freed(self, lists: Sequence[Sequence[bytes]]) -> None:
        """The beginnings of the lists of `lacking`, read after the shards were."""
        for place, names in zip(self._lacking, lists, strict=True):
            if not names:
                self.found[place] = []


def _prefixes(run_id: str, num_shards: int) -> list[str]:
    """What the keys of each shard begin with; an episode's id follows."""
    return [f"{{{tag}}}:bytes:" for tag in shard_tags(run_id, num_shards)]


def _by_shard(prefixes: Sequence[str], entries: Sequence[bytes]) -> dict[int, list[str]]:
    """The keys that entries of `freed` name."""
    names: dict[int, list[str]] = defaultdict(list)
    for entry in entries:
        _, number, episode_id = entry.decode().split(" ", 2)
        names[int(number)].append(prefixes[int(number) - 1] + episode_id)
    return names
