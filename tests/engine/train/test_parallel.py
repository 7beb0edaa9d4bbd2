"""Parallel sizes: what is refused, and what the refusal says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outloop.buffer.errors import SettingsError
from outloop.engine.train.megatron import model_config
from outloop.engine.train.megatron.parallel_config import check_world, common_divisors, read_sizes

TinyFolder = Callable[..., Path]


@pytest.mark.parametrize(
    ("raw", "num_ranks", "sentence"),
    [
        ({"tensor_model_parallel_size": 3}, 4, r"=3 does not divide .*num_ranks=4.*do: 1, 2, 4"),
        ({"pipeline_model_parallel_size": 4}, 6, r"=4 does not divide .*=6; these do: 1, 2, 3, 6"),
        (
            {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2},
            4,
            r"=4 does not divide .*=4 / pipeline_model_parallel_size=2=2; these do: 1, 2",
        ),
        (
            {"expert_model_parallel_size": 3},
            4,
            r"expert_model_parallel_size=3 .* these do: 1, 2, 4",
        ),
        ({"tensor_model_parallel_size": 0}, 2, r"=0; a whole number from 1 on"),
        ({"tensor_model_parallel_size": "two"}, 2, r"='two'; a whole number"),
        ({"context_parallel_size": 2}, 2, r"context_parallel_size=2: .*CPU"),
        ({"virtual_pipeline_model_parallel_size": 2}, 2, r"silently.*whole stages"),
        ({"sequence_parallel": True}, 2, r"tensor_model_parallel_size=1 splits nothing"),
        (
            {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2},
            4,
            r"needs sequence_parallel=true",
        ),
    ],
)
def test_impossible_sizes_name_those_that_work(
    raw: dict[str, Any], num_ranks: int, sentence: str
) -> None:
    """Before any process group is formed."""
    with pytest.raises(SettingsError, match=sentence):
        read_sizes(raw, num_ranks=num_ranks)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("kind", "raw", "sentence"),
    [
        ("qwen3", {"tensor_model_parallel_size": 4}, r"num_query_groups=2.*these do: 1, 2"),
        ("qwen3", {"pipeline_model_parallel_size": 4}, r"num_layers=2; these do: 1, 2"),
        ("qwen3", {"expert_model_parallel_size": 2}, r"the model has no experts"),
        ("qwen3_moe", {"expert_model_parallel_size": 8}, r"num_moe_experts=4; these do: 1, 2, 4"),
        ("qwen3", {"overlap_param_gather": True}, r"publish.*remove it"),
        (
            "qwen3",
            {"overlap_grad_reduce": True, "pipeline_model_parallel_size": 2},
            r"overlap_grad_reduce=true with pipeline_model_parallel_size=2",
        ),
        ("qwen3", {"lr": 1.0}, r"trainer.megatron.lr=1.0: the model folder or the trainer decides"),
        ("qwen3", {"grad_reduce_in_fp32": False}, r"the trainer decides"),
        ("qwen3", {"use_precision_aware_optimizer": True}, r"the trainer decides"),
        ("qwen3", {"overlap_grad_reduse": True}, r"did you mean 'overlap_grad_reduce'"),
    ],
)
def test_sizes_and_options_that_the_model_does_not_allow(
    kind: str, raw: dict[str, Any], sentence: str, tiny_folder: TinyFolder
) -> None:
    """Each is one sentence, with what divides where something must."""
    with pytest.raises(SettingsError, match=sentence):
        model_config.read_config(tiny_folder(kind, tied=False), raw, num_ranks=8)


def test_options_reach_the_part_of_megatron_that_has_them(tiny_folder: TinyFolder) -> None:
    """Gradient buffers, optimizer, or both; the rest is the model's."""
    raw = {"use_distributed_optimizer": True, "bucket_size": 1000, "adam_eps": 1e-6}
    found = model_config.read_config(tiny_folder(), raw)
    assert found.ddp_options == {"use_distributed_optimizer": True, "bucket_size": 1000}
    assert found.optimizer_options == {"use_distributed_optimizer": True, "adam_eps": 1e-6}


def test_context_parallelism_goes_with_transformer_engines_layers() -> None:
    """With them it is one more divisor of the ranks; a wrong one is named."""
    raw = {"context_parallel_size": 2, "tensor_model_parallel_size": 2}
    assert read_sizes(raw, num_ranks=8, layers="transformer_engine").data == 2
    with pytest.raises(SettingsError, match=r"=2 does not divide .*=2=1; these do: 1"):
        read_sizes(raw, num_ranks=2, layers="transformer_engine")
    for value in (0, "two"):
        with pytest.raises(SettingsError, match=r"context_parallel_size=.*whole number"):
            read_sizes({"context_parallel_size": value}, num_ranks=2, layers="transformer_engine")


def test_the_context_parallel_size_reaches_megatron(tiny_folder: TinyFolder) -> None:
    """Its own configuration has it, and so has the layout of the ranks."""
    raw = {"context_parallel_size": 2, "cp_comm_type": "a2a"}
    found = model_config.read_config(tiny_folder(), raw, num_ranks=2, layers="transformer_engine")
    assert (found.context_parallel_size, found.cp_comm_type) == (2, "a2a")
    assert (found.sizes.context, found.sizes.data, found.layers) == (2, 1, "transformer_engine")


def test_the_data_parallel_size_follows_from_the_others() -> None:
    """Eight ranks in pairs of tensor and pipeline leave two."""
    raw = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    assert read_sizes(raw, num_ranks=8).data == 2


def test_a_process_of_another_world_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence names both numbers."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SettingsError, match=r"num_ranks=2.*WORLD_SIZE=4"):
        check_world(2)


def test_common_divisors() -> None:
    """In ascending order, one included."""
    assert common_divisors([12, 8]) == [1, 2, 4]
