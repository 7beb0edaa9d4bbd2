"""Memory, networks and prices: by hand, by published numbers, and by what torch saves."""

from pathlib import Path

import pytest

from outloop.buffer.errors import SettingsError
from outloop.engine.launch.plan.cost import (
    availability,
    per_step,
)
from outloop.engine.launch.plan.memory import (
    LOSS_BYTES,
    Layout,
    ModelShape,
    cached_tokens,
    layer_activation_bytes,
    rank_memory,
)
from outloop.engine.launch.plan.network import all_reduce_s, broadcast_s, one_by_one_s

LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
QWEN3_8B = LLAMA_8B | {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "intermediate_size": 12288,
    "head_dim": 128,
    "vocab_size": 151936,
}
QWEN2_7B = LLAMA_8B | {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
QWEN3_30B = QWEN3_8B | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}


def shape(config: dict[str, object]) -> ModelShape:
    """Of a configuration."""
    return ModelShape.of_config(config, source="test")


@pytest.mark.parametrize(
    ("config", "num_params"),
    [
        (LLAMA_8B, 8_030_261_248),
        (QWEN3_8B, 8_190_735_360),
        (QWEN2_7B, 7_615_616_512),
        (QWEN3_30B, 30_532_122_624),
    ],
    ids=["llama-3-8b", "qwen3-8b", "qwen2.5-7b", "qwen3-30b-a3b"],
)
def test_parameters_are_as_many_as_the_published_folders_have(
    config: dict[str, object], num_params: int
) -> None:
    """Totals of the safetensors indices of these policies."""
    assert shape(config).num_params == num_params


def test_a_token_of_a_mixture_meets_a_part_of_it() -> None:
    """Qwen3-30B-A3B: 3.3 billion active."""
    assert shape(QWEN3_30B).num_active_params == pytest.approx(3.35e9, rel=0.01)


def test_eighteen_bytes_a_parameter_and_six_beside_the_optimizer_s_shard() -> None:
    """bfloat16: 2 + 4 + 12, of which the distributed optimizer divides 12; float32: 4 + 4 + 8."""
    model = shape(LLAMA_8B)
    n = model.num_params - model.hidden
    one = rank_memory(model, Layout(), microbatch_tokens=1)
    assert one.weights + one.gradients + one.optimizer == pytest.approx(18 * n, rel=1e-3)
    eight = rank_memory(model, Layout(data=8), microbatch_tokens=1)
    assert eight.weights + eight.gradients + eight.optimizer == pytest.approx(
        (6 + 12 / 8) * n, rel=1e-3
    )
    single = rank_memory(model, Layout(dtype="float32"), microbatch_tokens=1)
    assert single.weights + single.gradients + single.optimizer == pytest.approx(16 * n, rel=1e-3)
    assert one.total == one.weights + one.gradients + one.optimizer + one.activations + LOSS_BYTES


def test_activations_agree_with_the_paper_where_the_paper_applies() -> None:
    """34 h bytes a token and layer with dropout's masks (2 h), at h = q = k and f = 8 h / 3."""
    h = 3072
    model = ModelShape(
        num_layers=1, hidden=h, ffn=8 * h // 3, num_heads=24, num_kv_heads=24, head_dim=128, vocab=1
    )
    assert layer_activation_bytes(model, dtype="bfloat16") == 32 * h


def test_shares_divide_activations_and_a_pipeline_does_not() -> None:
    """Tensor and context parallelism divide them; a pipeline's first stage holds all stages'."""
    model = shape(LLAMA_8B)
    whole = rank_memory(model, Layout(), microbatch_tokens=4096).activations
    assert whole == 32 * 4096 * layer_activation_bytes(model, dtype="bfloat16")
    for layout in (Layout(tensor=4), Layout(tensor=2, context=2)):
        assert rank_memory(model, layout, microbatch_tokens=4096).activations == whole / 4
    assert rank_memory(model, Layout(pipeline=4), microbatch_tokens=4096).activations == whole
    less = rank_memory(model, Layout(recomputes=True), microbatch_tokens=4096).activations
    assert less < whole / 10


