"""What every rank of `test_several_ranks` runs: rank 0 goes through a script, the others follow.

Started with torchrun's variables and a folder that holds a run; rank 0 leaves results.json. Rank 1
misbehaves where a file of the folder says so.
"""

import functools
import json
import os
import signal
import sys
import time
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

with warnings.catch_warnings():
    # megatron-core announces at import what it falls back to without Transformer Engine.
    warnings.simplefilter("ignore")
    from parity_ranks import samples_of

    from outloop.buffer.errors import CheckpointFailed, DeadlineExceeded, UpdateRefused
    from outloop.buffer.records import CheckpointMark
    from outloop.buffer.run import load_run
    from outloop.engine.publish.buckets.plan import largest, plan_buckets
    from outloop.engine.publish.flattened_bucket import read_bucket
    from outloop.engine.train.checkpoint.async_writer import Shards
    from outloop.engine.train.data.batch_builder import Credit
    from outloop.engine.train.data.train_batch import TrainBatch
    from outloop.engine.train.main import join_ranks
    from outloop.engine.train.ranks.controller import RankController, follow
    from outloop.engine.train.ranks.rank_worker import RankWorker

RANK = int(os.environ["RANK"])
FOLDER = Path(sys.argv[1])
MARK = CheckpointMark(fence=1, group_ids=(), next_slot=0, policy_version=0)


class ShardsOnABadDisk(Shards):
    """Finds a full disk while a file "full" lies in the folder; waits while a file "held" does."""

    def write(self) -> Any:
        if (FOLDER / "full").exists():
            raise OSError(28, "No space left on device")
        while (FOLDER / "held").exists():
            time.sleep(0.05)
        return super().write()


class SlowToLeave:
    """A rank's tensors, which are slow to leave the device; a file "left" says that they have."""

    def __init__(self, placement: Any) -> None:
        self._placement = placement

    def __getattr__(self, name: str) -> Any:
        return getattr(self._placement, name)

    def leave(self, *, keeps_weights: bool) -> None:
        """As the placement does."""
        time.sleep(0.3)
        self._placement.leave(keeps_weights=keeps_weights)
        (FOLDER / "left").touch()


class StoppingWorker(RankWorker):
    """Stops dead in a step while a file "stop" lies in the folder; is slow to leave its device."""

    @property
    def placement(self) -> Any:
        """Whether this rank's tensors are on its device."""
        return SlowToLeave(super().placement)

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        if (FOLDER / "stop").exists():
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().train_step(*args, **kwargs)


def weights_after_journeys(
    ranks: RankController, *, is_travelling: bool
) -> dict[str, torch.Tensor]:
    """Two updates, with everything off the device in between, or not."""
    for seed in (1, 2):
        train(ranks, batch_of(seed), step=10 + seed)
        if is_travelling:
            ranks.leave()
            assert ranks.worker.placement.is_away
            # Servers may take the memory of every device now.
            (FOLDER / "left").unlink()
            ranks.come_back(weights_only=True)
            assert not ranks.worker.placement.is_away
            ranks.come_back()
    return read(ranks)


def batch_of(seed: int) -> TrainBatch:
    """The rows of a seed."""
    return TrainBatch.of(samples_of(seed, vocab_size=400))


def train(ranks: RankController, batch: TrainBatch, *, step: int, num_updates: int = 1) -> None:
    """A step of updates on all rows."""
    ranks.run(
        RankWorker.train_step,
        batch,
        [list(range(len(batch)))] * num_updates,
        credit=Credit(groups=(), teaches=(), rows={}),
        contexts={},
        step=step,
        policy_version=0,
    )


def read(ranks: RankController) -> dict[str, torch.Tensor]:
    """The whole policy."""
    names = [spec.name for spec in ranks.specs]
    return {name: t.clone() for name, t in zip(names, ranks.read(ranks.specs), strict=True)}


