"""Which episodes made an update impossible.

The weights are those from before the update, so that what is computed here is what the update
computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch.distributed as dist

from outloop.buffer.records import Float32
from outloop.engine.train.algorithms.ratios import MAX_LOG_RATIO
from outloop.engine.train.data.samples import Sample
from outloop.engine.train.data.train_batch import TrainBatch

_NUM_NAMED = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspect:
    """A sample, and the values of it that could have caused the gradient."""

    episode_id: str
    group_id: str
    branch: int
    num_trained_tokens: int
    advantage: float
    num_not_finite: int
    """Trained tokens with a recorded or computed number that is NaN or infinite."""
    max_log_ratio: float
    """Largest |policy - behavior| logprob among its finite tokens."""
    weight: float
    """Sum over its tokens of |advantage| * policy / behavior ratio: how hard it pulls."""

    @property
    def sentence(self) -> str:
        """One clause for the error."""
        return (
            f"{self.episode_id} (group {self.group_id}, branch {self.branch}: "
            f"advantage={self.advantage:.4g}, {self.num_not_finite} of {self.num_trained_tokens} "
            f"trained tokens not finite, largest log ratio {self.max_log_ratio:.3g})"
        )


def suspects(
    batch: TrainBatch, rows: Sequence[int], policy_logprobs: Float32 | None
) -> list[Suspect]:
    """Every row of an update, the likeliest cause first: what is not finite, then what pulls
    hardest.

    Args:
        policy_logprobs: [T], `score` under the weights before the update; None when they are not
            to be had.
    """
    found = []
    for row in rows:
        where = slice(batch.starts[row], batch.starts[row + 1])
        computed = None if policy_logprobs is None else policy_logprobs[where]
        found.append(_look(batch.row(row), computed))
    return sorted(found, key=lambda one: (-one.num_not_finite, -one.weight, one.episode_id))


def _look(sample: Sample, logprobs: Float32 | None) -> Suspect:
    mask = sample.loss_mask
    fields: list[Float32 | None] = [
        logprobs,
        sample.behavior_logprobs,
        sample.proximal_logprobs,
        sample.reference_logprobs,
        sample.correction,
        sample.temperature,
        sample.advantages,
    ]
    values = [field[mask].astype(np.float64) for field in fields if field is not None]
    is_finite = np.logical_and.reduce([np.isfinite(value) for value in values])
    gaps = np.zeros(int(mask.sum()))
    if logprobs is not None and sample.behavior_logprobs is not None:
        gaps = (logprobs - sample.behavior_logprobs)[mask].astype(np.float64)
    gaps, advantages = gaps[is_finite], sample.advantages[mask][is_finite].astype(np.float64)
    pull = (np.abs(advantages) * np.exp(np.clip(gaps, -MAX_LOG_RATIO, MAX_LOG_RATIO))).sum()
    return Suspect(
        episode_id=sample.episode_id,
        group_id=sample.group_id,
        branch=sample.branch,
        num_trained_tokens=int(mask.sum()),
        advantage=sample.advantage,
        num_not_finite=int((~is_finite).sum()),
        max_log_ratio=float(np.abs(gaps).max(initial=0.0)),
        weight=float(pull),
    )


def write_report(path: Path, *, step: int, reason: str, found: Sequence[Suspect]) -> str:
    """Write all suspects as JSON lines after a headline, on rank 0; the sentence for the error.

    A number that is not finite is null there.
    """
    named = "; ".join(one.sentence for one in found[:_NUM_NAMED])
    sentence = f"step {step}: {reason} Likeliest first: {named}"
    lines = [{"step": step, "reason": reason}, *({"suspect": asdict(one)} for one in found)]
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return sentence
