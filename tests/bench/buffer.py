"""`make bench-buffer`: what the buffer costs beside raw pipelined redis-py in the same run.

Starts an embedded Redis, moves whole trajectories of 2k, 16k and 128k tokens through both faces of
the buffer and, by turns, the same bytes through raw pipelines; then takes batches from short and
long queues, and kills the server. Prints a table and writes runs/bench/buffer.json.

write_vs_raw: put_trajectories beside pipelined SETs of the same records, synchronous or asyncio,
whichever is faster. read_vs_raw: take beside pipelined LRANGEs of the very same turns.
read_vs_get, sft_vs_get: take and sft_trajectories beside GETs of one value for each trajectory.
play_vs_raw: turn after turn, as routers record, beside the SETs. Each is the median over repeats;
without a size it is the worst of the sizes. codec_share: encoding and decoding, of the time that
write and take need.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from figures import tell

from outloop.buffer import codec
from outloop.buffer.connect import connect_async, connect_sync
from outloop.buffer.embedded import EmbeddedRedis
from outloop.buffer.join import init_run
from outloop.buffer.keys import key
from outloop.buffer.reader import BufferReader
from outloop.buffer.records import (
    CheckpointMark,
    Claim,
    Episode,
    Lease,
    Opening,
    Reward,
    Sampling,
    Task,
    Trajectory,
    Turn,
    VersionSpan,
)
from outloop.buffer.run import Run, create_run
from outloop.buffer.scripts import load_script
from outloop.buffer.settings import build_settings
from outloop.buffer.writer import BufferWriter

SIZES = {"2k": (2048, 2), "16k": (16384, 8), "128k": (131072, 32)}
"""Name -> tokens and turns of a trajectory; half of the tokens are drawn, half are prompts."""
BYTES_PER_SIZE = 32 * 2**20
BATCH_BYTES = 8 * 2**20
NUM_REPEATS = 5
GROUP_SIZE = 8
QUEUES = (1_000, 100_000)
TAKE_GROUPS = 32
NUM_TAKES = 20
CHUNK = 2048


def build_turns(episode_id: str, num_tokens: int, num_turns: int) -> tuple[Turn, ...]:
    """A conversation of `num_turns` equal turns in one branch."""
    rng = np.random.default_rng(0)
    half = num_tokens // num_turns // 2
    return tuple(
        Turn(
            turn_id=f"{episode_id}.{index}",
            episode_id=episode_id,
            parent_turn_id=f"{episode_id}.{index - 1}" if index else None,
            prompt_ids=rng.integers(0, 150_000, half, dtype=np.int32),
            output_ids=rng.integers(0, 150_000, half, dtype=np.int32),
            behavior_logprobs=-rng.random(half, dtype=np.float32),
            version_spans=(VersionSpan(policy_version=0, start=0, end=half),),
            loss_spans=((0, half),),
            sampling=Sampling(temperature=1.0),
            finish_reason="stop",
            branch_cause="extension" if index else "root",
            started_at=time.time(),
            finished_at=time.time(),
        )
        for index in range(num_turns)
    )


def build_trajectory(episode_id: str, num_tokens: int, num_turns: int) -> Trajectory:
    """The same as a whole trajectory."""
    episode = Episode(
        episode_id=episode_id,
        task_id="t0",
        group_id=None,
        attempt=0,
        purpose="sft",
        outcome="completed",
        failure_kind=None,
        reward=Reward(value=1.0),
        metadata={},
        opened_at=time.time(),
        closed_at=time.time(),
    )
    return Trajectory(episode=episode, turns=build_turns(episode_id, num_tokens, num_turns))


def make_run(name: str, folder: Path, url: str, groups_per_step: int, group_size: int) -> Run:
    """A run in Redis."""
    settings = build_settings(
        {
            "run": {"name": name, "dir": str(folder)},
            "model": {"path": str(folder)},
            "env": {"episode_deadline_s": 3600},
            "buffer": {
                "group_size": group_size,
                "max_staleness": 0,
                "group_deadline_s": 3600,
                "lease_s": 3600,
            },
            "trainer": {"groups_per_step": groups_per_step},
        },
        source="bench",
    )
    run = create_run(settings, folder / name, url)
    init_run(run)
    return run


async def start(run: Run, reader: BufferReader, writer: BufferWriter) -> int:
    """Tasks, a fence and version 0; returns the fence."""
    await writer.register_tasks([Task(task_id=f"t{i}", payload={}) for i in range(64)], [])
    fence = reader.acquire_fence()
    reader.recover(None, fence=fence)
    reader.announce_version(0, None)
    reader.acknowledge_version(0)
    return fence


def opening_of(claim: Claim) -> Opening:
    """The opening of a claim."""
    return Opening(
        episode_id=f"{claim.group_id}-{claim.attempt}",
        task_id=claim.task.task_id,
        group_id=claim.group_id,
        attempt=claim.attempt,
        purpose="train",
        deadline_at=4600.0,
        opened_at=1000.0,
    )


def take(reader: BufferReader, fence: int, num_groups: int) -> list[Lease]:
    """Take what is ready."""
    return reader.take(
        num_groups,
        fence=fence,
        policy_version=0,
        timeout_s=10.0,
        on_wait=lambda sentence: None,
        should_stop=lambda: False,
    )


def timed(call: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    before = time.perf_counter()
    call()
    return time.perf_counter() - before


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
        self.record = codec.encode_trajectory(self.sample)
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
        for repeat in range(NUM_REPEATS):
            await self._write(trajectories, repeat)
            await self._play()
            self._read(fence)
        # Left in the queue for the recovery.
        await self._play()
        self._codec(trajectories)
        self.reader.close()
        await self.writer.close()
        await self.raw_async.aclose()
        self.client.close()
        return self._figures()

    def _note(self, name: str, seconds: float) -> None:
        self.seconds.setdefault(name, []).append(seconds)

    async def _write(self, trajectories: Sequence[Trajectory], repeat: int) -> None:
        before = time.perf_counter()
        for index, batch in enumerate(batches(trajectories, len(self.record))):
            await self.writer.put_trajectories(batch, key=f"{repeat}.{index}", final=False)
        self._note("write", time.perf_counter() - before)
        self._note("read_sft", timed(lambda: list(self.reader.sft_trajectories())))
        self._forget_trajectories()
        records = [self.record] * self.number
        self._note("raw_write", timed(lambda: self._raw_write(records)))
        self._note("raw_get", timed(lambda: self._raw_read(len(records))))
        self.client.delete("raw", *(f"raw{i}" for i in range(self.number)))
        before = time.perf_counter()
        for number, batch in enumerate(batches(records, len(self.record))):
            async with self.raw_async.pipeline(transaction=False) as pipeline:
                for index, record in enumerate(batch):
                    pipeline.set(f"raw{number}.{index}", record)
                await pipeline.execute()
        self._note("raw_write_async", time.perf_counter() - before)
        for number, batch in enumerate(batches(records, len(self.record))):
            self.client.delete(*(f"raw{number}.{index}" for index in range(len(batch))))

    def _forget_trajectories(self) -> None:
        for start in range(0, self.number, CHUNK):
            numbers = range(start, min(start + CHUNK, self.number))
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

    def _raw_lists(self, lists: Sequence[str]) -> None:
        for batch in batches(lists, len(self.record)):
            with self.client.pipeline(transaction=False) as pipeline:
                for name in batch:
                    pipeline.lrange(name, 0, -1)
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
        lists = [key(self.run.run_id, f"episode:{o.episode_id}:turns") for o in openings]
        self._note("raw_lrange", timed(lambda: self._raw_lists(lists)))

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

    def _codec(self, trajectories: Sequence[Trajectory]) -> None:
        turns = [
            [codec.encode_turn(turn) for trajectory in batch for turn in trajectory.turns]
            for batch in batches(trajectories, len(self.record) * GROUP_SIZE)
        ]
        for _ in range(NUM_REPEATS):
            self._note("encode", timed(lambda: consume(map(codec.encode_trajectory, trajectories))))
            with codec.many_at_once():
                self._note("decode", timed(lambda: consume(map(codec.decode_turns, turns))))

    def _figures(self) -> dict[str, float]:
        s = {name: statistics.median(seconds) for name, seconds in self.seconds.items()}
        raw_write = min(("raw_write", "raw_write_async"), key=s.__getitem__)
        arrays = sum(
            turn.prompt_ids.nbytes + turn.output_ids.nbytes + turn.output_ids.nbytes
            for turn in self.sample.turns
        )
        turns = sum(len(codec.encode_turn(turn)) for turn in self.sample.turns)
        return {
            "write_vs_raw": self._ratio(raw_write, "write"),
            "read_vs_raw": self._ratio("raw_lrange", "read"),
            "read_vs_get": self._ratio("raw_get", "read"),
            "sft_vs_get": self._ratio("raw_get", "read_sft"),
            "play_vs_raw": self._ratio(raw_write, "play"),
            "codec_share": (s["encode"] + s["decode"]) / (s["write"] + s["read"]),
            "bytes_per_token_vs_arrays": max(turns, len(self.record)) / arrays,
            "write_mb_s": self.mb / s["write"],
            "read_mb_s": self.mb / s["read"],
            "raw_write_mb_s": self.mb / s[raw_write],
            "raw_read_mb_s": self.mb / s["raw_lrange"],
            "raw_get_mb_s": self.mb / s["raw_get"],
            "encode_mb_s": self.mb / s["encode"],
            "decode_mb_s": self.mb / s["decode"],
            "play_turns_per_s": self.number * self.num_turns / s["play"],
        }

    def _ratio(self, raw: str, ours: str) -> float:
        """Median over the repeats, whose two halves met the same machine."""
        pairs = zip(self.seconds[raw], self.seconds[ours], strict=False)
        return statistics.median(one / other for one, other in pairs)


def consume(items: Iterable[Any]) -> None:
    """Run an iterator, keeping nothing."""
    for _ in items:
        pass


class QueueBench:
    """Take and acknowledge a batch from a short and a long queue of ready groups."""

    def __init__(self, folder: Path, url: str) -> None:
        self.run = make_run("queue", folder, url, QUEUES[-1] + NUM_TAKES * TAKE_GROUPS * 2, 2)
        self.client = connect_sync(url)
        self.meta = key(self.run.run_id, "meta")
        self.num_ready = 0

    async def measure(self) -> dict[str, float]:
        """Milliseconds of a take, its mark and its acknowledgement at each length; their ratio."""
        self.reader = BufferReader.connect(self.run)
        writer = await BufferWriter.connect(self.run)
        self.fence = await start(self.run, self.reader, writer)
        figures: dict[str, float] = {}
        for length in QUEUES:
            before = time.perf_counter()
            await self._fill(writer, length - self.num_ready)
            figures[f"fill_{length}_s"] = time.perf_counter() - before
            self._batch()
            seconds = [timed(self._batch) for _ in range(NUM_TAKES)]
            figures[f"take_{length}_ms"] = 1000 * statistics.median(seconds)
        short, long = (figures[f"take_{length}_ms"] for length in QUEUES)
        figures["take_100k_vs_1k"] = long / short
        await writer.close()
        self.reader.close()
        self.client.close()
        return figures

    def _batch(self) -> None:
        ids = tuple(lease.group.group_id for lease in take(self.reader, self.fence, TAKE_GROUPS))
        self.reader.mark_trained(ids, fence=self.fence, policy_version=0)
        self.reader.acknowledge(
            CheckpointMark(fence=self.fence, group_ids=ids, next_slot=0, policy_version=0)
        )
        self.num_ready -= TAKE_GROUPS

    async def _fill(self, writer: BufferWriter, num_groups: int) -> None:
        """Real scripts in pipelines: one turn of a few tokens and a reward for every episode."""
        left = 2 * num_groups
        closure = codec.encode_closure("completed", None, Reward(value=1.0), "")
        reward = codec.encode_reward(Reward(value=1.0))
        self.client.script_load(load_script("append_turn").text)
        self.client.script_load(load_script("close").text)
        while left:
            claims = (await writer.claim(key=os.urandom(8).hex(), count=min(left, CHUNK))).claims
            left -= len(claims)
            openings = [opening_of(claim) for claim in claims]
            await writer.open_episodes(openings)
            with self.client.pipeline(transaction=False) as pipeline:
                for opening in openings:
                    e = opening.episode_id
                    turn = codec.encode_turn(build_turns(e, 16, 1)[0])
                    words: tuple[Any, ...] = (0, e, f"{e}.0", "", turn, 0, 0, 1, 8, 8)
                    pipeline.evalsha(load_script("append_turn").sha1, 1, self.meta, *words)
                    words = (0, e, "k", closure, reward, "1.0", "", 0)
                    pipeline.evalsha(load_script("close").sha1, 1, self.meta, *words)
                pipeline.execute()
        self.num_ready += num_groups


def measure_recovery(run: Run, server: EmbeddedRedis) -> dict[str, float]:
    """kill -9 of Redis with all of the above in it, until the next groups are leased."""
    client = connect_sync(server.url)
    info: Any = client.info("memory")
    client.close()
    os.kill(server.pid, signal.SIGKILL)
    before = time.perf_counter()
    server.stop()
    url = server.start()
    loaded = time.perf_counter() - before
    reader = BufferReader.connect(create_run(run.settings, run.dir, url))
    fence = reader.acquire_fence()
    assert len(take(reader, fence, TAKE_GROUPS)) == TAKE_GROUPS
    recovery_s = time.perf_counter() - before
    reader.close()
    return {
        "recovery_s": recovery_s,
        "recovery_load_s": loaded,
        "recovery_memory_mb": info["used_memory"] / 1e6,
    }


async def measure() -> dict[str, float]:
    """Everything."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with EmbeddedRedis(folder / "redis", max_memory_mb=4096) as server:
            by_size = {size: await SizeBench(size, folder, server.url).measure() for size in SIZES}
            for figure in next(iter(by_size.values())):
                for size, found in by_size.items():
                    figures[f"{figure}_{size}"] = found[figure]
            worst = {"write_vs_raw": min, "read_vs_raw": min, "codec_share": max}
            for figure, pick in (worst | {"bytes_per_token_vs_arrays": max}).items():
                figures[figure] = pick(figures[f"{figure}_{size}"] for size in SIZES)
            queue = QueueBench(folder, server.url)
            figures |= await queue.measure()
            figures |= measure_recovery(queue.run, server)
    return figures


def main() -> None:
    """Measure, print, write."""
    figures = uvloop.run(measure())
    tell("buffer", figures)


if __name__ == "__main__":
    main()