def staged(ranks: RankController) -> bool:
    """Whether every rank stages every tensor whole, for as many readers as it is told."""
    whole = read(ranks)
    buckets = list(plan_buckets(ranks.specs, 40_000))
    seen: set[str] = set()
    for index, places in enumerate(buckets):
        _, payloads = ranks.stage(
            places, index=index, num_bytes=largest(buckets), num_readers=[1, 0, 2]
        )
        assert [len(of_rank) for of_rank in payloads] == [1, 0, 2]
        for payload in (*payloads[0], *payloads[2]):
            for name, tensor in read_bucket(payload):
                if not torch.equal(tensor, whole[name]):
                    return False
                seen.add(name)
    ranks.end_staging()
    return seen == set(whole) and len(buckets) > 2


def steps(ranks: RankController) -> dict[str, Any]:
    """A step, twenty updates, and two that every rank refuses."""
    batch = batch_of(3)
    train(ranks, batch, step=1)
    train(ranks, batch, step=2, num_updates=20)
    before = read(ranks)
    poisoned = batch.advantages.copy()
    poisoned[batch.starts[4] : batch.starts[5]] = np.nan
    refusals = []
    for step, advantages in ((3, poisoned), (4, batch.advantages * np.float32(1e6))):
        try:
            train(ranks, batch.with_columns(advantages=advantages), step=step)
        except UpdateRefused as error:
            refusals.append(str(error))
    after = read(ranks)
    return {
        "refusals": refusals,
        "is_unchanged": all(torch.equal(before[name], after[name]) for name in before),
        "episode": batch.episode_ids[4],
    }


def saves(ranks: RankController) -> dict[str, Any]:
    """Checkpoints that rank 1 cannot write, does not write in time, and can write."""
    found = {}
    for step, obstacle in ((4, "full"), (5, "held")):
        (FOLDER / obstacle).touch()
        saving = ranks.run(RankWorker.save, step=step, mark=MARK, reference_hash="")
        if obstacle == "held":
            assert not saving.wait(0.5)
            saving.give_up_missing()
        # Well before trainer.rank_timeout_s.
        assert saving.wait(10.0)
        try:
            saving.result()
        except CheckpointFailed as error:
            found[obstacle] = str(error)
        (FOLDER / obstacle).unlink()
    saving = ranks.run(RankWorker.save, step=6, mark=MARK, reference_hash="")
    assert saving.wait(60.0)
    return {**found, "path": str(saving.result())}


def hang(ranks: RankController) -> dict[str, Any]:
    """An update during which rank 1 stops dead."""
    (FOLDER / "stop").touch()
    began_at = time.monotonic()
    try:
        train(ranks, batch_of(7), step=5)
    except DeadlineExceeded as error:
        return {"sentence": str(error), "waited_s": time.monotonic() - began_at}
    return {}


def run_ranks() -> None:
    """The script, or following it."""
    make_worker = RankWorker
    if RANK == 1:
        make_worker = functools.partial(StoppingWorker, make_shards=ShardsOnABadDisk)
    stays, travels = (load_run(FOLDER / name) for name in ("stays", "travels"))
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        weights = []
        for run in (stays, travels):
            work, watchdog = join_ranks(run, stack, make_worker=make_worker)
            if RANK:
                follow(work, watchdog)
                continue
            ranks = RankController(
                work, watchdog, num_ranks=run.settings.trainer.num_ranks, timeout_s=20.0
            )
            with ranks.ending():
                ranks.run(RankWorker.build, num_updates=40)
                weights.append(weights_after_journeys(ranks, is_travelling=run is travels))
                if run is stays:
                    continue
                first, second = weights
                results["is_bit_equal"] = all(torch.equal(first[n], second[n]) for n in first)
                results["gpus"] = ranks.gpus
                results["is_staged"] = staged(ranks)
                results["steps"] = steps(ranks)
                results["saves"] = saves(ranks)
                results["hang"] = hang(ranks)
                (FOLDER / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    run_ranks()
