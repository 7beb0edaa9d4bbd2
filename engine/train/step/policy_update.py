"""One optimizer update from samples: forward, backward, step, and what was measured on the way.

Owns: the terms of a token's loss and accumulating it over microbatches. Does not own: which
samples, the model's layers, the optimizer. Invariant: the gradient of an update is
d(sum of token losses)/d(weights) / denominator, whatever the split into ranks and microbatches;
logits exist for trained tokens only, for one chunk of them at a time, in this rank's columns.

Shape letters: T tokens of a packed row, N trained tokens in it, C columns of the vocabulary that
this rank holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from outloop.buffer.settings.trainer import TrainerSettings
from outloop.engine.train.algorithms.losses import (
    TokenLoss,
    cispo,
    denominator,
    gspo,
    kl_loss,
    ppo_clip,
)
from outloop.engine.train.algorithms.token_logprobs import logprobs_and_entropies
from outloop.engine.train.data.microbatch import Microbatch, Targets
from outloop.engine.train.data.packing import imbalance
from outloop.engine.train.data.samples import Sample
from outloop.engine.train.megatron.model_and_optimizer import Policy, PolicyModel
from outloop.engine.train.megatron.parallel_rank import VocabPart, context_group, data_rank
from outloop.engine.train.megatron.pipeline_schedule import deal_samples, run_microbatches
from outloop.engine.train.step.update_metrics import UpdateReport, merge_reports

_MAX_CHUNK_LOGITS = {"cpu": 2**24, "cuda": 2**28}
"""Logits alive at once: 64 MiB in float32, and 1 GiB where each chunk reads and writes the output
layer's gradient in a device's memory."""


LossFunction = Callable[..., TokenLoss]
"""(policy_logprobs, proximal_logprobs, advantages, *, clip_low, clip_high), each [N]."""
_LOSSES: dict[str, LossFunction] = {"ppo_clip": ppo_clip, "gspo": gspo, "cispo": cispo}
TokenLossFunction = Callable[[Targets, Tensor, VocabPart, UpdateReport], Tensor]
"""Targets and logits [N, C] of a chunk -> losses [N]; adds what it measures to the report."""


def rl_update(
    policy: Policy,
    samples: Sequence[Sample],
    settings: TrainerSettings,
    *,
    policy_version: int,
    on_microbatch: Callable[[], None],
    loss: LossFunction | None = None,
) -> UpdateReport:
    """One policy-gradient update.

    Args:
        policy_version: of the weights before the update; its own tokens measure the logprob gap.
        on_microbatch: called before every forward, for heartbeats.
        loss: in place of trainer.loss.

    Raises:
        FloatingPointError: the gradient is not finite; weights are unchanged.
    """
    is_by_sequence = loss is None and settings.loss == "gspo"
    if is_by_sequence:
        samples = _with_equal_episodes(samples)
    function = loss or _LOSSES[settings.loss]

    def token_loss(
        targets: Targets, logits: Tensor, part: VocabPart, report: UpdateReport
    ) -> Tensor:
        policy_logprobs, entropies = logprobs_and_entropies(
            logits,
            targets.token_ids_N,
            targets.temperature_N,
            has_entropy_gradient=settings.entropy_coefficient > 0,
            vocab_start=part.start,
            group=part.group,
        )
        result = function(
            policy_logprobs,
            targets.sequence_log_ratios_N if is_by_sequence else _old_logprobs(targets),
            targets.advantages_N,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
        )
        report.add(targets, result, policy_logprobs.detach(), policy_version=policy_version)
        report.entropy_sum = report.entropy_sum + entropies.detach().sum(dtype=torch.float64)
        return _with_other_terms(result.loss, policy_logprobs, entropies, targets, settings)

    scale = denominator(samples, settings.denominator, constant=settings.denominator_constant)
    return _update(
        policy, samples, settings, scale, token_loss, on_microbatch, is_by_sequence=is_by_sequence
    )


def _with_other_terms(
    loss: Tensor,
    policy_logprobs: Tensor,
    entropies: Tensor,
    targets: Targets,
    settings: TrainerSettings,
) -> Tensor:
    """The policy's token losses [N] with correction, KL term, entropy bonus and token weights."""
    if targets.correction_N is not None:
        loss = loss * targets.correction_N
    if settings.kl == "k2" or settings.kl == "k3":
        assert targets.reference_logprobs_N is not None
        assert targets.behavior_logprobs_N is not None
        loss = loss + settings.kl_coefficient * kl_loss(
            policy_logprobs,
            targets.reference_logprobs_N,
            targets.behavior_logprobs_N,
            kind=settings.kl,
            ratio_cap=settings.correction_cap,
        )
    if settings.entropy_coefficient > 0:
        loss = loss - settings.entropy_coefficient * entropies
    if targets.token_weight_N is not None:
        loss = loss * targets.token_weight_N
    return loss


