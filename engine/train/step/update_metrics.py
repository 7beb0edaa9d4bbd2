"""What an update measures: sums and ratios collected chunk by chunk, and their metrics.

How tokens are split into chunks and microbatches changes no metric beyond rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from outloop.buffer.records import Float32
from outloop.buffer.telemetry import GAP_AGES
from outloop.engine.train.algorithms.importance_weights import effective_share
from outloop.engine.train.algorithms.losses import TokenLoss
from outloop.engine.train.algorithms.ratios import ratio_of
from outloop.engine.train.data.microbatch import Targets
from outloop.engine.train.megatron.parallel_rank import is_reporting_rank
from outloop.engine.train.ranks.collectives import gather_bytes


@dataclass(slots=True)
class UpdateReport:
    """What an update measured; sums over trained tokens until `means` is asked.

    Until the shares are merged, sums may be tensors: reading each would wait for the device.
    """

    loss: float = 0.0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    num_tokens: int = 0
    num_padded_tokens: int = 0
    num_trained_tokens: int = 0
    num_imitated_tokens: int | Tensor = 0
    """Of the trained tokens; what compares the policy with the behavior policy is of the others."""
    imitated_sum: float | Tensor = 0.0
    """Negative logprobs of these."""
    entropy_sum: float | Tensor = 0.0
    ratio_sum: float | Tensor = 0.0
    ratio_max: float | Tensor = field(default=0.0, metadata={"merge": max})
    ratios: list[Tensor] = field(default_factory=list)
    """policy / behavior of every trained token."""
    proximal_ratios: list[Tensor] = field(default_factory=list)
    """policy / recomputed proximal of every trained token."""
    num_clipped: int | Tensor = 0
    num_clipped_low: int | Tensor = 0
    num_opsm_masked: int | Tensor = 0
    imbalance: float = 0.0
    """Estimated cost of the busiest data-parallel rank over the mean, less one."""
    gaps: list[Tensor] = field(default_factory=list)
    """|policy - behavior| logprobs of every trained token."""
    ages: list[Tensor] = field(default_factory=list)
    """Versions between the weights that sampled it and those before the update, of each."""
    clipped: list[Tensor] = field(default_factory=list)
    """1 for each that the loss clipped, else 0."""
    logprobs: list[Tensor] = field(default_factory=list)
    """Of the policy before the update, of each."""
    places: list[Tensor] = field(default_factory=list)
    """[N] int64: which token of the batch each is."""
    gradient_hash: str = field(default="", metadata={"merge": max})
    """Of all ranks' gradients before clipping; empty where trajectories are not kept."""
    masked: list[Tensor] = field(default_factory=list)
    """1 for each that a correction masked or vetoed, or OPSM left out, else 0."""
    opsm: list[Tensor] = field(default_factory=list)
    """1 for each that OPSM left out, else 0."""

    def add(
        self,
        targets: Targets,
        result: TokenLoss,
        policy_logprobs: Tensor,
        *,
        policy_version: int,
        is_imitated: Tensor | None = None,
    ) -> None:
        """Measure some trained tokens [N] of an RL update.

        Args:
            is_imitated: [N] bool: trained by cross-entropy; None: none is.
            result: their losses, for what was clipped.
            policy_logprobs: without gradient.
            policy_version: of the weights before the update.
        """
        if is_imitated is not None:
            self.num_imitated_tokens = self.num_imitated_tokens + is_imitated.sum()
            total = policy_logprobs[is_imitated].sum(dtype=torch.float64)
            self.imitated_sum = self.imitated_sum - total
            targets = targets.at(~is_imitated)
            result = result.at(~is_imitated)
            policy_logprobs = policy_logprobs[~is_imitated]
        assert targets.behavior_logprobs_N is not None
        if not len(policy_logprobs):
            return
        ratio = ratio_of(policy_logprobs, targets.behavior_logprobs_N)
        self.ratio_sum = self.ratio_sum + ratio.sum(dtype=torch.float64)
        self.ratio_max = torch.clamp(ratio.max(), min=self.ratio_max)
        self.ratios.append(ratio)
        if targets.proximal_logprobs_N is not None:
            self.proximal_ratios.append(ratio_of(policy_logprobs, targets.proximal_logprobs_N))
        self.num_clipped = self.num_clipped + result.is_clipped.sum()
        is_low = result.is_clipped & (result.ratio < 1)
        self.num_clipped_low = self.num_clipped_low + is_low.sum()
        if result.is_masked is not None:
            self.num_opsm_masked = self.num_opsm_masked + result.is_masked.sum()
        self.gaps.append((policy_logprobs - targets.behavior_logprobs_N).abs())
        self.ages.append((policy_version - targets.policy_versions_N).float())
        if targets.places_N is not None:
            self.logprobs.append(policy_logprobs)
            self.places.append(targets.places_N)
        self.clipped.append(result.is_clipped.float())
        is_masked = torch.zeros_like(ratio).bool() if result.is_masked is None else result.is_masked
        self.opsm.append(is_masked.float())
        if targets.correction_N is not None:
            is_masked = is_masked | (targets.correction_N == 0)
        self.masked.append(is_masked.float())

    def metrics(self) -> dict[str, float]:
        """The metrics that SFT and RL share."""
        return {
            "train/loss": self.loss,
            "train/grad_norm": self.grad_norm,
            "train/learning_rate": self.learning_rate,
            "train/tokens": self.num_tokens,
            "train/trained_tokens": self.num_trained_tokens,
            "train/padding_share": 1.0 - self.num_tokens / max(1, self.num_padded_tokens),
            "train/imbalance": self.imbalance,
        }

    def last_metrics(self) -> dict[str, float]:
        """What a take's last update says that its first, whose ratios begin at 1, does not."""
        known = self.metrics() | self.policy_metrics()
        return {name.replace("/", "/last_", 1): known[name] for name in _OF_THE_LAST}

    def policy_metrics(self) -> dict[str, float]:
        """The metrics that compare the policy with the behavior policy."""
        num_imitated = int(self.num_imitated_tokens)
        count = max(1, self.num_trained_tokens - num_imitated)
        all_gaps = torch.cat(self.gaps) if self.gaps else torch.empty(0)
        ages = torch.cat(self.ages) if self.ages else torch.empty(0)
        gap = all_gaps[ages == 0]
        low, high = _percentiles(self.ratios)
        metrics = {
            "train/entropy": float(self.entropy_sum) / max(1, self.num_trained_tokens),
            "train/ratio_mean": float(self.ratio_sum) / count,
            "train/ratio_max": float(self.ratio_max),
            "train/ratio_p01": low,
            "train/ratio_p99": high,
            "train/clip_share": int(self.num_clipped) / count,
            "train/clip_low_share": int(self.num_clipped_low) / count,
            "train/clip_high_share": int(self.num_clipped - self.num_clipped_low) / count,
            "train/opsm_masked_share": int(self.num_opsm_masked) / count,
            "train/logprob_gap_mean": float(gap.mean()) if len(gap) else float("nan"),
            "train/logprob_gap_max": float(gap.max()) if len(gap) else float("nan"),
        }
        if num_imitated:
            metrics["train/imitated_share"] = num_imitated / self.num_trained_tokens
            metrics["train/imitated_nll"] = float(self.imitated_sum) / num_imitated
        metrics |= self._mismatch(ages, all_gaps)
        if self.proximal_ratios:
            ratios = torch.cat(self.proximal_ratios)
            metrics["train/proximal_ratio_mean"] = float(ratios.mean())
            metrics["train/proximal_ratio_max"] = float(ratios.max())
        return metrics

    def _mismatch(self, ages: Tensor, gaps: Tensor) -> dict[str, float]:
        """How far the policy is from what sampled the tokens, together and by their age."""
        if not self.ratios:
            return {}
        ratios, clipped, masked, opsm = map(
            torch.cat, (self.ratios, self.clipped, self.masked, self.opsm)
        )
        metrics = {
            "train/effective_share": _effective_share(ratios),
            "train/ratio_p50": _percentiles([ratios], [0.5])[0],
        }
        for name, first, last, _ in GAP_AGES:
            where = (ages >= first) & (ages <= last)
            if not where.any():
                continue
            low, middle, high = _percentiles([ratios[where]], [0.01, 0.5, 0.99])
            metrics |= {
                f"train/logprob_gap_{name}": float(gaps[where].mean()),
                f"train/tokens_share_{name}": float(where.float().mean()),
                f"train/ratio_p01_{name}": low,
                f"train/ratio_p50_{name}": middle,
                f"train/ratio_p99_{name}": high,
                f"train/effective_share_{name}": _effective_share(ratios[where]),
                f"train/clip_share_{name}": float(clipped[where].mean()),
                f"train/masked_share_{name}": float(masked[where].mean()),
                f"train/masked_opsm_share_{name}": float(opsm[where].mean()),
            }
        return metrics


