"""What the benchmarks of the buffer move: runs, turns, trajectories.

Owns: building them, and the calls that every part of the benchmark makes. Does not own: what is
measured (buffer, buffer_sizes, buffer_queue). Invariant: two trajectories share no array.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from outloop.buffer.reader import BufferReader
from outloop.buffer.records import (
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
from outloop.buffer.redis.run_meta import init_run
from outloop.buffer.run import Run, create_run
from outloop.buffer.settings import build_settings
from outloop.buffer.writer import BufferWriter


def build_turns(episode_id: str, num_tokens: int, num_turns: int) -> tuple[Turn, ...]:
    """A conversation of `num_turns` equal turns in one branch."""
    rng = np.random.default_rng()
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


def make_run(
    name: str, folder: Path, url: str, groups_per_step: int, group_size: int, **buffer: Any
) -> Run:
    """A run in Redis; `buffer`: more settings of the buffer."""
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
                **buffer,
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
