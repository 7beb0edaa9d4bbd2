"""Checksums by SGLang's names, against parameters put together as a whole."""

import hashlib
import random

import pytest
import torch

from fakes.local_tensors import LocalTensors
from outloop.buffer.errors import PublishFailed
from outloop.engine.publish.buckets.plan import TensorSpec
from outloop.engine.publish.verification.sglang_gpu_hash import GpuHash
from outloop.engine.publish.verification.sglang_layout import FusedChecksums

HEAD, NUM_HEADS, NUM_KV_HEADS, HIDDEN, FFN, VOCAB = 4, 4, 2, 16, 24, 40
ATTENTION, MLP = "model.layers.0.self_attn.", "model.layers.0.mlp."
EXPERTS, NUM_EXPERTS, EXPERT_FFN = "model.layers.1.mlp.experts.", 12, 6


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        f"{ATTENTION}q_proj.weight": (NUM_HEADS * HEAD, HIDDEN),
        f"{ATTENTION}k_proj.weight": (NUM_KV_HEADS * HEAD, HIDDEN),
        f"{ATTENTION}v_proj.weight": (NUM_KV_HEADS * HEAD, HIDDEN),
        f"{ATTENTION}q_proj.bias": (NUM_HEADS * HEAD,),
        f"{ATTENTION}k_proj.bias": (NUM_KV_HEADS * HEAD,),
        f"{ATTENTION}v_proj.bias": (NUM_KV_HEADS * HEAD,),
        f"{ATTENTION}q_norm.weight": (HEAD,),
        f"{ATTENTION}o_proj.weight": (HIDDEN, NUM_HEADS * HEAD),
        f"{MLP}gate_proj.weight": (FFN, HIDDEN),
        f"{MLP}up_proj.weight": (FFN, HIDDEN),
        f"{MLP}down_proj.weight": (HIDDEN, FFN),
        "model.layers.1.mlp.gate.weight": (NUM_EXPERTS, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for expert in range(NUM_EXPERTS):
        shapes |= {
            f"{EXPERTS}{expert}.gate_proj.weight": (EXPERT_FFN, HIDDEN),
            f"{EXPERTS}{expert}.up_proj.weight": (EXPERT_FFN, HIDDEN),
            f"{EXPERTS}{expert}.down_proj.weight": (HIDDEN, EXPERT_FFN),
        }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _whole(tensors: dict[str, torch.Tensor], rank: int, num: int) -> dict[str, torch.Tensor]:
    """What rank `rank` of `num` holds, put together without the code under test."""

    def rows(name: str) -> torch.Tensor:
        tensor = tensors[name]
        step = len(tensor) // num
        return tensor[rank * step : (rank + 1) * step]

    def columns(name: str) -> torch.Tensor:
        tensor = tensors[name]
        step = tensor.shape[1] // num
        return tensor[:, rank * step : (rank + 1) * step]

    def padded(name: str) -> torch.Tensor:
        whole = torch.zeros(64, HIDDEN)
        whole[:VOCAB] = tensors[name]
        return whole[rank * 64 // num : (rank + 1) * 64 // num]

    held = {
        f"{ATTENTION}qkv_proj.{kind}": torch.cat(
            [rows(f"{ATTENTION}{part}_proj.{kind}") for part in "qkv"]
        )
        for kind in ("weight", "bias")
    }
    gate_up = [rows(f"{MLP}{part}_proj.weight") for part in ("gate", "up")]
    each = [f"{EXPERTS}{expert}." for expert in range(NUM_EXPERTS)]
    held |= {
        f"{EXPERTS}w13_weight": torch.stack(
            [torch.cat([rows(f"{e}{part}_proj.weight") for part in ("gate", "up")]) for e in each]
        ),
        f"{EXPERTS}w2_weight": torch.stack([columns(f"{e}down_proj.weight") for e in each]),
        "model.layers.1.mlp.gate.weight": tensors["model.layers.1.mlp.gate.weight"],
    }
    return held | {
        "model.embed_tokens.weight": padded("model.embed_tokens.weight"),
        "lm_head.weight": padded("lm_head.weight"),
        f"{MLP}gate_up_proj.weight": torch.cat(gate_up),
        f"{ATTENTION}o_proj.weight": columns(f"{ATTENTION}o_proj.weight"),
        f"{MLP}down_proj.weight": columns(f"{MLP}down_proj.weight"),
        f"{ATTENTION}q_norm.weight": tensors[f"{ATTENTION}q_norm.weight"],
        "model.norm.weight": tensors["model.norm.weight"],
    }


def _account(
    tensors: dict[str, torch.Tensor], num_ranks: int, seed: int, *, is_gpu: bool = False
) -> FusedChecksums:
    account = FusedChecksums(num_ranks, LocalTensors(tensors).specs, is_gpu=is_gpu)
    names = list(tensors)
    random.Random(seed).shuffle(names)
    for name in names:
        tensor = tensors[name]
        spec = TensorSpec(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)
        account.add(spec, tensor.reshape(-1).view(torch.uint8))
    return account


def _cpu_hash(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


def _gpu_hash(tensor: torch.Tensor) -> str:
    digest = GpuHash()
    digest.update(tensor.contiguous().reshape(-1).view(torch.uint8))
    return digest.hexdigest()


@pytest.mark.parametrize("is_gpu", [False, True])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_rank_in_any_order(num_ranks: int, seed: int, is_gpu: bool) -> None:
    """Fused, padded and cut parameters hash as the whole ones, in whatever order parts come."""
    tensors = _tensors()
    hash_of = _gpu_hash if is_gpu else _cpu_hash
    for rank, sums in enumerate(_account(tensors, num_ranks, seed, is_gpu=is_gpu).result()):
        assert sums == {n: hash_of(t) for n, t in _whole(tensors, rank, num_ranks).items()}


def test_a_missing_part_is_named() -> None:
    """A fused parameter of which a part never came is no success."""
    tensors = _tensors()
    del tensors[f"{ATTENTION}k_proj.weight"]
    with pytest.raises(PublishFailed, match=r"qkv_proj\.weight.*1 of its 3 parts"):
        _account(tensors, 1, 0).result()


def test_shapes_that_cannot_be_cut_are_named() -> None:
    """Rows that do not divide among the ranks are refused with the setting to change."""
    with pytest.raises(PublishFailed, match=r"o_proj.*server\.tensor_parallel_size=3"):
        _account({f"{ATTENTION}o_proj.weight": torch.zeros(4, 4)}, 3, 0)
