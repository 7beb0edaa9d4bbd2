"""Whole trajectories of one size through both faces of the buffer, beside raw redis-py.

Owns: what bench-buffer measures at a size. Does not own: the sizes' summary (buffer), the data
(buffer_load). Invariant: raw pipelines move the very records that the buffer moved, in the same
repeat.
"""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import redis
from buffer_load import build_trajectory, build_turns, make_run, opening_of, start, take, timed
from figures import say

from outloop.buffer.codec import records_codec
from outloop.buffer.reader import BufferReader
from outloop.buffer.records import CheckpointMark, Claim, Opening, Reward, Trajectory, Turn
from outloop.buffer.redis.client import connect_async, connect_sync
from outloop.buffer.redis.keys import key
from outloop.buffer.store.episodes import EPISODE_FIELDS
from outloop.buffer.writer import BufferWriter

SIZES = {"2k": (2048, 2), "16k": (16384, 8), "128k": (131072, 32)}
"""Name -> tokens and turns of a trajectory; half of the tokens are sampled, half are prompts."""
BYTES_PER_SIZE = 32 * 2**20
BATCH_BYTES = 8 * 2**20
NUM_REPEATS = 9
GROUP_SIZE = 8
CHUNK = 2048


def used_memory(client: redis.Redis) -> int:
    """Bytes that the server holds."""
    info: Any = client.info("memory")
    return int(info["used_memory"])