@pytest.mark.medium
def test_activations_are_what_torch_saves_for_backward() -> None:
    """A layer of the formula's kind, written in torch: the bytes that autograd keeps, in float32.

    Attention keeps its inputs, its output and one number a head; each norm a number a token.
    """
    import torch
    from torch.nn import functional

    h, heads, kv, d, f, tokens = 64, 4, 2, 16, 96, 128
    q, k = heads * d, kv * d
    weights = {
        name: torch.randn(rows, columns, requires_grad=True)
        for name, rows, columns in [
            ("q", q, h),
            ("k", k, h),
            ("v", k, h),
            ("o", h, q),
            ("gate", f, h),
            ("up", f, h),
            ("down", h, f),
        ]
    }
    gains = [torch.ones(h, requires_grad=True) for _ in range(2)]
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if not any(w.untyped_storage().data_ptr() == storage.data_ptr() for w in own):
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    own = [*weights.values(), *gains]
    x = torch.randn(tokens, h, requires_grad=True)
    alive = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        n = functional.rms_norm(x, (h,), gains[0])
        parts = [n @ weights[name].T for name in "qkv"]
        a = functional.scaled_dot_product_attention(
            *(part.view(1, tokens, -1, d).transpose(1, 2) for part in parts),
            is_causal=True,
            enable_gqa=True,
        )
        y = x + a.transpose(1, 2).reshape(tokens, q) @ weights["o"].T
        m = functional.rms_norm(y, (h,), gains[1])
        gate, up = m @ weights["gate"].T, m @ weights["up"].T
        out = y + (functional.silu(gate) * up) @ weights["down"].T
        alive += [n, a, y, m, gate, up, out, *parts]
    model = ModelShape(
        num_layers=1, hidden=h, ffn=f, num_heads=heads, num_kv_heads=kv, head_dim=d, vocab=1
    )
    expected = tokens * layer_activation_bytes(model, dtype="float32")
    # silu(gate) is one f more than a fused kernel keeps, and grouped heads are repeated here.
    assert expected <= sum(kept.values()) <= expected + 4 * tokens * (f + 4 * q + 2 * heads + 8)


def test_what_a_server_caches_is_what_its_weights_leave() -> None:
    """Llama-3-8B: 128 KiB a token; 0.85 x 80 - 16 GB hold 396 thousand tokens."""
    model = shape(LLAMA_8B)
    assert model.cache_bytes_per_token == 131072
    assert cached_tokens(model, gpus=1, gpu_bytes=80e9) == pytest.approx(396_000, rel=0.01)
    with pytest.raises(SettingsError, match="at least 2 are needed"):
        cached_tokens(model, gpus=1, gpu_bytes=16e9)


def test_a_config_without_a_size_is_refused(tmp_path: Path) -> None:
    """The first that is missing is named."""
    with pytest.raises(SettingsError, match="no hidden_size"):
        shape({"num_hidden_layers": 2})


def test_a_broadcast_costs_its_bytes_once_and_a_bucket_for_each_level() -> None:
    """16 GB at 16 GB/s: a second for one server, and 1/8 s more for each of two further levels."""
    assert broadcast_s(16e9, servers=1, bandwidth=16e9) == pytest.approx(1.0)
    assert broadcast_s(16e9, servers=7, bandwidth=16e9, bucket_bytes=2e9) == pytest.approx(1.25)
    assert one_by_one_s(16e9, servers=7, bandwidth=16e9) == pytest.approx(7.0)


def test_a_ring_sends_nearly_twice_the_gradients() -> None:
    """2 (d - 1) / d: nothing for one rank, 1 for two, 1.75 for eight."""
    assert [all_reduce_s(1.0, ranks=d, bandwidth=1.0) for d in (1, 2, 8)] == [0.0, 1.0, 1.75]


def test_money_is_hours_times_prices() -> None:
    """8 spot servers at 1 and 4 trainer GPUs at 3, 10 steps an hour: 2 a step."""
    assert per_step(servers=8, trainer=4, steps_per_hour=10, of_server=1, of_trainer=3) == 2.0
    assert availability(hours_between=3.0, recovery_s=3600.0) == 0.75
