"""Ten million task slots: what a claim and Redis cost at the run's start and far into it.

Slots are not stored: a cursor names the next one, and the order of tasks is computed from the
seed. Two runs share one Redis, the cursor of one of which is ten million slots on; claims
go to both by turns. Prints the ratio of the medians and what Redis holds for each.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from outloop.buffer.reader import BufferReader
from outloop.buffer.records import Task
from outloop.buffer.redis.client import connect_sync
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.redis.keys import prefix
from outloop.buffer.redis.run_meta import init_run
from outloop.buffer.run import Run, create_run
from outloop.buffer.settings import build_settings
from outloop.buffer.writer import BufferWriter

NUM_TASKS = 1000
FAR = 10_000_000
NUM_CLAIMS = 300


async def begin(run: Run, next_slot: int) -> BufferWriter:
    """A run that gives out claims from that slot on."""
    init_run(run)
    writer = await BufferWriter.connect(run)
    tasks = [Task(task_id=f"t{i}", payload={"n": i}) for i in range(NUM_TASKS)]
    await writer.register_tasks(tasks, [])
    reader = BufferReader.connect(run)
    fence = reader.acquire_fence()
    reader.recover(None, fence=fence)
    reader.set_run_state("running")
    reader.announce_version(0, None)
    reader.acknowledge_version(0)
    reader.close()
    # As if all slots before had been trained, by marks that are forgotten.
    client = connect_sync(run.redis_url)
    client.hset(f"{prefix(run.run_id)}state", "cursor", next_slot)
    client.close()
    return writer


def bytes_of(run: Run) -> int:
    """What Redis holds of the run."""
    client = connect_sync(run.redis_url)
    names = list(client.scan_iter(match=f"{prefix(run.run_id)}*", count=1000))
    total = sum(client.memory_usage(name, samples=0) or 0 for name in names)
    client.close()
    return total


async def measure(folder: Path, url: str) -> None:
    """Claims by turns; prints."""
    runs = []
    for name in ("near", "far"):
        settings = build_settings(
            {
                "run": {"name": name, "dir": str(folder)},
                "model": {"path": str(folder)},
                "buffer": {"group_size": 2, "max_staleness": 1000, "pipeline_depth": 1000},
            },
            source="slots",
        )
        runs.append(create_run(settings, folder / name, url))
    writers = [await begin(run, slot) for run, slot in zip(runs, (0, FAR), strict=True)]
    times: list[list[float]] = [[], []]
    slots = [0, 0]
    for number in range(NUM_CLAIMS):
        for index, writer in enumerate(writers):
            began_at = time.perf_counter()
            result = await writer.claim(
                key=f"k{number}", count=8, runner_id="r", servers_are_busy=False
            )
            times[index].append(time.perf_counter() - began_at)
            slots[index] += len(result.claims)
    medians = [1e6 * statistics.median(found) for found in times]
    for name, run, median, claimed in zip(("0", f"{FAR:,}"), runs, medians, slots, strict=True):
        print(
            f"from slot {name}: {median:.0f} us for 8 claims, {claimed} claimed, "
            f"{bytes_of(run) / 1e6:.2f} MB in Redis"
        )
    print(f"far / near: {medians[1] / medians[0]:.2f}")
    for writer in writers:
        await writer.close()


def main() -> None:
    """Measure on an embedded server."""
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        EmbeddedRedis(Path(folder) / "redis", max_memory_mb=512) as redis,
    ):
        asyncio.run(measure(Path(folder), redis.url))


if __name__ == "__main__":
    main()
