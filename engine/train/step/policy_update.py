"""One optimizer update from a batch: forward, backward, step, and what was measured on the way.

The gradient of an update is d(sum of token losses)/d(weights) / denominator, whatever the split
into ranks and microbatches. Logits exist for trained tokens only, for one chunk of them at a time,
in this rank's columns.

Shape letters: T tokens of a packed row, N trained tokens in it, C columns of the vocabulary that
this rank holds, M logprobs asked for at each trained token: its own, and the teacher's tokens'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from outloop.buffer.settings.trainer import TrainerSettings
from outloop.engine.train.algorithms.denominators import denominator, token_weights
from outloop.engine.train.algorithms.losses import LOSSES, LossFunction, LossInputs, Sequences
from outloop.engine.train.algorithms.objective import needs_sequences, objective
from outloop.engine.train.algorithms.token_logprobs import logprobs_and_entropies, renormalised
from outloop.engine.train.data.microbatch import Microbatch, Targets
from outloop.engine.train.data.packing import imbalance
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.megatron.model_and_optimizer import Policy, PolicyModel
from outloop.engine.train.megatron.parallel_rank import context_group, data_rank
from outloop.engine.train.megatron.pipeline_schedule import deal_rows, run_microbatches
from outloop.engine.train.step.head_update import HeadUpdate
from outloop.engine.train.step.update_metrics import UpdateReport, merge_reports

_MAX_CHUNK_LOGITS = {"cpu": 2**24, "cuda": 2**28}
"""Logits alive at once: 64 MiB in float32, and 1 GiB where each chunk reads and writes the output
layer's gradient in a device's memory."""


TokenLosses = Callable[[Microbatch, slice, Tensor, Tensor, Sequences | None, UpdateReport], Tensor]
"""A microbatch and which of its trained tokens, their policy logprobs [N] or, with a teacher's most
probable tokens, [N, M], their entropies [N], and for a loss that needs them the sequences of the
whole microbatch -> losses [N]; adds what it measures to the report."""


def rl_update(
    policy: Policy,
    batch: TrainBatch,
    settings: TrainerSettings,
    *,
    rows: Sequence[int] | None = None,
    policy_version: int,
    on_microbatch: Callable[[], None],
    loss: LossFunction | None = None,
    values: HeadUpdate | None = None,
    max_chunk_logits: int | None = None,
) -> UpdateReport:
    """One policy-gradient update.

    Args:
        rows: of the batch that the update trains; None: all.
        policy_version: of the weights before the update; the logprob gap is told by age from it.
        on_microbatch: called before every forward, for heartbeats.
        loss: in place of trainer.loss.
        values: of a critic that is a head on the policy, updated in the same passes.
        max_chunk_logits: how many logits are alive at once; None: what suits the device.

    Raises:
        FloatingPointError: the gradient is not finite; weights are unchanged.
    """
    function = loss or LOSSES[settings.loss]
    rows = range(len(batch)) if rows is None else rows
    all_counts = batch.num_trained_tokens
    counts = [all_counts[row] for row in rows]
    episodes = [batch.episode_ids[row] for row in rows]
    weights = token_weights(settings.denominator, num_trained_tokens=counts, episode_ids=episodes)
    weight_of = {} if weights is None else dict(zip(rows, weights.tolist(), strict=True))

    def token_losses(
        microbatch: Microbatch,
        where: slice,
        policy_logprobs: Tensor,
        entropies: Tensor,
        sequences: Sequences | None,
        report: UpdateReport,
    ) -> Tensor:
        targets = microbatch.targets.part(where)
        policy_top_logprobs = None
        if policy_logprobs.dim() == 2:
            policy_top_logprobs = policy_logprobs[:, 1:]
            policy_logprobs = policy_logprobs[:, 0]
        inputs = _loss_inputs(
            targets, policy_logprobs, policy_top_logprobs, entropies, sequences, settings
        )
        weights_N = None
        if weight_of:
            by_sequence = policy_logprobs.new_tensor([weight_of[row] for row in microbatch.rows])
            weights_N = by_sequence[microbatch.sequences_N[where]]
        imitated_N = None
        if any(batch.is_imitated[row] for row in microbatch.rows):
            of_rows = [batch.is_imitated[row] for row in microbatch.rows]
            flags = torch.tensor(of_rows, device=policy_logprobs.device)
            imitated_N = flags[microbatch.sequences_N[where]]
        result = objective(
            inputs, function, settings, token_weights=weights_N, is_imitated=imitated_N
        )
        report.add(
            targets,
            result,
            policy_logprobs.detach(),
            policy_version=policy_version,
            is_imitated=imitated_N,
        )
        report.entropy_sum = report.entropy_sum + entropies.detach().sum(dtype=torch.float64)
        return result.loss

    scale = denominator(
        settings.denominator,
        num_trained_tokens=counts,
        episode_ids=episodes,
        constant=settings.denominator_constant,
        token_budget=settings.token_budget,
    )
    return _update(
        policy,
        batch,
        rows,
        settings,
        scale,
        token_losses,
        on_microbatch,
        sees_sequences=needs_sequences(function, settings),
        values=values,
        max_chunk_logits=max_chunk_logits,
    )


def _loss_inputs(
    targets: Targets,
    policy_logprobs: Tensor,
    policy_top_logprobs: Tensor | None,
    entropies: Tensor,
    sequences: Sequences | None,
    settings: TrainerSettings,
) -> LossInputs:
    behavior, proximal = targets.behavior_logprobs_N, targets.proximal_logprobs_N
    assert behavior is not None
    return LossInputs(
        policy_logprobs=policy_logprobs,
        behavior_logprobs=behavior,
        proximal_logprobs=behavior if proximal is None else proximal,
        advantages=targets.advantages_N,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
        reference_logprobs=targets.reference_logprobs_N,
        teacher_logprobs=targets.teacher_logprobs_N,
        policy_top_logprobs=policy_top_logprobs,
        teacher_top_logprobs=targets.teacher_top_logprobs_NK,
        entropies=entropies,
        policy_versions=targets.policy_versions_N,
        correction=targets.correction_N,
        sequences=sequences,
        options=settings.loss_options,
    )


def sft_update(policy: Policy, batch: TrainBatch, settings: TrainerSettings) -> UpdateReport:
    """One cross-entropy update over trained tokens, averaged over them."""

    def token_losses(
        microbatch: Microbatch,
        where: slice,
        policy_logprobs: Tensor,
        entropies: Tensor,
        sequences: Sequences | None,
        report: UpdateReport,
    ) -> Tensor:
        return -policy_logprobs

    scale = denominator(
        "tokens", num_trained_tokens=batch.num_trained_tokens, episode_ids=batch.episode_ids
    )
    return _update(
        policy,
        batch,
        range(len(batch)),
        settings,
        scale,
        token_losses,
        lambda: None,
        sees_sequences=False,
    )


def _update(
    policy: Policy,
    batch: TrainBatch,
    rows: Sequence[int],
    settings: TrainerSettings,
    scale: float,
    token_losses: TokenLosses,
    on_microbatch: Callable[[], None],
    *,
    sees_sequences: bool,
    values: HeadUpdate | None = None,
    max_chunk_logits: int | None = None,
) -> UpdateReport:
    report = UpdateReport()
    model = policy.model
    has_entropy_gradient = settings.entropy_coefficient > 0
    losses: list[Tensor] = []
    policy.zero_grad()

    def on_hidden(microbatch: Microbatch, hidden: Tensor) -> Tensor:
        # Cut the graph at the hidden states: each chunk's logits are freed by its own backward.
        leaf = hidden.detach().requires_grad_()
        gradients: list[Tensor] = []
        if sees_sequences:
            loss, *gradients = _gradients_by_token(
                model, microbatch, leaf, token_losses, report, scale, max_chunk_logits
            )
            losses.append(loss.double())
        for where in logit_chunks(len(leaf), model, max_chunk_logits):
            logprobs, entropies = _logprobs_and_entropies(
                model,
                microbatch.targets.part(where),
                leaf[where],
                has_entropy_gradient=has_entropy_gradient,
            )
            with policy.hold_sync():
                if sees_sequences:
                    outputs = [logprobs, entropies] if has_entropy_gradient else [logprobs]
                    torch.autograd.backward(outputs, [g[where] for g in gradients[: len(outputs)]])
                else:
                    chunk = token_losses(microbatch, where, logprobs, entropies, None, report)
                    loss = chunk.sum() / scale
                    loss.backward()
                    losses.append(loss.detach().double())
        report.num_tokens += microbatch.num_tokens
        report.num_padded_tokens += microbatch.row.num_padded_tokens
        report.num_trained_tokens += len(leaf)
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        return gradient if values is None else values.add(microbatch, hidden, gradient)

    all_lengths = batch.lengths
    lengths = [all_lengths[row] for row in rows]
    dealt = deal_rows(lengths, policy.config, max_tokens=settings.max_microbatch_tokens)
    run_microbatches(
        policy.wrapped,
        policy.config,
        batch,
        [[rows[index] for index in part] for part in dealt[data_rank()]],
        on_hidden,
        on_microbatch=on_microbatch,
    )
    report.loss = float(torch.stack(losses).sum()) if losses else 0.0
    report = merge_reports(report)
    report.imbalance = imbalance(dealt, lengths, policy.config.hidden_size)
    if values is None:
        report.grad_norm, report.learning_rate = policy.step()
    else:
        # A gradient of either that is refused leaves both as they were.
        values.sum_gradients()
        report.grad_norm, report.learning_rate = policy.step()
        values.step()
    report.gradient_hash = policy.gradient_hash
    return report


def _gradients_by_token(
    model: PolicyModel,
    microbatch: Microbatch,
    hidden_NH: Tensor,
    token_losses: TokenLosses,
    report: UpdateReport,
    scale: float,
    max_chunk_logits: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and its gradients by every logprob, [N] or [N, M], and by every entropy, [N].

    From one look at the whole microbatch; logits are computed once more for their own backward.
    """
    logprobs, entropies = trained_statistics(
        model, microbatch.targets, hidden_NH, max_chunk_logits=max_chunk_logits
    )
    logprobs.requires_grad_()
    entropies.requires_grad_()
    sequences = Sequences(microbatch.sequences_N, microbatch.num_samples, context_group())
    everything = slice(0, len(logprobs))
    losses = token_losses(microbatch, everything, logprobs, entropies, sequences, report)
    loss = losses.sum() / scale
    by_logprob, by_entropy = torch.autograd.grad(
        loss, [logprobs, entropies], allow_unused=True, materialize_grads=True
    )
    return loss.detach(), by_logprob, by_entropy


