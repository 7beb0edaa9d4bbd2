"""What every rank of `test_lead_on_ranks` runs: rank 0 leads through a script, the others follow.

Started with torchrun's variables and a folder that holds a run; rank 0 leaves results.json. Rank 1
misbehaves where a file of the folder says so.
"""

import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
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
    from outloop.buffer.run import Run, load_run
    from outloop.engine.train import main
    from outloop.engine.train.checkpoint.async_writer import Shards
    from outloop.engine.train.data.train_batch import TrainBatch
    from outloop.engine.train.debug.step_debugger import StepDebugger
    from outloop.engine.train.ranks.controller import Lead, follow
    from outloop.engine.train.ranks.rank_worker import Work

RANK = int(os.environ["RANK"])
FOLDER = Path(sys.argv[1])
MARK = CheckpointMark(fence=1, group_ids=(), next_slot=0, policy_version=0)


def misbehave_when_told() -> None:
    """Rank 1 finds a full disk, or stops dead, while a file of that name lies in the folder."""
    write, update = Shards.write, Work.update

    def write_or_fail(self: Shards) -> Any:
        if (FOLDER / "full").exists():
            raise OSError(28, "No space left on device")
        return write(self)

    def update_or_stop(self: Work, *args: Any, **kwargs: Any) -> Any:
        if (FOLDER / "stop").exists():
            os.kill(os.getpid(), signal.SIGSTOP)
        return update(self, *args, **kwargs)

    Shards.write = write_or_fail  # type: ignore[method-assign]
    Work.update = update_or_stop  # type: ignore[method-assign]


def weights_after_journeys(lead: Lead, *, is_travelling: bool) -> dict[str, torch.Tensor]:
    """Two updates, with everything off the device in between, or not."""
    for seed in (1, 2):
        load(lead, seed)
        lead.update(range(len(lead.batch)), policy_version=0)
        if is_travelling:
            lead.leave()
            assert lead.work.placement.num_bytes_away > 0
            with lead.present():
                assert not lead.work.placement.is_away
            lead.come_back()
    return read(lead)


def load(lead: Lead, seed: int) -> TrainBatch:
    """The rows of a seed, on every rank."""
    lead.load_batch(TrainBatch.of(samples_of(seed, vocab_size=400)))
    return lead.batch


def read(lead: Lead) -> dict[str, torch.Tensor]:
    """The whole policy."""
    names = [spec.name for spec in lead.specs]
    return {name: t.clone() for name, t in zip(names, lead.read(lead.specs), strict=True)}


def steps(lead: Lead, run: Run) -> dict[str, Any]:
    """A step that is dumped, then one that no rank can make, which is dumped too."""
    debugger = StepDebugger(run.settings, run.dir, lead.save_state)

    def make(rows: Any, norm_limit: float) -> Any:
        return lead.update(rows, policy_version=0, norm_limit=norm_limit)

    def score(rows: Any) -> Any:
        return lead.score("policy", rows)

    batch = load(lead, 3)
    rows = list(range(len(batch)))
    debugger.run(batch, [rows], make, step=1, policy_version=0, score=score)
    refusals = []
    before = read(lead)
    attempts: list[Callable[[], Any]] = [
        lambda: debugger.run(lead.batch, [rows], make, step=2, policy_version=0, score=score),
        lambda: make(rows, 1e-12),
    ]
    advantages = batch.advantages.copy()
    advantages[batch.starts[4] : batch.starts[5]] = np.nan
    columns = [advantages, batch.advantages]
    for attempt, column in zip(attempts, columns, strict=True):
        lead.set_column("advantages", column)
        try:
            attempt()
        except (UpdateRefused, FloatingPointError) as error:
            refusals.append(str(error))
    after = read(lead)
    return {
        "refusals": refusals,
        "is_unchanged": all(torch.equal(before[name], after[name]) for name in before),
        "episode": batch.episode_ids[4],
    }


def saves(lead: Lead) -> dict[str, Any]:
    """A checkpoint that rank 1 cannot write, then one that it can."""
    (FOLDER / "full").touch()
    saving = lead.save(step=5, mark=MARK, reference_hash="")
    assert saving.wait(60.0)
    failure = ""
    try:
        saving.result()
    except CheckpointFailed as error:
        failure = str(error)
    (FOLDER / "full").unlink()
    saving = lead.save(step=6, mark=MARK, reference_hash="")
    assert saving.wait(60.0)
    return {"failure": failure, "path": str(saving.result())}


def hang(lead: Lead) -> dict[str, Any]:
    """An update during which rank 1 stops dead."""
    (FOLDER / "stop").touch()
    began_at = time.monotonic()
    try:
        load(lead, 7)
        lead.update(range(len(lead.batch)), policy_version=0)
    except DeadlineExceeded as error:
        return {"sentence": str(error), "waited_s": time.monotonic() - began_at}
    return {}


def run_ranks() -> None:
    """The script, or following it."""
    if RANK == 1:
        misbehave_when_told()
    stays, travels = (load_run(FOLDER / name) for name in ("stays", "travels"))
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        weights = []
        for run in (stays, travels):
            work, watchdog = main._join(run, stack)
            if RANK:
                follow(work, watchdog)
                continue
            lead = Lead(work, watchdog, num_ranks=run.settings.trainer.num_ranks, timeout_s=20.0)
            with lead.ending():
                lead.build(num_updates=10)
                weights.append(weights_after_journeys(lead, is_travelling=run is travels))
                if run is stays:
                    continue
                first, second = weights
                results["is_bit_equal"] = all(torch.equal(first[n], second[n]) for n in first)
                results["steps"] = steps(lead, run)
                results["saves"] = saves(lead)
                results["hang"] = hang(lead)
                (FOLDER / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    run_ranks()
