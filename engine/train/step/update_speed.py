"""How fast an update was, and what memory it took."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from outloop.engine.publish.buckets.plan import TensorSpec

_STATUS = Path("/proc/self/status")
_PEAKS: dict[str, dict[torch.dtype, float]] = {
    "H100": {torch.bfloat16: 989e12, torch.float32: 494.5e12},
    "H200": {torch.bfloat16: 989e12, torch.float32: 494.5e12},
    "A100": {torch.bfloat16: 312e12, torch.float32: 156e12},
    "B200": {torch.bfloat16: 2250e12, torch.float32: 1125e12},
}
"""Operations a second of dense matrices, by NVIDIA's data sheets; float32 is TF32."""


def peak_operations(device_name: str, dtype: torch.dtype) -> float | None:
    """Of a device whose name CUDA gives; None: it is not known."""
    for name, of_dtype in _PEAKS.items():
        if name in device_name:
            return of_dtype.get(dtype)
    return None


def own_peak(dtype: torch.dtype) -> float | None:
    """Of this rank's device."""
    if not torch.cuda.is_available():
        return None
    return peak_operations(torch.cuda.get_device_name(), dtype)


def active_weights(specs: Sequence[TensorSpec], *, expert_share: float, is_tied: bool) -> float:
    """Weights that a token is multiplied with: all but the input embedding and what is no matrix.

    Args:
        expert_share: of the routed experts that a token goes to; 1 without experts.
        is_tied: the input embedding is the head too, and counts as that.
    """
    total = 0.0
    for spec in specs:
        is_lookup = "embed_tokens" in spec.name and not is_tied
        if len(spec.shape) < 2 or is_lookup:
            continue
        share = expert_share if ".experts." in spec.name else 1.0
        total += share * math.prod(spec.shape)
    return total


def update_operations(
    weights: float, *, num_layers: int, attention_width: int, lengths: Sequence[int]
) -> float:
    """Operations of a forward and backward over rows of these lengths, as MFU counts them.

    6 for a weight and token, and for causal attention 6 T^2 for each of the `attention_width`
    (heads times their size) of a layer: half of 12 (Chowdhery et al. 2022, appendix B). What is
    recomputed, and forwards for logprobs, count nothing.
    """
    tokens = float(sum(lengths))
    squares = float(sum(length * length for length in lengths))
    return 6.0 * weights * tokens + 6.0 * num_layers * attention_width * squares


def mfu(operations: float, *, seconds: float, num_ranks: int, peak: float) -> float:
    """Share of the ranks' peak that an update of so many operations reached."""
    return operations / (seconds * num_ranks * peak)


def begin_memory_peak() -> None:
    """Count from what is held now; on the CPU nothing counts."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def memory_peak() -> int:
    """Bytes: the most that torch held on the device since `begin_memory_peak`; on the CPU what is
    resident now."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    for line in _STATUS.read_text().splitlines() if _STATUS.exists() else ():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0
