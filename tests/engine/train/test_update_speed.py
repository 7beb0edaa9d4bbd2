"""Operations, peaks and memory of an update, by formulas worked out by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fakes.bandit_run import FAST
from outloop.engine.publish.buckets.plan import TensorSpec
from outloop.engine.train.step.update_speed import (
    active_weights,
    memory_peak,
    mfu,
    peak_operations,
    update_operations,
)


def spec(name: str, *shape: int) -> TensorSpec:
    """A tensor's."""
    return TensorSpec(name=name, shape=shape, dtype=torch.bfloat16)


def test_weights_that_a_token_is_multiplied_with() -> None:
    """Norms and the lookup are none; a tied embedding is the head; a token goes to two of eight."""
    specs = [
        spec("model.embed_tokens.weight", 100, 8),
        spec("model.layers.0.input_layernorm.weight", 8),
        spec("model.layers.0.self_attn.q_proj.weight", 16, 8),
        spec("model.layers.0.mlp.experts.0.up_proj.weight", 32, 8),
        spec("lm_head.weight", 100, 8),
    ]
    found = active_weights(specs, expert_share=0.25, is_tied=False)
    assert found == 16 * 8 + 0.25 * 32 * 8 + 100 * 8
    assert active_weights(specs[:-1], expert_share=0.25, is_tied=True) == found


def test_operations_of_rows() -> None:
    """6 a weight and token; attention by the square of each row, not of their sum."""
    one = update_operations(1000.0, num_layers=2, attention_width=16, lengths=[10])
    assert one == 6 * 1000 * 10 + 6 * 2 * 16 * 100
    two = update_operations(1000.0, num_layers=2, attention_width=16, lengths=[10, 10])
    assert two == 2 * one
    assert update_operations(1000.0, num_layers=2, attention_width=16, lengths=[20]) > two


def test_the_formula_is_that_of_the_measured_shape() -> None:
    """Qwen3-0.6B, rows of 2,048 tokens: the count behind the MFU of docs/gpu.md."""
    width, kv, hidden, inner, vocab, layers = 16 * 128, 8 * 128, 1024, 3072, 151936, 28
    weights = layers * hidden * (2 * width + 2 * kv + 3 * inner) + hidden * vocab
    operations = update_operations(
        weights, num_layers=layers, attention_width=width, lengths=[2048] * 16
    )
    tokens = 16 * 2048
    assert operations == tokens * (6 * weights + 12 * layers * width * 2048 / 2)
    # 45,200 tokens/s on one H100 are 19.6 %.
    peak = peak_operations("NVIDIA H100 80GB HBM3", torch.bfloat16)
    assert peak is not None
    reached = mfu(operations, seconds=tokens / 45_200, num_ranks=1, peak=peak)
    assert reached == pytest.approx(0.196, abs=0.001)


def test_a_device_that_is_not_known_has_no_peak() -> None:
    """A wrong one would be a wrong figure."""
    assert peak_operations("GeForce 9800", torch.bfloat16) is None
    assert peak_operations("NVIDIA A100-SXM4-80GB", torch.float32) == 156e12


@pytest.mark.medium
def test_a_step_says_how_fast_it_was_and_what_it_took(setup: Callable[..., Any]) -> None:
    """On the CPU without MFU, since no peak is known."""
    rows = setup(trainer=FAST | {"num_steps": 2}).train()
    for row in (row for row in rows if "train/loss" in row):
        seconds = row["train/tokens"] / row["train/tokens_per_s_per_rank"]
        assert 0 < seconds <= row["train/update_s"]
        assert 1e7 < row["train/memory_peak_bytes"] <= 2 * memory_peak()
        assert "train/mfu" not in row
