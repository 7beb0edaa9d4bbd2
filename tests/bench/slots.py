"""`make bench-slots`: ten million task slots: memory, registering, and what a group costs there.

Slots are not stored: a cursor names the next one, and which task it plays is computed from the
seed. What Redis holds is the content of each task. For each number of tasks a run of its own
registers them, through the buffer's door, and groups are played by turns on all runs: claimed,
opened, a turn recorded, closed, taken, marked and acknowledged. Two rounds: from slot 0 on, and
from a checkpoint whose next slot is so near the end of the list that the next epoch begins
meanwhile.

claims_per_s and so on are CPU-bound on this process and Redis; the ratio to the smallest number
of the same round says what the number of tasks costs. NUMS=10000,1000000 measures other numbers.
"""

from __future__ import annotations

import os
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import uvloop
from buffer_load import build_turns, make_run, opening_of, take
from figures import say, tell

from outloop.buffer.reader import BufferReader
from outloop.buffer.records import CheckpointMark, Reward, Task
from outloop.buffer.redis.client import connect_sync
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.redis.keys import key
from outloop.buffer.writer import BufferWriter

NUMS = (10_000, 1_000_000, 10_000_000)
GROUP_SIZE = 4
GROUPS = 32
"""Of a batch."""
BATCHES = 12
"""Of each round."""
STEPS = ("claim", "finish", "take", "acknowledge")


class QuestionList(Sequence[Task]):
    """Small tasks that are made when they are read."""

    def __init__(self, num_tasks: int) -> None:
        self._num_tasks = num_tasks

    def __len__(self) -> int:
        return self._num_tasks

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self._make(one) for one in range(*index.indices(self._num_tasks))]
        return self._make(range(self._num_tasks)[index])

    def __iter__(self) -> Iterator[Task]:
        return map(self._make, range(self._num_tasks))

    @staticmethod
    def _make(index: int) -> Task:
        payload = {"prompt": f"What is {index} + {7 * index}?", "answer": str(8 * index)}
        return Task(task_id=f"t{index}", payload=payload)


class SlotBench:
    """One run."""

    def __init__(self, num_tasks: int, folder: Path, url: str) -> None:
        self.num_tasks = num_tasks
        self._run = make_run(f"slots{num_tasks}", folder, url, GROUPS, GROUP_SIZE)
        self._client = connect_sync(url)
        self._version = 0
        self.seconds: dict[str, list[float]] = {step: [] for step in STEPS}

    async def register(self) -> dict[str, float]:
        """Its tasks; what that costs."""
        self._writer = await BufferWriter.connect(self._run)
        self._reader = BufferReader.connect(self._run)
        memory, before = self._memory(), time.perf_counter()
        await self._writer.register_tasks(QuestionList(self.num_tasks), [])
        seconds = time.perf_counter() - before
        self._fence = self._reader.acquire_fence()
        self._reader.recover(None, fence=self._fence)
        self._publish()
        return {
            "register_s": seconds,
            "registered_per_s": self.num_tasks / seconds,
            "redis_mb": (self._memory() - memory) / 1e6,
            "redis_bytes_per_task": (self._memory() - memory) / self.num_tasks,
            "writer_peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        }

    def go_on_from(self, slot: int) -> None:
        """As a trainer does that resumes from a checkpoint."""
        self._fence = self._reader.acquire_fence()
        mark = CheckpointMark(
            fence=self._fence, group_ids=(), next_slot=slot, policy_version=self._version
        )
        self._version = self._reader.recover(mark, fence=self._fence)
        self._publish()

    async def play_batch(self) -> None:
        """Claim, finish, take and acknowledge a batch; notes the seconds of each."""
        times = [time.perf_counter()]
        claims = (await self._writer.claim(key=os.urandom(8).hex(), count=4096)).claims
        times.append(time.perf_counter())
        assert len(claims) == GROUPS * GROUP_SIZE
        openings = [opening_of(claim) for claim in claims]
        await self._writer.open_episodes(openings)
        for opening in openings:
            (turn,) = build_turns(opening.episode_id, 16, 1)
            await self._writer.append_turn(turn)
            await self._writer.close_episode(
                opening.episode_id,
                outcome="completed",
                failure_kind=None,
                reward=Reward(value=1.0),
                error="",
                key="k",
            )
        times.append(time.perf_counter())
        leases = take(self._reader, self._fence, GROUPS)
        times.append(time.perf_counter())
        ids = tuple(lease.group.group_id for lease in leases)
        self._reader.mark_trained(ids, fence=self._fence, policy_version=self._version)
        next_slot = max(lease.group.slot for lease in leases) + 1
        mark = CheckpointMark(
            fence=self._fence, group_ids=ids, next_slot=next_slot, policy_version=self._version
        )
        self._reader.acknowledge(mark)
        times.append(time.perf_counter())
        for step, first, last in zip(STEPS, times[:-1], times[1:], strict=True):
            self.seconds[step].append(last - first)

    def cursor(self) -> int:
        """The next slot."""
        return int(self._client.hget(key(self._run.run_id, "state"), "cursor") or 0)

    async def close(self) -> None:
        """Leave the run."""
        await self._writer.close()
        self._reader.close()
        self._client.close()

    def _publish(self) -> None:
        self._reader.announce_version(self._version, None)
        self._reader.acknowledge_version(self._version)

    def _memory(self) -> int:
        info: Any = self._client.info("memory")
        return int(info["used_memory"])


async def measure(nums: Sequence[int]) -> dict[str, float]:
    """Every number of tasks in one Redis."""
    figures: dict[str, float] = {}
    loads = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with EmbeddedRedis(folder / "redis", fsync="no", max_memory_mb=4096) as server:
            benches = [SlotBench(number, folder, server.url) for number in nums]
            for bench in benches:
                say(f"registering {bench.num_tasks} tasks")
                found = await bench.register()
                figures |= {f"{figure}_{bench.num_tasks}": found[figure] for figure in found}
            for round_name in ("begin", "end"):
                say(f"playing at the {round_name} of the list")
                if round_name == "end":
                    for bench in benches:
                        bench.go_on_from(bench.num_tasks - BATCHES * GROUPS // 2)
                figures |= await _play(benches, round_name)
            for bench in benches:
                assert bench.cursor() > bench.num_tasks
                await bench.close()
    loads.append(os.getloadavg()[0])
    return figures | {"load_average_begin": loads[0], "load_average_end": loads[1]}


async def _play(benches: Sequence[SlotBench], round_name: str) -> dict[str, float]:
    """Batches by turns; medians, and their ratio to the smallest number of tasks."""
    for bench in benches:
        await bench.play_batch()
        bench.seconds = {step: [] for step in STEPS}
    for batch in range(BATCHES):
        for bench in benches if batch % 2 else reversed(benches):
            await bench.play_batch()
    figures: dict[str, float] = {}
    for step in STEPS:
        medians = [statistics.median(bench.seconds[step]) for bench in benches]
        for bench, median in zip(benches, medians, strict=True):
            number = f"{step}_{round_name}_{bench.num_tasks}"
            figures[f"{number}_per_s"] = GROUPS * GROUP_SIZE / median
            figures[f"{number}_vs_least"] = median / medians[0]
    return figures


def main() -> None:
    """Measure, print, write."""
    nums = [int(word) for word in os.environ.get("NUMS", "").split(",") if word] or NUMS
    tell("slots", uvloop.run(measure(nums)))


if __name__ == "__main__":
    main()
