"""A trainer and a runner without a model, to be killed at any moment.

`python parts.py trainer|runner RUN_DIR ...`. They say to the buffer what the real ones say, in the
same order. The trainer's weights are the list of slots it was trained on; its checkpoint is a file.
Exit codes: 0 finished, 1 the buffer refused or went away, 3 something wrong was about to be
trained.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
import uuid
from dataclasses import asdict
from pathlib import Path

import numpy as np

from outloop.buffer.errors import Gone, OutloopError
from outloop.buffer.reader import BufferReader
from outloop.buffer.records import (
    CheckpointMark,
    Claim,
    Lease,
    Opening,
    Reward,
    Sampling,
    Task,
    Turn,
    VersionSpan,
)
from outloop.buffer.run import Run, load_run
from outloop.buffer.writer import BufferWriter

GROUPS_PER_STEP = 2
STEPS_PER_CHECKPOINT = 2
UPDATE_S = 0.05


def train(run: Run, num_slots: int) -> int:
    """Train until the weights contain `num_slots` slots and a checkpoint says so."""
    reader = BufferReader.connect(run)
    path = run.dir / "checkpoint.json"
    fence = reader.acquire_fence()
    mark, slots, lineage = None, [], []
    if path.exists():
        saved = json.loads(path.read_text())
        slots, lineage = saved["slots"], saved["lineage"]
        mark = CheckpointMark(**saved["mark"] | {"group_ids": tuple(saved["mark"]["group_ids"])})
    version = reader.recover(mark, fence=fence) + 1
    reader.announce_version(version, None if mark is None else mark.policy_version)
    reader.acknowledge_version(version)
    lineage.append(version)
    unmarked: list[str] = []
    step = 0
    while len(slots) < num_slots or unmarked:
        leases = take(reader, fence, version)
        refuse_wrong(leases, slots, lineage)
        # In the place of the update.
        time.sleep(UPDATE_S)
        version += 1
        reader.announce_version(version, version - 1)
        reader.acknowledge_version(version)
        ids = [lease.group.group_id for lease in leases]
        reader.mark_trained(ids, fence=fence, policy_version=version)
        lineage.append(version)
        slots += [lease.group.slot for lease in leases]
        unmarked += ids
        step += 1
        if step % STEPS_PER_CHECKPOINT == 0:
            mark = CheckpointMark(
                fence=fence,
                group_ids=tuple(unmarked),
                next_slot=max(slots) + 1,
                policy_version=version,
            )
            partial = path.with_suffix(".partial")
            saved = {"mark": asdict(mark), "slots": slots, "lineage": lineage}
            partial.write_text(json.dumps(saved))
            os.replace(partial, path)
            reader.acknowledge(mark)
            unmarked.clear()
    reader.set_run_state("finished")
    return 0


def take(reader: BufferReader, fence: int, version: int) -> list[Lease]:
    """The next batch."""
    return reader.take(
        GROUPS_PER_STEP,
        fence=fence,
        policy_version=version,
        timeout_s=30.0,
        on_wait=lambda sentence: None,
        should_stop=lambda: False,
    )


def refuse_wrong(leases: list[Lease], slots: list[int], lineage: list[int]) -> None:
    """Exit with 3 rather than train a slot twice, or tokens that other weights sampled."""
    for lease in leases:
        versions = {
            span.policy_version
            for trajectory in lease.group.trajectories
            for turn in trajectory.turns
            for span in turn.version_spans
        }
        if lease.group.slot in slots or not versions <= set(lineage):
            print(f"wrong: slot={lease.group.slot} versions={versions} lineage={lineage}")
            sys.exit(3)


async def play(run: Run, seed: int) -> int:
    """Play what may be claimed until the run is finished."""
    choices = random.Random(seed)
    writer = await BufferWriter.connect(run)
    await writer.register_tasks([Task(task_id=f"t{i}", payload={}) for i in range(7)], [])
    while True:
        answer = await writer.claim(key=uuid.uuid4().hex, count=choices.randint(1, 6))
        if answer.reason == "finished":
            return 0
        if not answer.claims:
            await asyncio.sleep(0.01)
        await asyncio.gather(*(play_one(writer, claim, choices) for claim in answer.claims))


async def play_one(writer: BufferWriter, claim: Claim, choices: random.Random) -> None:
    """One episode; some calls are repeated, as after a lost answer."""
    episode_id = uuid.uuid4().hex
    now = time.time()
    opening = Opening(
        episode_id=episode_id,
        task_id=claim.task.task_id,
        group_id=claim.group_id,
        attempt=claim.attempt,
        purpose="train",
        deadline_at=now + claim.deadline_s,
        opened_at=now,
    )
    try:
        await writer.open_episode(opening)
        for index in range(choices.randint(1, 3)):
            state = await writer.policy_state()
            if state.acknowledged_version is None:
                return
            turn = build_turn(episode_id, index, state.acknowledged_version)
            for _ in range(choices.choice([1, 1, 2])):
                await writer.append_turn(turn)
        for _ in range(choices.choice([1, 1, 2])):
            await writer.close_episode(
                episode_id,
                outcome="completed",
                failure_kind=None,
                reward=Reward(value=1.0),
                error="",
                key="close",
            )
    except Gone:
        return


def build_turn(episode_id: str, index: int, version: int) -> Turn:
    """A small turn that one version sampled."""
    return Turn(
        turn_id=f"{episode_id}.{index}",
        episode_id=episode_id,
        parent_turn_id=f"{episode_id}.{index - 1}" if index else None,
        prompt_ids=np.arange(3, dtype=np.int32),
        output_ids=np.arange(4, dtype=np.int32),
        behavior_logprobs=np.full(4, -0.5, np.float32),
        version_spans=(VersionSpan(policy_version=version, start=0, end=4),),
        loss_spans=((0, 4),),
        sampling=Sampling(temperature=1.0),
        finish_reason="stop",
        branch_cause="extension" if index else "root",
        started_at=time.time(),
        finished_at=time.time(),
    )


def main() -> int:
    """Be the part that the command line names."""
    part, run_dir, number = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    try:
        run = load_run(run_dir)
        return train(run, number) if part == "trainer" else asyncio.run(play(run, number))
    except OutloopError as error:
        print(f"{part}: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
