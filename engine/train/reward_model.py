"""A reward model: trained from preferred and rejected conversations, or from scored episodes.

Comparisons are held out whole, by hash; they are measured before the first update, at ten points on
the way, and after the last.
"""

from __future__ import annotations

import threading

import numpy as np
import structlog

from outloop.buffer.errors import SettingsError
from outloop.buffer.run import Run
from outloop.buffer.telemetry import MetricsWriter
from outloop.engine.train.algorithms.reward_losses import SCORE_LOSSES
from outloop.engine.train.data.reward_rows import (
    Comparison,
    comparisons,
    is_held_out,
    scored_rows,
)
from outloop.engine.train.interfaces import Reader
from outloop.engine.train.ranks.controller import RankController
from outloop.engine.train.ranks.rank_worker import RankWorker
from outloop.engine.train.sft import batches, check_ids, wait_for_conversations

_NUM_ROWS = 100
_NUM_EVALUATIONS = 10
_log = structlog.get_logger()


def run_reward_model(
    run: Run,
    ranks: RankController,
    *,
    reader: Reader,
    metrics: MetricsWriter,
    stop: threading.Event,
) -> None:
    """Train on the run's comparisons and write `hf/`; a stop writes nothing.

    Raises:
        DeadlineExceeded: no conversation arrived for trainer.take_timeout_s.
        SettingsError: there is nothing to compare, or a row has no reward.
    """
    settings = run.settings.trainer
    reader.set_run_state("running")
    if not wait_for_conversations(reader, ranks, settings.take_timeout_s, stop):
        return
    trained, held_out = _read(run, reader, ranks.config.vocab_size)
    order = batches(len(trained), run.settings)
    ranks.run(RankWorker.build_reward_model, num_updates=len(order))
    every = -(-len(order) // _NUM_ROWS)
    evaluated = {len(order) * index // _NUM_EVALUATIONS for index in range(_NUM_EVALUATIONS)}
    metrics.write(0, _measure(run, ranks, held_out))
    for step, members in enumerate(order, start=1):
        if stop.is_set():
            return
        rows = scored_rows([trained[index] for index in members])
        row = ranks.run(RankWorker.reward_update, rows.batch, rows.targets, rows.sets)
        if step in evaluated or step == len(order):
            row |= _measure(run, ranks, held_out)
        elif step % every:
            continue
        metrics.write(step, row)
        status = {
            "waiting_for": "",
            "step": f"{step}/{len(order)}",
            "loss": f"{row['train/loss']:.4f}",
        }
        if "reward_model/held_out_accuracy" in row:
            status["held_out_accuracy"] = f"{row['reward_model/held_out_accuracy']:.3f}"
        reader.registry.report_status("trainer", status)
    ranks.run(RankWorker.save_reward_model)
    reader.set_run_state("finished")


def _measure(run: Run, ranks: RankController, held_out: list[Comparison]) -> dict[str, float]:
    """Of comparisons that are never trained; nothing without any."""
    kind = run.settings.trainer.reward_model
    if not held_out or kind is None:
        return {}
    rows = scored_rows(held_out)
    scores = np.asarray(ranks.run(RankWorker.reward_scores, rows.batch), np.float64)
    found = SCORE_LOSSES[kind](scores, np.asarray(rows.targets, np.float64), rows.sets)
    return {
        "reward_model/held_out_loss": found.loss,
        "reward_model/held_out_accuracy": found.accuracy,
        "reward_model/held_out_pairs": float(found.num_pairs),
    }


def _read(run: Run, reader: Reader, vocab_size: int) -> tuple[list[Comparison], list[Comparison]]:
    """(trained, held out): without rows that are too long, and without sets that say nothing."""
    settings = run.settings.trainer
    kept: list[Comparison] = []
    num_equal = num_long = 0
    for one in comparisons(reader.sft_trajectories()):
        check_ids(f"comparison {one.name}", one.rows, vocab_size)
        if max(row.num_tokens for row in one.rows) > settings.max_microbatch_tokens:
            num_long += 1
        elif settings.reward_model == "bradley_terry" and not one.differs:
            num_equal += 1
        else:
            kept.append(one)
    if num_equal or num_long:
        _log.warning(
            "comparisons_skipped",
            sentence=f"{num_equal} comparisons have equal rewards and {num_long} more than "
            f"trainer.max_microbatch_tokens={settings.max_microbatch_tokens} tokens; they are not "
            "trained",
        )
    held_out = [one for one in kept if is_held_out(one.name, settings.held_out_share)]
    names = {one.name for one in held_out}
    trained = [one for one in kept if one.name not in names]
    if not trained:
        raise SettingsError(
            f"no comparison to train on ({len(held_out)} are held out, {num_equal} have equal "
            f'rewards, {num_long} are too long); give rows with "chosen" and "rejected" in '
            "env.conversations, or recorded episodes whose rewards differ within a group"
        )
    _log.info("comparisons", trained=len(trained), held_out=len(held_out))
    return trained, held_out
