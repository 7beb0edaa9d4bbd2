"""What a teacher makes of the tokens of a take: a model on the trainer's ranks, or the policy.

A teacher that is served elsewhere is in teacher_endpoint.py. Either way a row may stand behind text
that only the teacher sees; the columns are those of the batch without it.

Shape letters: T tokens of all rows, N trained tokens, K of the teacher's tokens at each.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outloop.buffer.errors import SettingsError, UpdateRefused
from outloop.buffer.records import Float32, Int32
from outloop.buffer.settings import Settings
from outloop.engine.train.algorithms.token_logprobs import logprobs_and_entropies, top_ids
from outloop.engine.train.data.microbatch import Microbatch
from outloop.engine.train.data.samples import Bool, Sample, padded
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.megatron.model_and_optimizer import PolicyConfig, PolicyModel
from outloop.engine.train.megatron.model_config import read_config_beside
from outloop.engine.train.step.policy_update import logit_chunks
from outloop.engine.train.step.recompute_logprobs import logprobs_of, score

Columns = dict[str, Float32 | Int32]
"""teacher_logprobs, and with top_k teacher_top_ids and teacher_top_logprobs, of a batch."""
Contexts = Mapping[str, Sequence[int]]
"""By episode_id: ids that the teacher sees in front of each of its rows."""


def read_teacher_config(settings: Settings, policy: PolicyConfig) -> PolicyConfig:
    """The configuration of trainer.teacher.path, split over the ranks as the policy is.

    Its vocabulary may be padded to another size, as in families whose sizes differ in it, where
    both folders have the same tokens in tokenizer.json.

    Raises:
        SettingsError: its tokens are others than the policy's, or its folder is refused.
    """
    assert settings.trainer.teacher is not None
    folder = settings.trainer.teacher.path
    assert folder is not None
    setting = "trainer.teacher.path"
    is_same = check_tokens(settings.model.path, folder, f"{setting}={str(folder)!r}")
    return read_config_beside(policy, folder, settings, setting, has_its_tokens=is_same)


def check_tokens(policy: Path, teacher: Path, named: str) -> bool:
    """True if both folders have the same tokens, False if one of them does not say.

    Raises:
        SettingsError: a token has another id.
    """
    ours, theirs = _tokens_of(policy), _tokens_of(teacher)
    if ours is None or theirs is None:
        return False
    for token in sorted(ours.keys() | theirs.keys()):
        if ours.get(token) != theirs.get(token):
            raise SettingsError(
                f"{named} has another vocabulary than model.path={str(policy)!r}: token {token!r} "
                f"is {theirs.get(token)} there and {ours.get(token)} here. A teacher scores the "
                "policy's ids; give one with the policy's tokenizer"
            )
    return True


def _tokens_of(folder: Path) -> dict[str, int] | None:
    """Ids by token, as in tokenizer.json; None: there is none, or it lists none."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    content: dict[str, Any] = json.loads(path.read_text())
    vocabulary = content.get("model", {}).get("vocab")
    if not isinstance(vocabulary, dict):
        return None
    added = {entry["content"]: int(entry["id"]) for entry in content.get("added_tokens", ())}
    return vocabulary | added


def behind_contexts(batch: TrainBatch, contexts: Contexts) -> tuple[TrainBatch, Bool]:
    """The rows as the teacher sees them, and which of the tokens there are the batch's own [T'].

    Where servers sent the policy's tokens is left out: a teacher routes them itself.
    """
    batch = dataclasses.replace(batch, routed_experts=None)
    if not any(contexts.get(name) for name in batch.episode_ids):
        return batch, np.ones(len(batch.token_ids), np.bool_)
    rows, own = [], []
    for row in batch:
        context = np.asarray(contexts.get(row.episode_id, ()), np.int32)
        rows.append(_behind(row, context))
        own.append(np.arange(len(context) + row.num_tokens) >= len(context))
    return TrainBatch.of(rows), np.concatenate(own)