@torch.no_grad()
def trained_statistics(
    model: PolicyModel,
    targets: Targets,
    hidden_NH: Tensor,
    *,
    max_chunk_logits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Logprobs [N] or [N, M] and entropies [N] of the trained tokens, chunk by chunk as in an
    update, without gradient."""
    parts = [
        _logprobs_and_entropies(model, targets.part(where), hidden_NH[where])
        for where in logit_chunks(len(hidden_NH), model, max_chunk_logits)
    ]
    if not parts:
        return (
            hidden_NH.new_zeros(targets.scored_ids.shape, dtype=torch.float32),
            hidden_NH.new_zeros(0, dtype=torch.float32),
        )
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _logprobs_and_entropies(
    model: PolicyModel, targets: Targets, hidden_NH: Tensor, *, has_entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Of the targets' scored ids; that of a token over what it was sampled among."""
    ids = targets.scored_ids
    supports = targets.supports_N
    if supports is not None:
        among, is_kept = supports.padded(ids.device)
        ids = torch.cat([ids.view(len(ids), -1), among], dim=1)
    logprobs, entropies = logprobs_and_entropies(
        model.logits(hidden_NH),
        ids,
        targets.temperature_N,
        has_entropy_gradient=has_entropy_gradient,
        vocab_start=model.vocab_part.start,
        group=model.vocab_part.group,
    )
    if supports is None:
        return logprobs, entropies
    # With supports there is no teacher, so the first column is the token itself.
    return renormalised(logprobs[:, 0], logprobs[:, 1:], is_kept), entropies


def logit_chunks(
    num_tokens: int, model: PolicyModel, max_chunk_logits: int | None = None
) -> Iterator[slice]:
    """Tokens whose logits are alive at once; equal on all ranks that share the vocabulary, since
    they exchange numbers in each chunk."""
    width = -(-model.config.vocab_size // model.config.tensor_model_parallel_size)
    max_logits = max_chunk_logits or _MAX_CHUNK_LOGITS[model.output_weight.device.type]
    size = max(1, max_logits // width)
    for start in range(0, num_tokens, size):
        yield slice(start, min(start + size, num_tokens))
