"""What a model of a size begins with: dtype, learning rate and lengths.

The figures are those of the repository's own examples of that size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from outloop.engine.launch.plan.memory import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeDefaults:
    """Of models up to a size."""

    max_params: float
    dtype: str
    """Of trainer and servers."""
    learning_rate: float
    max_context_tokens: int
    max_new_tokens: int


RANDOM = SizeDefaults(
    max_params=1e6,
    dtype="float32",
    learning_rate=2e-3,
    max_context_tokens=2048,
    max_new_tokens=16,
)
"""Of the small model that `outloop init` makes itself."""
BY_SIZE = (
    # examples/calculator and the like.
    SizeDefaults(
        max_params=50e6,
        dtype="float32",
        learning_rate=1e-3,
        max_context_tokens=1024,
        max_new_tokens=64,
    ),
    # examples/smollm2, for a laptop.
    SizeDefaults(
        max_params=300e6,
        dtype="float32",
        learning_rate=2e-5,
        max_context_tokens=2048,
        max_new_tokens=256,
    ),
    # examples/gpu: Qwen3-0.6B on one GPU.
    SizeDefaults(
        max_params=2e9,
        dtype="bfloat16",
        learning_rate=1e-6,
        max_context_tokens=4096,
        max_new_tokens=2048,
    ),
    # examples/gpu: Qwen3-8B and 30B-A3B on eight.
    SizeDefaults(
        max_params=float("inf"),
        dtype="bfloat16",
        learning_rate=1e-6,
        max_context_tokens=8192,
        max_new_tokens=4096,
    ),
)


def defaults_for(config: Mapping[str, Any], *, source: str) -> tuple[SizeDefaults, int]:
    """What to begin with, and how many parameters the model has.

    Lengths are at most what the model knows (`max_position_embeddings`), answers half of that.

    Args:
        config: its config.json.
        source: where that came from, for errors.

    Raises:
        SettingsError: a model whose parameters cannot be counted.
    """
    num_params = round(ModelShape.of_config(config, source=source).num_params)
    found = next(one for one in BY_SIZE if num_params <= one.max_params)
    known = config.get("max_position_embeddings")
    if not isinstance(known, int):
        return found, num_params
    context = min(found.max_context_tokens, known)
    answer = min(found.max_new_tokens, context // 2)
    return replace(found, max_context_tokens=context, max_new_tokens=answer), num_params
