"""A batch taken and acknowledged from a short and a long queue of ready groups.

Owns: filling the queue, and what bench-buffer measures of it. Does not own: the data (buffer_load).
Invariant: groups get into the queue through the buffer's own scripts.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

from buffer_load import build_turns, make_run, opening_of, start, take, timed
from figures import say

from outloop.buffer.codec import records_codec
from outloop.buffer.reader import BufferReader
from outloop.buffer.records import CheckpointMark, Reward
from outloop.buffer.redis.client import connect_sync
from outloop.buffer.redis.keys import key
from outloop.buffer.redis.scripts import load_script
from outloop.buffer.writer import BufferWriter

QUEUES = (1_000, 10_000, 100_000)
GROUP_SIZE = 2
TAKE_GROUPS = 32
NUM_TAKES = 20
CHUNK = 2048
REWRITE_TIMEOUT_S = 60.0


class QueueBench:
    """Take and acknowledge a batch from a short and a long queue of ready groups."""

    def __init__(self, folder: Path, url: str) -> None:
        self.run = make_run(
            "queue", folder, url, QUEUES[-1] + NUM_TAKES * TAKE_GROUPS * 2, GROUP_SIZE
        )
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
            before, memory, number = time.perf_counter(), self._memory(), length - self.num_ready
            say(f"a queue of {length} groups")
            await self._fill(writer, number)
            figures[f"fill_{length}_s"] = time.perf_counter() - before
            num_bytes = (self._memory() - memory) / (GROUP_SIZE * number)
            figures[f"bytes_per_queued_trajectory_{length}"] = num_bytes
            self._wait_for_rewrite()
            self._batch()
            cpu_s = self._cpu_s()
            seconds = [timed(self._batch) for _ in range(NUM_TAKES)]
            figures[f"take_{length}_ms"] = 1000 * statistics.median(seconds)
            figures[f"take_{length}_cpu_ms"] = 1000 * (self._cpu_s() - cpu_s) / NUM_TAKES
        for figure in ("take{}", "take{}_cpu"):
            short, *_, long = (figures[figure.format(f"_{length}") + "_ms"] for length in QUEUES)
            figures[figure.format("") + "_100k_vs_1k"] = long / short
        figures["metadata_of_1m_gb"] = num_bytes * 1e6 / 1e9
        figures["metadata_measured_gb"] = self._memory() / 1e9
        figures["metadata_measured_trajectories"] = GROUP_SIZE * self.num_ready
        await writer.close()
        self.reader.close()
        self.client.close()
        return figures

    def _memory(self) -> int:
        info: Any = self.client.info("memory")
        return int(info["used_memory"])

    def _cpu_s(self) -> float:
        """Of this process and of the server's thread that executes commands."""
        info: Any = self.client.info("cpu")
        server = info["used_cpu_user_main_thread"] + info["used_cpu_sys_main_thread"]
        return float(server) + time.process_time()

    def _wait_for_rewrite(self) -> None:
        """Until Redis has written its log again, which it does by itself when that has grown."""
        deadline = time.monotonic() + REWRITE_TIMEOUT_S
        while True:
            info: Any = self.client.info("persistence")
            if not (info["aof_rewrite_in_progress"] or info["aof_rewrite_scheduled"]):
                return
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def _batch(self) -> None:
        ids = tuple(lease.group.group_id for lease in take(self.reader, self.fence, TAKE_GROUPS))
        self.reader.mark_trained(ids, fence=self.fence, policy_version=0)
        self.reader.acknowledge(
            CheckpointMark(fence=self.fence, group_ids=ids, next_slot=0, policy_version=0)
        )
        self.num_ready -= TAKE_GROUPS

    async def _fill(self, writer: BufferWriter, num_groups: int) -> None:
        """Real scripts in pipelines: one turn of a few tokens and a reward for every episode."""
        left = GROUP_SIZE * num_groups
        closure = records_codec.encode_closure("completed", None, Reward(value=1.0), "")
        reward = records_codec.encode_reward(Reward(value=1.0))
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
                    turn = records_codec.encode_turn(build_turns(e, 16, 1)[0])
                    words: tuple[Any, ...] = (0, e, f"{e}.0", "", turn, 0, 0, 1, 8, 8)
                    pipeline.evalsha(load_script("append_turn").sha1, 1, self.meta, *words)
                    words = (0, e, "k", closure, reward, "1.0", "", 0)
                    pipeline.evalsha(load_script("close").sha1, 1, self.meta, *words)
                pipeline.execute()
        self.num_ready += num_groups
