"""`make bench-cluster`: what each primary of a Redis Cluster holds of several runs, and how fast.

A cluster of three primaries; as many runs of their own as RUNS says (6), which their ids spread
over the primaries, play at once: batches of 32 groups of 4, each episode one turn of TOKENS (2048)
tokens. Prints, for each primary, its runs, bytes for a queued trajectory over those of its arrays,
and the trajectories and megabytes a second that were written to it and taken from it, beside those
of the same runs on one server. Then one run after the other whose turns are on 1, 2 and 3 shards of
the same cluster, in turn with one without shards: their rates over its rate, the medians of ROUNDS
(15), and what each of three shards and the run's own primary hold.

Three primaries and the clients share this machine's cores, so rates say what is lost by the
cluster's client and by shards, not what three machines would give.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import redis
import uvloop
from buffer_load import build_turns, make_run, opening_of, start, take
from figures import say, tell
from redis.crc import key_slot

from fakes.redis_servers import Cluster
from outloop.buffer.reader import BufferReader
from outloop.buffer.records import Reward
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.redis.keys import hash_tag, shard_tags
from outloop.buffer.writer import BufferWriter

RUNS = int(os.environ.get("RUNS", "6"))
TOKENS = int(os.environ.get("TOKENS", "2048"))
ROUNDS = int(os.environ.get("ROUNDS", "15"))
SHARDS = (0, 1, 2, 3)
GROUPS, GROUP_SIZE = 32, 4
NUM_EPISODES = GROUPS * GROUP_SIZE
BYTES_OF_A_TOKEN = 4 + 4 / 2
"""int32 ids of prompt and answer; a float32 logprob for half of them."""


class LoadedRun:
    """One run."""

    def __init__(
        self, name: str, folder: Path, url: str, *, num_batches: int = 2, **buffer: Any
    ) -> None:
        """`buffer`: settings of the buffer."""
        self.run = make_run(name, folder, url, num_batches * GROUPS, GROUP_SIZE, **buffer)

    @property
    def slot(self) -> int:
        """Of its keys."""
        return int(key_slot(hash_tag(self.run.run_id).encode()))

    async def join(self) -> None:
        """Both faces."""
        self._writer = await BufferWriter.connect(self.run)
        self._reader = BufferReader.connect(self.run)
        self._fence = await start(self.run, self._reader, self._writer)

    async def write(self) -> None:
        """A batch of episodes, to their end."""
        key = os.urandom(8).hex()
        claims = (await self._writer.claim(key=key, count=NUM_EPISODES)).claims
        assert len(claims) == NUM_EPISODES
        openings = [opening_of(claim) for claim in claims]
        await self._writer.open_episodes(openings)

        async def play(episode_id: str) -> None:
            (turn,) = build_turns(episode_id, TOKENS, 1)
            await self._writer.append_turn(turn)
            await self._writer.close_episode(
                episode_id,
                outcome="completed",
                failure_kind=None,
                reward=Reward(value=1.0),
                error="",
                key="k",
            )

        await asyncio.gather(*(play(opening.episode_id) for opening in openings))

    def take(self) -> None:
        """The batch."""
        leases = take(self._reader, self._fence, GROUPS)
        assert sum(len(lease.group.trajectories) for lease in leases) == NUM_EPISODES

    async def close(self) -> None:
        """Leave it."""
        await self._writer.close()
        self._reader.close()


async def play(runs: Sequence[LoadedRun]) -> tuple[float, float]:
    """A batch of every run at once; the seconds of writing and of taking."""
    before = time.perf_counter()
    await asyncio.gather(*(run.write() for run in runs))
    written = time.perf_counter()
    for run in runs:
        run.take()
    return written - before, time.perf_counter() - written


def used_memory(port: int) -> int:
    """Of a server."""
    client = redis.Redis(port=port, protocol=2)
    try:
        return int(client.info("memory")["used_memory"])
    finally:
        client.close()


def held_by(cluster: Cluster, tag: str) -> int:
    """The bytes of the keys with a hash tag, as their server counts them."""
    port = cluster.owner(key_slot(tag.encode()), among=cluster.primaries)
    with closing(redis.Redis(port=port, protocol=2)) as client:
        names = client.scan_iter(f"{{{tag}}}:*", count=1000)
        return sum(client.memory_usage(name, samples=0) or 0 for name in names)


async def measure_shards(cluster: Cluster, folder: Path) -> dict[str, float]:
    """Runs with and without shards, in turn."""
    runs = {
        number: LoadedRun(
            f"shards{number}",
            folder,
            cluster.url,
            num_batches=ROUNDS + 1,
            redis_url=cluster.url,
            shards=number,
        )
        for number in SHARDS
    }
    for run in runs.values():
        await run.join()
        # Connections are made by a batch that is not counted.
        await play([run])
    times: dict[int, list[tuple[float, float]]] = {number: [] for number in SHARDS}
    for _ in range(ROUNDS):
        for number, run in runs.items():
            times[number].append(await play([run]))
    figures: dict[str, float] = {}
    medians = {
        number: [statistics.median(seconds) for seconds in zip(*found, strict=True)]
        for number, found in times.items()
    }
    for number, (written_s, taken_s) in medians.items():
        figures[f"shards_{number}_written_per_s"] = NUM_EPISODES / written_s
        figures[f"shards_{number}_taken_per_s"] = NUM_EPISODES / taken_s
        if number:
            figures[f"shards_{number}_written_vs_none"] = medians[0][0] / written_s
            figures[f"shards_{number}_taken_vs_none"] = medians[0][1] / taken_s
    run_id = runs[SHARDS[-1]].run.run_id
    held = [held_by(cluster, tag) for tag in shard_tags(run_id, SHARDS[-1])]
    for number, num_bytes in enumerate(held, 1):
        figures[f"shard_{number}_of_3_held_mb"] = num_bytes / 1e6
    figures["shards_largest_vs_mean"] = max(held) / statistics.mean(held)
    figures["shards_run_primary_held_mb"] = held_by(cluster, hash_tag(run_id)) / 1e6
    for run in runs.values():
        await run.close()
    return figures


async def measure() -> dict[str, float]:
    """The cluster, then shards, then one server."""
    figures: dict[str, float] = {"load_average": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cluster = Cluster(folder / "cluster", num_spares=0)
        try:
            cluster.form()
            say(f"{RUNS} runs on three primaries")
            runs = [LoadedRun(f"run{number}", folder, cluster.url) for number in range(RUNS)]
            for run in runs:
                await run.join()
            before = {port: used_memory(port) for port in cluster.primaries}
            # Connections are made by a batch that is not counted.
            await play(runs)
            seconds = await play(runs)
            owners = Counter(cluster.owner(run.slot, among=cluster.primaries) for run in runs)
            for number, port in enumerate(cluster.primaries):
                share = owners[port] * NUM_EPISODES
                # Of both batches.
                held = used_memory(port) - before[port]
                figures[f"primary_{number}_runs"] = owners[port]
                figures[f"primary_{number}_held_mb"] = held / 1e6
                if share:
                    arrays = share * TOKENS * BYTES_OF_A_TOKEN
                    figures[f"primary_{number}_memory_vs_arrays"] = held / arrays / 2
                    figures[f"primary_{number}_written_per_s"] = share / seconds[0]
                    figures[f"primary_{number}_written_mb_per_s"] = arrays / seconds[0] / 1e6
            figures |= _rates("cluster", seconds)
            for run in runs:
                await run.close()
            say(f"runs of {SHARDS} shards, in turn")
            figures |= await measure_shards(cluster, folder)
        finally:
            cluster.stop()
        say(f"{RUNS} runs on one server")
        with EmbeddedRedis(folder / "alone", fsync="no", max_memory_mb=2048) as server:
            runs = [LoadedRun(f"alone{number}", folder, server.url) for number in range(RUNS)]
            for run in runs:
                await run.join()
            await play(runs)
            alone = await play(runs)
            figures |= _rates("one_server", alone)
            for run in runs:
                await run.close()
    figures["cluster_write_vs_one_server"] = alone[0] / seconds[0]
    figures["cluster_take_vs_one_server"] = alone[1] / seconds[1]
    return figures


def _rates(name: str, seconds: tuple[float, float]) -> dict[str, float]:
    number = RUNS * NUM_EPISODES
    return {
        f"{name}_written_per_s": number / seconds[0],
        f"{name}_taken_per_s": number / seconds[1],
    }


def main() -> None:
    """Measure, print, write."""
    tell("cluster", uvloop.run(measure()))


if __name__ == "__main__":
    main()
