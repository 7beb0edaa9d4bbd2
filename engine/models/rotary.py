"""Rotary position frequencies of a Hugging Face configuration.

Trainer and server rotate by the same numbers, because both take them from here. An unknown variant
is refused, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outloop.buffer.errors import SettingsError

KINDS = ("default", "llama3")


def rotary_parameters(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Parameters of the rotary embedding in a config.json, wherever its release puts them.

    Args:
        source: what to call the config.json in an error.

    Returns:
        rope_theta, rope_type, where only a part of each head is rotated partial_rotary_factor,
        and, for scaled variants, their own numbers.

    Raises:
        SettingsError: a variant that is not known, or one whose numbers are missing.
    """
    table = dict(raw.get("rope_parameters") or {}) | dict(raw.get("rope_scaling") or {})
    kind = table.get("rope_type") or table.get("type") or "default"
    if kind not in KINDS:
        raise SettingsError(
            f"{source} has rope_type={kind!r}; allowed: {', '.join(KINDS)}. "
            "Give a model with one of these"
        )
    theta = float(table.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    found: dict[str, Any] = {"rope_theta": theta, "rope_type": kind}
    factor = float(table.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0)
    if factor != 1.0:
        found["partial_rotary_factor"] = factor
    if kind == "llama3":
        names = (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        )
        missing = [name for name in names if name not in table]
        if missing:
            raise SettingsError(
                f"{source} has rope_type='llama3' without {missing}; add them to rope_scaling"
            )
        found |= {name: float(table[name]) for name in names}
    return found


def inverse_frequencies(parameters: Mapping[str, Any], head_dim: int) -> Tensor:
    """[R / 2] float32: radians by which a position advances each pair of dimensions.

    The first R = head_dim * partial_rotary_factor dimensions of a head are rotated, all where there
    is no such factor.

    llama3 (Llama 3.1's config, "rope_scaling"): a pair whose wavelength exceeds
    original_max_position_embeddings / low_freq_factor is slowed down by `factor`, one below
    original_max_position_embeddings / high_freq_factor is left alone, those between are blended
    linearly in the number of turns that fit into the original context.
    """
    num_rotated = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    powers = torch.arange(0, num_rotated, 2, dtype=torch.int64).float() / num_rotated
    plain = 1.0 / (parameters["rope_theta"] ** powers)
    if parameters["rope_type"] == "default":
        return plain
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    num_turns = parameters["original_max_position_embeddings"] * plain / (2 * math.pi)
    share = ((num_turns - low) / (high - low)).clamp(0.0, 1.0)
    return share * plain + (1.0 - share) * plain / parameters["factor"]
