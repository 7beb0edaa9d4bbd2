"""Which layers a trainer uses, and attention by kernels of variable length."""

import functools
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings.trainer import TrainerSettings
from outloop.engine.models.weight_map import expected_tensors, find_row
from outloop.engine.train.megatron import import_weights, model_and_optimizer
from outloop.engine.train.megatron.import_weights import global_name, weights_of
from outloop.engine.train.megatron.layer_kind import choose_layers, layers_of
from outloop.engine.train.megatron.layers import (
    PackedRow,
    TorchVarlenKernel,
    VarlenAttention,
    pack_row,
)

TinyFolder = Callable[..., Path]
LENGTHS = [7, 33, 1, 24, 24, 90]
MAX_BFLOAT16_GAP = 2e-3
"""Of logits up to about 0.5 whose attention was rounded to bfloat16."""


class OneByOne(torch.nn.Module):
    """Causal attention by `cu_seqlens`, one sample after the other, in the dtype it is given."""

    def __init__(self, **unused: Any) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any,
        attention_bias: Tensor | None,
        packed_seq_params: PackedRow,
    ) -> Tensor:
        """[T, H, D] and [T, K, D] to [T, H * D]."""
        self.dtypes |= {query.dtype, key.dtype, value.dtype}
        boundaries = packed_seq_params.cu_seqlens_q.tolist()
        parts = []
        for start, stop in pairwise(boundaries):
            q, k, v = (x[start:stop].transpose(0, 1) for x in (query, key, value))
            parts.append(
                functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            )
        return torch.cat([part.transpose(0, 1).flatten(1) for part in parts])


def _varlen(
    model: model_and_optimizer.PolicyModel, kernel: Callable[..., Any] = OneByOne
) -> list[Any]:
    """Give the model's layers attention by a kernel; gives the kernels."""
    kernels = []
    for layer in model.decoder.layers:
        attention = VarlenAttention(model.config, layer.layer_number, kernel=kernel)
        layer.self_attention.core_attention = attention
        kernels.append(attention.kernel)
    return kernels


@pytest.mark.parametrize(
    ("wanted", "device", "is_importable", "chosen"),
    [
        ("auto", "cuda", True, "transformer_engine"),
        ("auto", "cuda:1", True, "transformer_engine"),
        ("auto", "cuda", False, "local_varlen"),
        ("local_varlen", "cuda", True, "local_varlen"),
        ("auto", "cpu", True, "local"),
        ("auto", "cpu", False, "local"),
        ("local", "cuda", True, "local"),
        ("transformer_engine", "cuda", True, "transformer_engine"),
    ],
)
def test_layers_are_transformer_engines_where_it_can_run(
    wanted: Any, device: str, is_importable: bool, chosen: str
) -> None:
    """On a GPU when importable, unless local ones are asked for; never on a CPU."""
    assert choose_layers(wanted, device=device, is_importable=is_importable) == chosen


@pytest.mark.parametrize(
    ("device", "is_importable", "sentence"),
    [
        ("cpu", True, r"device='cpu'.*need CUDA; set trainer.layers"),
        ("cpu", False, r"device='cpu'.*need CUDA; set trainer.layers"),
        ("cuda", False, r"cannot import transformer_engine.*install transformer-engine"),
    ],
)
def test_layers_that_cannot_be_had_are_refused(
    device: str, is_importable: bool, sentence: str
) -> None:
    """With what to change."""
    with pytest.raises(SettingsError, match=sentence):
        choose_layers("transformer_engine", device=device, is_importable=is_importable)


def test_attention_of_variable_length_is_refused_on_a_cpu() -> None:
    """torch has no such kernels there."""
    with pytest.raises(SettingsError, match='trainer.layers="local_varlen" on device=.cpu'):
        choose_layers("local_varlen", device="cpu", is_importable=False)


def test_settings_choose_the_layers() -> None:
    """Local ones on a CPU by default, and the setting is followed."""
    assert layers_of(TrainerSettings()) == "local"
    with pytest.raises(SettingsError, match="need CUDA"):
        layers_of(TrainerSettings(layers="transformer_engine"))


@pytest.mark.medium
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_a_row_for_kernels_says_where_samples_begin(lengths: list[int]) -> None:
    """Boundaries are int32 and cut the row into its samples; nothing is padding."""
    row = pack_row(lengths, torch.device("cpu"), layers="transformer_engine")
    assert row.qkv_format == "thd"
    for boundaries in (row.cu_seqlens_q, row.cu_seqlens_kv):
        assert boundaries.dtype == torch.int32
        assert boundaries[0] == 0
        assert boundaries.diff().tolist() == lengths
    assert (row.max_seqlen_q, row.max_seqlen_kv) == (max(lengths), max(lengths))
    assert row.positions.tolist() == [i for length in lengths for i in range(length)]
    assert row.num_padded_tokens == row.num_tokens == sum(lengths)


def _varlen_attn_of_a_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """What torch.nn.attention.varlen.varlen_attn documents, which runs on CUDA only."""
    assert query.dtype == key.dtype == value.dtype == torch.bfloat16
    assert window_size == (-1, 0)
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert int(cu_seq_q.diff().max()) == max_q == max_k
    parts = []
    for start, stop in pairwise(cu_seq_q.tolist()):
        q, k, v = (x[start:stop].transpose(0, 1) for x in (query, key, value))
        parts.append(
            functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa
            ).transpose(0, 1)
        )
    return torch.cat(parts)


