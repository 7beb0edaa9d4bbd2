"""`make bench-buffer`: what the buffer costs beside raw pipelined redis-py in the same run.

Starts an embedded Redis, moves whole trajectories of 2k, 16k and 128k tokens through both faces of
the buffer and, by turns, the same bytes through raw pipelines; then takes batches from short and
long queues, and kills the server. Prints a table and writes runs/bench/buffer.json.

write_vs_raw: put_trajectories beside pipelined SETs of the same records, synchronous or asyncio,
whichever is faster. read_vs_raw: take beside pipelines that read the very same bytes, an HMGET of
what is stored of an episode and an LRANGE of its turns; they neither lease groups nor decode.
read_vs_raw_turns: take beside the LRANGEs alone.
read_vs_get, sft_vs_get: take and sft_trajectories beside GETs of one value for each trajectory.
play_vs_raw: turn after turn, as routers record, beside the SETs. Each is the median over repeats;
without a size it is the worst of the sizes.
memory_vs_arrays: what the server holds for a played trajectory, over the bytes of its arrays.
metadata_of_1m_gb and load_of_10gb_s are extrapolated from what was measured here, in proportion;
bytes_per_queued_trajectory at both lengths of the queue says how straight that line is. recovery_s:
kill -9 of Redis until the next groups are leased; recovery_trainer_s and so on: kill -9 of a part
of a real run until its next step, to be compared with recovery_step_s, the step of the same run
without kills.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop
from buffer_load import take
from buffer_queue import TAKE_GROUPS, QueueBench
from buffer_recovery import measure_recovery_of_parts
from buffer_sizes import SIZES, SizeBench
from figures import tell

from outloop.buffer.reader import BufferReader
from outloop.buffer.redis.client import connect_sync
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.run import Run, create_run


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
        "load_of_10gb_s": loaded * 10e9 / info["used_memory"],
    }


async def measure(parts: Sequence[str]) -> dict[str, float]:
    """What the parts give, from one server."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with EmbeddedRedis(folder / "redis", max_memory_mb=4096) as server:
            if "sizes" in parts:
                figures |= await measure_sizes(folder, server.url)
            if "queue" in parts:
                queue = QueueBench(folder, server.url)
                figures |= await queue.measure()
                figures |= measure_recovery(queue.run, server)
    return figures


async def measure_sizes(folder: Path, url: str) -> dict[str, float]:
    """Throughput of every size, and the worst."""
    figures: dict[str, float] = {}
    by_size = {size: await SizeBench(size, folder, url).measure() for size in SIZES}
    for figure in next(iter(by_size.values())):
        for size, found in by_size.items():
            figures[f"{figure}_{size}"] = found[figure]
    worst = {"write_vs_raw": min, "read_vs_raw": min}
    for figure, pick in (worst | {"bytes_per_token_vs_arrays": max}).items():
        figures[figure] = pick(figures[f"{figure}_{size}"] for size in SIZES)
    return figures


def main() -> None:
    """Measure, print, write; PARTS=sizes, queue (then Redis is killed) or run measures less."""
    parts = os.environ.get("PARTS", "sizes,queue,run").split(",")
    figures = uvloop.run(measure(parts))
    if "run" in parts:
        figures |= measure_recovery_of_parts()
    tell("buffer" if len(parts) > 1 else f"buffer-{parts[0]}", figures)


if __name__ == "__main__":
    main()