def _behind(row: Sample, context: Int32) -> Sample:
    """The row with untrained tokens in front of it."""
    longer = padded(row, before=len(context))
    longer.token_ids[: len(context)] = context
    return longer


def teacher_columns(
    model: PolicyModel,
    batch: TrainBatch,
    contexts: Contexts,
    *,
    top_k: int,
    vocab_size: int,
    max_tokens: int,
    on_microbatch: Callable[[], None],
) -> Columns:
    """What a model on these ranks makes of the trained tokens, at their temperatures.

    Args:
        vocab_size: of the policy; ids beyond it are nobody's.
        max_tokens: trainer.max_microbatch_tokens.

    Raises:
        UpdateRefused: on every rank, when a row holds an id that the teacher does not have.
    """
    refuse_unknown_ids(batch, model.config.vocab_size)
    seen, is_own = behind_contexts(batch, contexts)
    width = 1 + 2 * top_k if top_k else 0

    def statistic(model: PolicyModel, microbatch: Microbatch, hidden_NH: Tensor) -> Tensor:
        if not top_k:
            return logprobs_of(model, microbatch, hidden_NH)
        return _with_top(model, microbatch, hidden_NH, top_k=top_k, vocab_size=vocab_size)

    found = score(
        model,
        seen,
        max_tokens=max_tokens,
        on_microbatch=on_microbatch,
        statistic=statistic,
        width=width,
    )[is_own]
    if not top_k:
        return {"teacher_logprobs": found}
    return {
        "teacher_logprobs": found[:, 0].copy(),
        "teacher_top_ids": found[:, 1 : 1 + top_k].astype(np.int32),
        "teacher_top_logprobs": found[:, 1 + top_k :].copy(),
    }


def refuse_unknown_ids(batch: TrainBatch, vocab_size: int) -> None:
    """Raises UpdateRefused if a row holds an id from `vocab_size`, the teacher's, on."""
    highest = int(batch.token_ids.max(initial=0))
    if highest >= vocab_size:
        raise UpdateRefused(
            f"a row holds id {highest}, the teacher has vocab_size={vocab_size}: it cannot score "
            "it. The policy sampled an id that is no token of their tokenizer; train it to the "
            "format first, or give a teacher of its vocab_size"
        )


def _with_top(
    model: PolicyModel, microbatch: Microbatch, hidden_NH: Tensor, *, top_k: int, vocab_size: int
) -> Tensor:
    """[N, 1 + 2 K] float32: the trained token's logprob, the K ids, their logprobs. Ids below 2**24
    are exact in float32."""
    targets, part = microbatch.targets, model.vocab_part
    found = hidden_NH.new_zeros((len(hidden_NH), 1 + 2 * top_k), dtype=torch.float32)
    for where in logit_chunks(len(hidden_NH), model):
        logits = model.logits(hidden_NH[where])
        ids = top_ids(
            logits, top_k, vocab_size=vocab_size, vocab_start=part.start, group=part.group
        )
        own = targets.part(where)
        logprobs, _ = logprobs_and_entropies(
            logits,
            torch.cat([own.token_ids_N[:, None], ids], dim=1),
            own.temperature_N,
            vocab_start=part.start,
            group=part.group,
        )
        found[where] = torch.cat([logprobs[:, :1], ids.float(), logprobs[:, 1:]], dim=1)
    return found


def teacher_metrics(batch: TrainBatch) -> dict[str, float]:
    """How far the policy that sampled the tokens is from the teacher, and what its K cover."""
    assert batch.teacher_logprobs is not None
    assert batch.behavior_logprobs is not None
    mask = batch.loss_mask
    gaps = batch.behavior_logprobs[mask].astype(np.float64) - batch.teacher_logprobs[mask]
    metrics = {"train/teacher_kl": float(gaps.mean()) if len(gaps) else float("nan")}
    if batch.teacher_top_logprobs is not None and len(gaps):
        mass = np.exp(batch.teacher_top_logprobs[mask].astype(np.float64)).sum(-1)
        metrics["train/teacher_top_mass"] = float(mass.mean())
    return metrics