@pytest.mark.parametrize("kind", ["qwen3", "llama3"])
def test_torchs_kernel_is_asked_for_packed_attention(kind: str, tiny_folder: TinyFolder) -> None:
    """Layers of kind local_varlen give what padded attention gives, to bfloat16's rounding.

    The kernel itself has no CPU side: here a stand-in checks how it is called, and on a GPU
    tests/gpu does the same with the kernel.
    """
    folder = tiny_folder(kind, tied=False)
    ids = torch.randint(0, 400, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    everywhere = torch.arange(sum(LENGTHS))
    logits = []
    for layers in ("local", "local_varlen"):
        config = model_and_optimizer.read_config(folder, {}, layers=layers)
        model = model_and_optimizer.PolicyModel(config)
        import_weights.load_huggingface(model, folder)
        if layers == "local_varlen":
            own = [layer.self_attention.core_attention.kernel for layer in model.decoder.layers]
            assert {type(kernel) for kernel in own} == {TorchVarlenKernel}
            _varlen(model, functools.partial(TorchVarlenKernel, attend=_varlen_attn_of_a_cpu))
        row = pack_row(LENGTHS, torch.device("cpu"), layers=layers)
        with torch.no_grad():
            logits.append(model.logits(model(ids, row, everywhere)))
    assert 0 < (logits[0] - logits[1]).abs().max() <= MAX_BFLOAT16_GAP


# Not with experts: rounding may change which of them a token goes to.
@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama3"])
def test_kernels_of_variable_length_agree_with_packed_attention(
    kind: str, tiny_folder: TinyFolder
) -> None:
    """The same logits and embedding gradient, to the rounding of what the kernel is given."""
    torch.manual_seed(3)
    folder = tiny_folder(kind, tied=False)
    model = model_and_optimizer.PolicyModel(model_and_optimizer.read_config(folder, {}))
    import_weights.load_huggingface(model, folder)
    ids = torch.randint(0, 400, (sum(LENGTHS),))
    everywhere = torch.arange(sum(LENGTHS))

    def run(row: PackedRow) -> tuple[Tensor, Tensor]:
        logits = model.logits(model(ids, row, everywhere))
        torch.log_softmax(logits, -1)[:, 5].mean().backward()
        gradient = model.embedding.word_embeddings.weight.grad
        model.embedding.word_embeddings.weight.grad = None
        return logits.detach(), gradient

    packed, packed_gradient = run(pack_row(LENGTHS, torch.device("cpu")))
    kernels = _varlen(model)
    row = pack_row(LENGTHS, torch.device("cpu"), layers="transformer_engine")
    ours, gradient = run(row)
    assert {dtype for kernel in kernels for dtype in kernel.dtypes} == {torch.bfloat16}
    assert ours.dtype == torch.float32
    assert (ours - packed).abs().max() <= MAX_BFLOAT16_GAP
    assert (gradient - packed_gradient).abs().max() <= 0.02 * packed_gradient.abs().max()
    whole = pack_row([sum(LENGTHS)], torch.device("cpu"), layers="transformer_engine")
    assert (run(whole)[0] - packed).abs().max() > 10 * MAX_BFLOAT16_GAP


def test_grouped_experts_are_known_by_both_names(tiny_folder: TinyFolder) -> None:
    """Transformer Engine's grouped kernel names a rank's experts in another way."""
    config = model_and_optimizer.read_config(tiny_folder("glm4_moe", tied=False), {})
    model = model_and_optimizer.PolicyModel(config)
    names = [name for name, _ in weights_of(model)]
    grouped = [
        re.sub(r"local_experts\.(\d+)\.(linear_fc[12]\.weight)", r"\2\1", name) for name in names
    ]
    assert sum(before != after for before, after in zip(names, grouped, strict=True)) == 16
    assert [global_name(model, name) for name in grouped] == grouped
    found = [tensor for name in grouped for tensor in find_row(name).names]
    assert sorted(found) == sorted(expected_tensors(config))


def test_grouped_kernels_are_refused_where_there_are_none(tiny_folder: TinyFolder) -> None:
    """The sentence names the layers that have them."""
    with pytest.raises(SettingsError, match=r"moe_grouped_gemm=true .*transformer_engine"):
        model_and_optimizer.read_config(
            tiny_folder("qwen3_moe", tied=False), {"moe_grouped_gemm": True}
        )


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
def test_fused_norms_are_known_by_both_names(kind: str, tiny_folder: TinyFolder) -> None:
    """Each parameter under Transformer Engine's names is the same tensors; none is left over."""
    config = model_and_optimizer.read_config(tiny_folder(kind, tied=False), {})
    local = [name for name, _ in model_and_optimizer.PolicyModel(config).named_parameters()]
    fused = [
        name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_").replace(
            "pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"
        )
        for name in local
    ]
    assert sum(before != after for before, after in zip(local, fused, strict=True)) == 4
    assert [find_row(name) for name in fused] == [find_row(name) for name in local]
    found = [tensor for name in fused for tensor in find_row(name).names]
    assert sorted(found) == sorted(expected_tensors(config))
