"""The critic's part of a step: what it expected, the advantages that follow, and its update.

Owns: values of trained tokens and of the states behind truncated episodes, the columns that are
made of them, one optimizer update of the critic. Does not own: the recursion and the value loss
(gae), the policy's update. Invariant: every rank computes the same columns from the same values;
which tokens share a microbatch changes nothing but rounding.

Shape letters: T tokens of all rows, N targets of a microbatch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from outloop.buffer.records import Float32
from outloop.buffer.settings import Settings
from outloop.buffer.settings.trainer import CriticSettings, TrainerSettings
from outloop.engine.train.algorithms.advantages import Float64
from outloop.engine.train.algorithms.credit import ScoredEpisode
from outloop.engine.train.algorithms.gae import (
    Chain,
    goes_on,
    normalized,
    rewards_on,
    targets_on,
    value_losses,
)
from outloop.engine.train.algorithms.kl import k1
from outloop.engine.train.data.batch_builder import Credit
from outloop.engine.train.data.microbatch import Microbatch, Targets
from outloop.engine.train.data.samples import with_one_more
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.megatron.model_and_optimizer import (
    Policy,
    PolicyConfig,
    PolicyModel,
    ValueModel,
)
from outloop.engine.train.megatron.model_config import read_config_beside
from outloop.engine.train.megatron.parallel_rank import data_rank, is_reporting_rank
from outloop.engine.train.megatron.pipeline_schedule import deal_rows, run_microbatches
from outloop.engine.train.megatron.value_head import ValueHead, described
from outloop.engine.train.ranks.collectives import gather_bytes
from outloop.engine.train.step.recompute_logprobs import score


def describe_critic(settings: Settings, policy: PolicyConfig) -> dict[str, Any]:
    """The critic that the run wants, as a checkpoint says it.

    Raises:
        SettingsError: as `read_critic_config`.
    """
    if settings.trainer.critic.kind == "head":
        return described(policy.hidden_size)
    return read_critic_config(settings, policy).described


def read_critic_config(settings: Settings, policy: PolicyConfig) -> PolicyConfig:
    """The configuration of the critic, split over the ranks as the policy is.

    Raises:
        SettingsError: its vocabulary is another one than the policy's, or its folder is refused.
    """
    folder = settings.trainer.critic.path or settings.model.path
    return read_config_beside(policy, folder, settings, "trainer.critic.path")


def values_of(
    model: PolicyModel,
    batch: TrainBatch,
    *,
    cut_rows: Sequence[int],
    max_tokens: int,
    on_microbatch: Callable[[], None],
    head: ValueHead | None = None,
) -> tuple[Float32, dict[int, float]]:
    """What the critic expects before each trained token, and after the last token of some rows.

    Args:
        model: a ValueModel, or the policy under `head`.
        cut_rows: rows whose last state is asked for too.
        max_tokens: trainer.max_microbatch_tokens.

    Returns:
        [T] float32, 0 at other tokens; and by row of `cut_rows` the value behind its last token.
    """
    cut = set(cut_rows)
    # The state behind a row's last token is the one before a token that would follow it.
    longer = TrainBatch.of(
        [with_one_more(row) if index in cut else row for index, row in enumerate(batch)]
    )
    column = score(
        model,
        longer,
        max_tokens=max_tokens + 1,
        on_microbatch=on_microbatch,
        statistic=lambda critic, _, hidden_NH: (head or critic).values(hidden_NH),
    )
    is_own = np.ones(len(column), np.bool_)
    behind = {row: int(longer.starts[row + 1]) - 1 for row in cut}
    is_own[list(behind.values())] = False
    return column[is_own], {row: float(column[place]) for row, place in behind.items()}


def with_values(
    batch: TrainBatch,
    credit: Credit,
    values: Float32,
    behind: Mapping[int, float],
    settings: TrainerSettings,
) -> tuple[TrainBatch, TrainBatch, dict[str, float]]:
    """The batch with advantages; the same rows with targets, for the critic; what was measured.

    With kl = "k1" each trained token pays for its own distance to the reference (InstructGPT,
    arXiv:2203.02155, equation 2), in place of one sum an episode.

    Args:
        values: [T] before each trained token.
        behind: value after the last token of `cut_rows`.
    """
    critic = settings.critic
    advantages = np.zeros(batch.token_ids.shape, np.float64)
    returns = np.zeros(batch.token_ids.shape, np.float32)
    is_target = np.zeros(batch.token_ids.shape, np.bool_)
    penalties = np.zeros(batch.token_ids.shape, np.float64)
    if settings.kl == "k1":
        assert batch.behavior_logprobs is not None
        assert batch.reference_logprobs is not None
        penalties += settings.kl_coefficient * k1(batch.behavior_logprobs, batch.reference_logprobs)
    paid: list[float] = []
    for episode, members in _episodes(credit):
        chain, last_row = _chain(batch, members)
        if not len(chain.places):
            continue
        earned = rewards_on(chain, episode) - penalties[chain.places]
        paid.append(float(penalties[chain.places].sum()))
        found = targets_on(
            chain,
            earned,
            values[chain.places].astype(np.float64),
            bootstrap=behind[last_row] if goes_on(episode, critic) else 0.0,
            settings=critic,
        )
        advantages[chain.places] = found.advantages
        returns[chain.places] = found.returns
        is_target[chain.places] = found.is_target
    mask = batch.loss_mask
    metrics = _metrics(values[is_target], returns[is_target], advantages[mask])
    if settings.kl == "k1":
        metrics["train/kl_penalty_mean"] = float(np.mean(paid)) if paid else float("nan")
    if critic.normalizes_advantages:
        advantages[mask] = normalized(advantages[mask])
    rows = batch.with_columns(advantages=advantages.astype(np.float32))
    targets = rows.with_columns(values=values, returns=returns)
    return rows, dataclasses.replace(targets, loss_mask=is_target), metrics


def with_value_targets(rows: TrainBatch, targets: TrainBatch) -> TrainBatch:
    """The policy's rows with what a head on the policy learns from them: values and returns, NaN
    where no value is trained."""
    assert targets.values is not None
    assert targets.returns is not None
    returns = np.where(targets.loss_mask, targets.returns, np.float32(np.nan))
    return rows.with_columns(values=targets.values, returns=returns)


def cut_rows(batch: TrainBatch, credit: Credit, settings: CriticSettings) -> list[int]:
    """The rows behind whose last token GAE goes on: those with the last trained token of an episode
    that would have gone on itself."""
    found = []
    for episode, members in _episodes(credit):
        chain, last_row = _chain(batch, members)
        if len(chain.places) and goes_on(episode, settings):
            found.append(last_row)
    return found


def _episodes(credit: Credit) -> Iterator[tuple[ScoredEpisode, tuple[int, ...]]]:
    for index, episodes in credit.rows.items():
        yield from zip(credit.groups[index].episodes, episodes, strict=True)


def _chain(batch: TrainBatch, members: Sequence[int]) -> tuple[Chain, int]:
    """The trained tokens of an episode's rows in the order of their turns, and the row of the last
    one; -1 without any."""
    places, turns, offsets, rows = [], [], [], []
    for row in members:
        start, end = batch.starts[row : row + 2].tolist()
        own = batch.turns[start:end]
        at = np.flatnonzero(batch.loss_mask[start:end])
        # A turn's output lies behind each other in its row.
        known, first = np.unique(own, return_index=True)
        firsts = dict(zip(known.tolist(), first.tolist(), strict=True))
        places.append(start + at)
        turns.append(own[at].astype(np.int64))
        offsets.append(at - np.array([firsts[turn] for turn in own[at].tolist()], np.int64))
        rows.append(np.full(len(at), row))
    if not places:
        nothing = np.zeros(0, np.int64)
        return Chain(places=nothing, turns=nothing, offsets=nothing), -1
    everywhere, by_turn = np.concatenate(places), np.concatenate(turns)
    order = np.lexsort((everywhere, by_turn))
    chain = Chain(
        places=everywhere[order], turns=by_turn[order], offsets=np.concatenate(offsets)[order]
    )
    return chain, int(np.concatenate(rows)[order][-1]) if len(order) else -1


def _metrics(values: Float32, returns: Float32, advantages: Float64) -> dict[str, float]:
    nan = float("nan")
    spread = float(returns.var()) if len(returns) else 0.0
    return {
        "train/value_mean": float(values.mean()) if len(values) else nan,
        "train/value_target_mean": float(returns.mean()) if len(returns) else nan,
        "train/value_explained_variance": 1.0 - float((returns - values).var()) / spread
        if spread > 0
        else nan,
        "train/advantage_std": float(advantages.std()) if len(advantages) else nan,
    }


def critic_update(
    critic: Policy,
    batch: TrainBatch,
    settings: TrainerSettings,
    *,
    rows: Sequence[int],
    on_microbatch: Callable[[], None],
) -> dict[str, float]:
    """One update of the critic on some rows: the mean value loss over their targets.

    Args:
        batch: what `with_values` made for the critic.

    Returns:
        train/value_loss, train/critic_grad_norm and train/critic_learning_rate, on every rank.

    Raises:
        FloatingPointError: the gradient is not finite; weights are unchanged.
    """
    counts = batch.num_trained_tokens

    def losses(values: Tensor, targets: Targets) -> Tensor:
        assert targets.values_N is not None
        assert targets.returns_N is not None
        return value_losses(
            values, targets.values_N, targets.returns_N, value_clip=settings.critic.value_clip
        )

    loss, grad_norm, learning_rate = value_update(
        critic,
        batch,
        rows=rows,
        losses=losses,
        scale=float(max(1, sum(counts[row] for row in rows))),
        max_tokens=settings.max_microbatch_tokens,
        on_microbatch=on_microbatch,
    )
    return {
        "train/value_loss": loss,
        "train/critic_grad_norm": grad_norm,
        "train/critic_learning_rate": learning_rate,
    }


def value_update(
    critic: Policy,
    batch: TrainBatch,
    *,
    rows: Sequence[int],
    losses: Callable[[Tensor, Targets], Tensor],
    scale: float,
    max_tokens: int,
    on_microbatch: Callable[[], None],
) -> tuple[float, float, float]:
    """One update of a model with a number in place of logits: the sum of losses over `scale`.

    Args:
        losses: of the numbers [N] at a microbatch's trained tokens, and what is known of these.

    Returns:
        Loss, gradient norm and learning rate, on every rank.

    Raises:
        FloatingPointError: the gradient is not finite; weights are unchanged.
    """
    model = critic.model
    assert isinstance(model, ValueModel)
    parts: list[float] = []
    critic.zero_grad()

    def on_hidden(microbatch: Microbatch, hidden: Tensor) -> Tensor:
        leaf = hidden.detach().requires_grad_()
        loss = losses(model.values(leaf), microbatch.targets).sum() / scale
        torch.autograd.backward(loss)
        parts.append(float(loss.detach()))
        return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad

    lengths = batch.lengths
    dealt = deal_rows([lengths[row] for row in rows], critic.config, max_tokens=max_tokens)
    run_microbatches(
        critic.wrapped,
        critic.config,
        batch,
        [[rows[index] for index in part] for part in dealt[data_rank()]],
        on_hidden,
        on_microbatch=on_microbatch,
    )
    mine = msgspec.msgpack.encode(sum(parts)) if is_reporting_rank() else b""
    shares = [msgspec.msgpack.decode(data, type=float) for data in gather_bytes(mine) if data]
    grad_norm, learning_rate = critic.step()
    return sum(shares), grad_norm, learning_rate