def batches(items: Sequence[Any], num_bytes: int) -> list[Sequence[Any]]:
    """Parts of about BATCH_BYTES, for items of `num_bytes` each."""
    count = max(1, BATCH_BYTES // num_bytes)
    return [items[i : i + count] for i in range(0, len(items), count)]


class SizeBench:
    """One size of trajectory: the buffer's calls and raw pipelines, in turns."""

    def __init__(self, name: str, folder: Path, url: str) -> None:
        self.name = name
        self.url = url
        self.num_tokens, self.num_turns = SIZES[name]
        self.sample = build_trajectory("e", self.num_tokens, self.num_turns)
        self.record = records_codec.encode_trajectory(self.sample)
        number = max(GROUP_SIZE, BYTES_PER_SIZE // len(self.record))
        self.num_groups = number // GROUP_SIZE
        self.number = self.num_groups * GROUP_SIZE
        self.mb = self.number * len(self.record) / 1e6
        self.run = make_run(f"size{name}", folder, url, self.num_groups, GROUP_SIZE)
        self.client = connect_sync(url)
        self.seconds: dict[str, list[float]] = {}

    async def measure(self) -> dict[str, float]:
        """Figures of this size, by name without the size."""
        self.reader = BufferReader.connect(self.run)
        self.writer = await BufferWriter.connect(self.run)
        self.raw_async = connect_async(self.url)
        fence = await start(self.run, self.reader, self.writer)
        trajectories = [
            build_trajectory(f"e{i}", self.num_tokens, self.num_turns) for i in range(self.number)
        ]
        # What the bench itself keeps is not for the buffer's collections to walk through.
        gc.collect()
        gc.freeze()
        self.records = list(map(records_codec.encode_trajectory, trajectories))
        for repeat in range(NUM_REPEATS):
            say(f"trajectories of {self.name} tokens, round {repeat + 1} of {NUM_REPEATS}")
            await self._write(trajectories, repeat)
            await self._play()
            self._read(fence)
        before = used_memory(self.client)
        # Left in the queue for the recovery.
        await self._play()
        self.memory = used_memory(self.client) - before
        self.reader.close()
        await self.writer.close()
        await self.raw_async.aclose()
        self.client.close()
        return self._figures()

    def _note(self, name: str, seconds: float) -> None:
        self.seconds.setdefault(name, []).append(seconds)

    async def _write(self, trajectories: Sequence[Trajectory], repeat: int) -> None:
        """Ours and both raw ways, each first in its turn: a deletion makes the next one dearer."""
        ours = partial(self._write_ours, trajectories, repeat)
        ways = [ours, self._raw_sync, self._raw_asyncio]
        first = repeat % len(ways)
        for way in ways[first:] + ways[:first]:
            await way()

    async def _write_ours(self, trajectories: Sequence[Trajectory], repeat: int) -> None:
        before = time.perf_counter()
        for index, batch in enumerate(batches(trajectories, len(self.record))):
            await self.writer.put_trajectories(batch, key=f"{repeat}.{index}", final=False)
        self._note("write", time.perf_counter() - before)
        self._note("read_sft", timed(lambda: list(self.reader.sft_trajectories())))
        self._forget_trajectories()

    async def _raw_sync(self) -> None:
        records = self.records
        self._note("raw_write", timed(lambda: self._raw_write(records)))
        self._note("raw_get", timed(lambda: self._raw_read(len(records))))
        self.client.delete("raw", *(f"raw{i}" for i in range(self.number)))

    async def _raw_asyncio(self) -> None:
        before = time.perf_counter()
        for number, batch in enumerate(batches(self.records, len(self.record))):
            async with self.raw_async.pipeline(transaction=False) as pipeline:
                for index, record in enumerate(batch):
                    pipeline.set(f"raw{number}.{index}", record)
                await pipeline.execute()
        self._note("raw_write_async", time.perf_counter() - before)
        for number, batch in enumerate(batches(self.records, len(self.record))):
            self.client.delete(*(f"raw{number}.{index}" for index in range(len(batch))))

    def _forget_trajectories(self) -> None:
        for first in range(0, self.number, CHUNK):
            numbers = range(first, min(first + CHUNK, self.number))
            self.client.delete(*(key(self.run.run_id, f"sft:{number}") for number in numbers))
        self.client.hdel(key(self.run.run_id, "state"), "sft_stored")

    def _raw_write(self, records: Sequence[bytes]) -> None:
        numbered = list(enumerate(records))
        for batch in batches(numbered, len(self.record)):
            with self.client.pipeline(transaction=False) as pipeline:
                for index, record in batch:
                    pipeline.set(f"raw{index}", record)
                pipeline.execute()

    def _raw_read(self, number: int) -> None:
        for batch in batches(range(number), len(self.record)):
            with self.client.pipeline(transaction=False) as pipeline:
                for index in batch:
                    pipeline.get(f"raw{index}")
                pipeline.execute()

    def _raw_turns(self, names: Sequence[str]) -> None:
        for batch in batches(names, len(self.record)):
            with self.client.pipeline(transaction=False) as pipeline:
                for name in batch:
                    pipeline.lrange(f"{name}:turns", 0, -1)
                pipeline.execute()

    def _raw_episodes(self, names: Sequence[str]) -> None:
        for batch in batches(names, len(self.record)):
            with self.client.pipeline(transaction=False) as pipeline:
                for name in batch:
                    pipeline.hmget(name, EPISODE_FIELDS)
                    pipeline.lrange(f"{name}:turns", 0, -1)
                pipeline.execute()

    async def _play(self) -> None:
        """Fill the queue of groups turn by turn, as routers do."""
        turns: dict[str, tuple[Turn, ...]] = {}
        claims: list[Claim] = []
        while answer := (await self.writer.claim(key=os.urandom(8).hex(), count=CHUNK)).claims:
            claims += answer
        openings = [opening_of(claim) for claim in claims]
        for opening in openings:
            turns[opening.episode_id] = build_turns(
                opening.episode_id, self.num_tokens, self.num_turns
            )
        limit = asyncio.Semaphore(32)

        async def play(opening: Opening) -> None:
            async with limit:
                for turn in turns[opening.episode_id]:
                    await self.writer.append_turn(turn)
                await self.writer.close_episode(
                    opening.episode_id,
                    outcome="completed",
                    failure_kind=None,
                    reward=Reward(value=1.0),
                    error="",
                    key="k",
                )

        before = time.perf_counter()
        await self.writer.open_episodes(openings)
        await asyncio.gather(*map(play, openings))
        self._note("play", time.perf_counter() - before)
        names = [key(self.run.run_id, f"episode:{o.episode_id}") for o in openings]
        self._note("raw_turns", timed(lambda: self._raw_turns(names)))
        self._note("raw_episodes", timed(lambda: self._raw_episodes(names)))

    def _read(self, fence: int) -> None:
        per_take = max(1, BATCH_BYTES // len(self.record) // GROUP_SIZE)
        ids: list[str] = []
        before = time.perf_counter()
        while left := self.num_groups - len(ids):
            leases = take(self.reader, fence, min(per_take, left))
            ids += [lease.group.group_id for lease in leases]
        self._note("read", time.perf_counter() - before)
        self.reader.acknowledge(
            CheckpointMark(fence=fence, group_ids=tuple(ids), next_slot=0, policy_version=0)
        )

    def _figures(self) -> dict[str, float]:
        s = {name: statistics.median(seconds) for name, seconds in self.seconds.items()}
        raw_write = min(("raw_write", "raw_write_async"), key=s.__getitem__)
        arrays = sum(
            turn.prompt_ids.nbytes + turn.output_ids.nbytes + turn.output_ids.nbytes
            for turn in self.sample.turns
        )
        turns = sum(len(records_codec.encode_turn(turn)) for turn in self.sample.turns)
        return {
            "write_vs_raw": self._ratio(raw_write, "write"),
            "read_vs_raw": self._ratio("raw_episodes", "read"),
            "read_vs_raw_turns": self._ratio("raw_turns", "read"),
            "read_vs_get": self._ratio("raw_get", "read"),
            "sft_vs_get": self._ratio("raw_get", "read_sft"),
            "play_vs_raw": self._ratio(raw_write, "play"),
            "bytes_per_token_vs_arrays": max(turns, len(self.record)) / arrays,
            "memory_vs_arrays": self.memory / (arrays * self.number),
            "write_mb_s": self.mb / s["write"],
            "read_mb_s": self.mb / s["read"],
            "raw_write_mb_s": self.mb / s[raw_write],
            "raw_read_mb_s": self.mb / s["raw_episodes"],
            "raw_get_mb_s": self.mb / s["raw_get"],
            "play_turns_per_s": self.number * self.num_turns / s["play"],
        }

    def _ratio(self, raw: str, ours: str) -> float:
        """Median over the repeats, whose two halves met the same machine."""
        pairs = zip(self.seconds[raw], self.seconds[ours], strict=False)
        return statistics.median(one / other for one, other in pairs)