def _old_logprobs(targets: Targets) -> Tensor:
    """What the loss takes its ratio to."""
    proximal = targets.proximal_logprobs_N
    old = targets.behavior_logprobs_N if proximal is None else proximal
    assert old is not None
    return old


def _with_equal_episodes(samples: Sequence[Sample]) -> list[Sample]:
    """Token weights under which every episode of the update weighs one."""
    counts: dict[str, int] = {}
    for sample in samples:
        counts[sample.episode_id] = counts.get(sample.episode_id, 0) + sample.num_trained_tokens
    return [dataclasses.replace(s, token_weight=1.0 / counts[s.episode_id]) for s in samples]


def sft_update(
    policy: Policy, samples: Sequence[Sample], settings: TrainerSettings
) -> UpdateReport:
    """One cross-entropy update over trained tokens, averaged over them."""

    def token_loss(
        targets: Targets, logits: Tensor, part: VocabPart, report: UpdateReport
    ) -> Tensor:
        logprobs, _ = logprobs_and_entropies(
            logits, targets.token_ids_N, None, vocab_start=part.start, group=part.group
        )
        return -logprobs

    scale = denominator(samples, "tokens", constant=1.0)
    return _update(policy, samples, settings, scale, token_loss, lambda: None)


def _update(
    policy: Policy,
    samples: Sequence[Sample],
    settings: TrainerSettings,
    scale: float,
    token_loss: TokenLossFunction,
    on_microbatch: Callable[[], None],
    *,
    is_by_sequence: bool = False,
) -> UpdateReport:
    report = UpdateReport()
    model = policy.model
    part = model.vocab_part
    losses: list[Tensor] = []
    policy.zero_grad()

    def on_hidden(batch: Microbatch, hidden: Tensor) -> Tensor:
        # Cut the graph at the hidden states: each chunk's logits are freed by its own backward.
        leaf = hidden.detach().requires_grad_()
        targets = batch.targets
        if is_by_sequence:
            targets = _with_sequence_ratios(batch, trained_logprobs(model, batch, leaf))
        for where in _chunks(len(leaf), model):
            logits = model.logits(leaf[where])
            loss = token_loss(targets.part(where), logits, part, report).sum() / scale
            with policy.hold_sync():
                loss.backward()
            losses.append(loss.detach().double())
        report.num_tokens += batch.num_tokens
        report.num_padded_tokens += batch.row.num_padded_tokens
        report.num_trained_tokens += len(leaf)
        return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad

    dealt = deal_samples(samples, policy.config, max_tokens=settings.max_microbatch_tokens)
    run_microbatches(
        policy.wrapped,
        policy.config,
        samples,
        dealt[data_rank()],
        on_hidden,
        on_microbatch=on_microbatch,
    )
    report.loss = float(torch.stack(losses).sum()) if losses else 0.0
    report = merge_reports(report)
    lengths = [sample.num_tokens for sample in samples]
    report.imbalance = imbalance(dealt, lengths, policy.config.hidden_size)
    report.grad_norm, report.learning_rate = policy.step()
    return report


@torch.no_grad()
def trained_logprobs(model: PolicyModel, batch: Microbatch, hidden_NH: Tensor) -> Tensor:
    """Logprobs [N] of the trained tokens, chunk by chunk as in an update, without gradient."""
    parts = []
    vocab = model.vocab_part
    for where in _chunks(len(hidden_NH), model):
        targets = batch.targets.part(where)
        logits = model.logits(hidden_NH[where])
        logprobs, _ = logprobs_and_entropies(
            logits,
            targets.token_ids_N,
            targets.temperature_N,
            vocab_start=vocab.start,
            group=vocab.group,
        )
        parts.append(logprobs)
    return torch.cat(parts) if parts else hidden_NH.new_zeros(0)


def _with_sequence_ratios(batch: Microbatch, policy_logprobs: Tensor) -> Targets:
    log_ratios = (policy_logprobs - _old_logprobs(batch.targets)).double()
    sequences = batch.sequences_N
    counts = torch.bincount(sequences, minlength=batch.num_samples).double()
    sums = torch.zeros_like(counts).index_add(0, sequences, log_ratios)
    group = context_group()
    if group is not None:
        # A sequence's tokens are on several ranks, its mean is one.
        dist.all_reduce(counts, group=group)
        dist.all_reduce(sums, group=group)
    means = sums / counts.clamp(min=1)
    return dataclasses.replace(batch.targets, sequence_log_ratios_N=means[sequences].float())


def _chunks(num_tokens: int, model: PolicyModel) -> Iterator[slice]:
    """Equal on all ranks that share the vocabulary, since they exchange numbers in each chunk."""
    width = -(-model.config.vocab_size // model.config.tensor_model_parallel_size)
    size = max(1, _MAX_CHUNK_LOGITS[model.output_weight.device.type] // width)
    for start in range(0, num_tokens, size):
        yield slice(start, min(start + size, num_tokens))