def _effective_share(weights: Tensor) -> float:
    return effective_share(weights.double().cpu().numpy())


def policy_logprobs(reports: Sequence[UpdateReport], num_tokens: int) -> Float32:
    """[T] logprob of each trained token under the policy before the update that first trained it;
    NaN elsewhere."""
    column = np.full(num_tokens, np.nan, np.float32)
    for report in reversed(reports):
        for places, logprobs in zip(report.places, report.logprobs, strict=True):
            column[places.cpu().numpy()] = logprobs.float().cpu().numpy()
    return column


_OF_THE_LAST = (
    "train/clip_share",
    "train/clip_low_share",
    "train/clip_high_share",
    "train/ratio_p01",
    "train/ratio_p99",
    "train/ratio_max",
    "train/grad_norm",
)


def step_metrics(reports: Sequence[UpdateReport]) -> dict[str, float]:
    """The metrics of a step's updates.

    Counts of tokens are of all updates. Loss, norms and ratios are of the first, whose ratios begin
    at 1; with several updates those of the last are beside them.
    """
    if not reports:
        return step_metrics([UpdateReport(loss=float("nan"))])
    first = reports[0]
    metrics = first.metrics() | first.policy_metrics()
    if len(reports) > 1:
        num_tokens = sum(report.num_tokens for report in reports)
        num_padded = sum(report.num_padded_tokens for report in reports)
        metrics |= reports[-1].last_metrics() | {
            "train/tokens": num_tokens,
            "train/trained_tokens": sum(report.num_trained_tokens for report in reports),
            "train/padding_share": 1.0 - num_tokens / max(1, num_padded),
        }
    return metrics


