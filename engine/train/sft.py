"""Supervised fine-tuning on recorded conversations.

Every conversation is used once per epoch; with the same seed and data the order is the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import structlog

from outloop.buffer.errors import DeadlineExceeded, SettingsError
from outloop.buffer.run import Run
from outloop.buffer.settings import Settings
from outloop.buffer.settings.trainer import TrainerSettings
from outloop.buffer.telemetry import MetricsWriter
from outloop.engine.train.data.samples import Sample, build_samples
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.interfaces import Reader
from outloop.engine.train.ranks.controller import RankController
from outloop.engine.train.ranks.rank_worker import RankWorker

_POLL_S = 0.1
_NUM_ROWS = 100
"""Metrics rows of a long run; each is of the update at its end."""
_MIN_FALL = 0.03
"""Share of the loss that training lowers, unless something is wrong."""
_log = structlog.get_logger()

Conversation = tuple[Sample, ...]


def run_sft(
    run: Run,
    ranks: RankController,
    *,
    reader: Reader,
    metrics: MetricsWriter,
    stop: threading.Event,
) -> None:
    """Train cross-entropy on the run's conversations and write `hf/`; a stop writes nothing.

    Builds the policy, since the conversations decide how many updates there are.

    Raises:
        DeadlineExceeded: no conversation arrived for trainer.take_timeout_s.
        SettingsError: there is nothing to train on.
    """
    settings = run.settings.trainer
    reader.set_run_state("running")
    if not wait_for_conversations(reader, ranks, settings.take_timeout_s, stop):
        return
    conversations = _read_conversations(run, reader, ranks.config.vocab_size)
    order = batches(len(conversations), run.settings)
    ranks.run(RankWorker.build, num_updates=len(order))
    every = -(-len(order) // _NUM_ROWS)
    before, tokens = time.monotonic(), 0
    losses: list[float] = []
    for step, members in enumerate(order, start=1):
        if stop.is_set():
            return
        samples = [sample for index in members for sample in conversations[index]]
        report = ranks.run(RankWorker.sft_update, TrainBatch.of(samples))
        tokens += report.num_tokens
        losses.append(report.loss)
        if step % every == 0 or step == len(order):
            now = time.monotonic()
            row = {"train/samples": len(samples), "train/tokens_per_s": tokens / (now - before)}
            metrics.write(step, report.metrics() | row)
            reader.registry.report_status(
                "trainer",
                {"waiting_for": "", "step": f"{step}/{len(order)}", "loss": f"{report.loss:.4f}"},
            )
            before, tokens = now, 0
    ranks.run(RankWorker.save_folder)
    if sentence := _hardly_learned(losses, settings):
        _log.warning("hardly_learned", sentence=sentence)
        reader.registry.report_status("trainer", {"waiting_for": "", "warning": sentence})
    reader.set_run_state("finished")


def _hardly_learned(losses: Sequence[float], trainer: TrainerSettings) -> str:
    """A sentence if the mean loss of the last tenth of the steps is nearly that of the first."""
    number = max(1, len(losses) // 10)
    if len(losses) < 2 * number:
        return ""
    first, last = np.mean(losses[:number]), np.mean(losses[-number:])
    if first - last >= _MIN_FALL * first:
        return ""
    return (
        f"the loss was {first:.3f} in the first steps and {last:.3f} in the last of {len(losses)}: "
        f"the model has hardly learned from the conversations. Raise trainer.learning_rate="
        f"{trainer.learning_rate:g} (a model of a million parameters takes 1e-3 and more) or "
        f"trainer.num_epochs={trainer.num_epochs}"
    )


def batches(count: int, settings: Settings) -> list[list[int]]:
    """Indices of every step: each epoch is a permutation of [0, count), cut into steps."""
    generator = np.random.default_rng(settings.run.seed)
    size = settings.trainer.groups_per_step
    steps: list[list[int]] = []
    for _ in range(settings.trainer.num_epochs):
        order = generator.permutation(count).tolist()
        steps += [order[start : start + size] for start in range(0, count, size)]
    return steps[: settings.trainer.num_steps or None]


def wait_for_conversations(
    reader: Reader, ranks: RankController, timeout_s: float, stop: threading.Event
) -> bool:
    """True once the last conversation is stored; False when stopped."""
    seen, changed_at = -1, time.monotonic()
    while True:
        stored, is_final = reader.sft_progress()
        if is_final:
            return True
        ranks.idle()
        now = time.monotonic()
        if stored != seen:
            seen, changed_at = stored, now
            reader.registry.report_status(
                "trainer", {"waiting_for": f"conversations ({stored} stored, more to come)"}
            )
        if now - changed_at > timeout_s:
            raise DeadlineExceeded(
                who="trainer",
                phase=f"conversations ({stored} stored, the last one not seen)",
                peer="runner",
                after_s=timeout_s,
            )
        if stop.wait(_POLL_S):
            return False


def _read_conversations(run: Run, reader: Reader, vocab_size: int) -> list[Conversation]:
    limit = run.settings.trainer.max_microbatch_tokens
    conversations: list[Conversation] = []
    num_skipped = num_below = 0
    least = run.settings.trainer.min_reward
    for trajectory in reader.sft_trajectories():
        reward = trajectory.episode.reward
        if least is not None and reward is not None and reward.value < least:
            num_below += 1
            continue
        samples = build_samples(trajectory)
        check_ids(f"conversation {trajectory.episode.episode_id}", samples, vocab_size)
        if not samples or max(sample.num_tokens for sample in samples) > limit:
            num_skipped += 1
            continue
        conversations.append(samples)
    if num_skipped:
        _log.warning(
            "conversations_skipped",
            sentence=f"{num_skipped} conversations have no trained token or more than "
            f"trainer.max_microbatch_tokens={limit} tokens; they are not trained",
        )
    if num_below:
        _log.info("conversations_below_min_reward", number=num_below, min_reward=least)
    if not conversations:
        raise SettingsError(
            f"no conversation to train on was stored ({num_skipped} were left out, and {num_below} "
            f"below trainer.min_reward={least}); check env.conversations, or the recorded episodes"
        )
    return conversations


def check_ids(named: str, rows: Sequence[Sample], vocab_size: int) -> None:
    """Raises SettingsError if a row holds an id that the model does not have."""
    largest = max((int(row.token_ids.max()) for row in rows), default=0)
    if largest >= vocab_size:
        raise SettingsError(
            f"{named} holds token id {largest}, the model has vocab_size={vocab_size}; give the "
            "tokenizer that belongs to model.path"
        )