def merge_reports(report: UpdateReport) -> UpdateReport:
    """The sum of the data-parallel shares, on every rank; before the step is reported.

    Each share is reported by one rank, see `is_reporting_rank`.
    """
    mine = _encode(report) if is_reporting_rank() else b""
    shares = [_decode(data) for data in gather_bytes(mine) if data]
    merged: dict[str, Any] = {}
    for item in dataclasses.fields(UpdateReport):
        values = [getattr(share, item.name) for share in shares]
        if isinstance(values[0], list):
            merged[item.name] = [part for value in values for part in value]
        else:
            merged[item.name] = item.metadata.get("merge", sum)(values)
    return UpdateReport(**merged)


def _encode(report: UpdateReport) -> bytes:
    """Numbers as numbers, lists of tensors as bytes of float32 or int64."""

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.item()
        if not (isinstance(value, list) and value):
            return value
        values = torch.cat(value).cpu()
        if values.dtype == torch.int64:
            return {"int64": values.numpy().tobytes()}
        return values.float().numpy().tobytes()

    return msgspec.msgpack.encode(
        {item.name: plain(getattr(report, item.name)) for item in dataclasses.fields(report)}
    )


def _decode(data: bytes) -> UpdateReport:
    values: dict[str, Any] = msgspec.msgpack.decode(data)
    for name, value in values.items():
        if isinstance(value, bytes):
            values[name] = [torch.frombuffer(bytearray(value), dtype=torch.float32)]
        elif isinstance(value, dict):
            values[name] = [torch.frombuffer(bytearray(value["int64"]), dtype=torch.int64)]
    return UpdateReport(**values)


def _percentiles(parts: Sequence[Tensor], shares: Sequence[float] = (0.01, 0.99)) -> list[float]:
    """Quantiles; NaN without values."""
    values = torch.cat(list(parts)) if parts else torch.empty(0)
    if not len(values):
        return [float("nan")] * len(shares)
    found: list[float] = np.quantile(values.float().cpu().numpy(), shares).tolist()
    return found
