"""Devices, and what differs where there is one; all of it shown on a CPU."""

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import TrainerSettings
from outloop.engine.machine.visible_gpus import Gpu
from outloop.engine.train.megatron.device import (
    choose_device,
    gpu_number,
    limit_connections,
    set_precision,
)
from outloop.engine.train.megatron.model_and_optimizer import Policy, optimizer_parts
from outloop.engine.train.megatron.optimizer_state import put_moments
from outloop.engine.train.step.policy_update import logit_chunks


@pytest.mark.parametrize(
    ("wanted", "num_gpus", "chosen", "number"),
    [
        ("auto", 0, "cpu", None),
        ("auto", 1, "cuda", None),
        ("auto", 8, "cuda", None),
        ("cpu", 0, "cpu", None),
        ("cuda", 1, "cuda", None),
        ("cuda:1", 2, "cuda:1", 1),
    ],
)
def test_the_device_is_what_is_there(
    wanted: str, num_gpus: int, chosen: str, number: int | None
) -> None:
    """By default CUDA where it is; a device that is named is that device."""
    assert TrainerSettings().device == "auto"
    assert choose_device(wanted, num_gpus=num_gpus) == chosen
    assert gpu_number(chosen) == number


@pytest.mark.parametrize(
    ("wanted", "num_gpus", "num_ranks", "sentence"),
    [
        ("cuda", 0, 1, "offers 'cpu' only; set trainer.device = \"auto\""),
        ("cpu", 1, 1, "hide them from the trainer with CUDA_VISIBLE_DEVICES"),
        ("cuda:2", 2, 1, 'sees 2 CUDA device.* "cuda:0" to "cuda:1" are allowed'),
        ("cuda:1", 2, 2, "one device for trainer.num_ranks=2; .* trainer.gpus"),
        ("tpu", 2, 1, "trainer.device='tpu'; \"auto\""),
    ],
)
def test_a_device_that_cannot_be_had_is_refused(
    wanted: str, num_gpus: int, num_ranks: int, sentence: str
) -> None:
    """With what to change."""
    with pytest.raises(SettingsError, match=sentence):
        choose_device(wanted, num_gpus=num_gpus, num_ranks=num_ranks)


def test_float32_takes_tensor_cores_on_a_gpu_only() -> None:
    """Which rounds; on a CPU nothing changes."""
    before = torch.get_float32_matmul_precision()
    try:
        set_precision("cpu")
        assert torch.get_float32_matmul_precision() == before
        set_precision("cuda:1")
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("device", "num_chunks"), [("cpu", 149), ("cuda", 10)])
def test_a_gpu_gets_larger_chunks_of_logits(device: str, num_chunks: int) -> None:
    """16,384 tokens of Qwen3's vocabulary: each chunk writes a gradient as large as the head."""
    model: Any = SimpleNamespace(
        config=SimpleNamespace(vocab_size=151936, tensor_model_parallel_size=1),
        output_weight=SimpleNamespace(device=torch.device(device)),
    )
    chunks = list(logit_chunks(16384, model))
    assert (chunks[0].start, chunks[-1].stop, len(chunks)) == (0, 16384, num_chunks)


_ROUTER_WITH_CUDA = """
import warnings
import torch
torch.cuda.is_available = lambda: True
from outloop.engine.train.megatron import cpu_backend
warnings.simplefilter("ignore")
cpu_backend.install()
from megatron.core.transformer.moe import moe_utils
rows, weight = torch.randn(3, 8), torch.randn(4, 8)
logits = moe_utils.router_gating_linear(rows, weight, None, torch.float32)
assert torch.allclose(logits, rows @ weight.t(), atol=1e-6)
"""


@pytest.mark.medium
def test_experts_are_routed_on_a_gpu_without_transformer_engine() -> None:
    """megatron-core 0.16.1 uses a name of Transformer Engine in every router, defined or not."""
    answer = subprocess.run(
        [sys.executable, "-c", _ROUTER_WITH_CUDA], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr


def test_adam_updates_in_one_pass(make_policy: Callable[..., Policy]) -> None:
    """On every device: in several passes torch makes temporaries as large as the moments."""
    policy = make_policy("qwen3_moe")
    groups = [g for part in optimizer_parts(policy.optimizer) for g in part.optimizer.param_groups]
    assert len(groups) > 1
    assert all(group["fused"] for group in groups)


class _FusedAdam(torch.optim.Optimizer):
    """Counts as Transformer Engine's FusedAdam does: in the group, from its first step on."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for parameter in group["params"]:
                state, count = self.state[parameter], group["step"]
                if not state:
                    state |= {n: torch.zeros_like(parameter) for n in ("exp_avg", "exp_avg_sq")}
                state["exp_avg"].lerp_(parameter.grad, 1 - first)
                state["exp_avg_sq"].lerp_(parameter.grad.square(), 1 - second)
                mean = state["exp_avg"] / (1 - first**count)
                size = (state["exp_avg_sq"] / (1 - second**count)).sqrt()
                parameter -= group["lr"] * mean / (size + group["eps"])


def test_a_resumed_fused_adam_counts_on() -> None:
    """The step after a resume is the step that an uninterrupted optimizer makes."""

    def made() -> tuple[torch.nn.Linear, _FusedAdam]:
        torch.manual_seed(3)
        model = torch.nn.Linear(4, 3, bias=False)
        return model, _FusedAdam([model.weight])

    model, optimizer = made()
    for _ in range(10):
        model.weight.grad = torch.ones(3, 4)
        optimizer.step()
    fresh, resumed = made()
    fresh.load_state_dict(model.state_dict())
    part = SimpleNamespace(
        optimizer=resumed, get_parameters=lambda: resumed.param_groups[0]["params"]
    )
    moments = {f"weight.{name}": t.clone() for name, t in optimizer.state[model.weight].items()}
    policy: Any = SimpleNamespace(model=fresh, optimizer=part)
    put_moments(policy, moments, num_updates=10)
    for weight, each in ((model.weight, optimizer), (fresh.weight, resumed)):
        weight.grad = torch.ones(3, 4)
        each.step()
    torch.testing.assert_close(fresh.weight, model.weight, rtol=0, atol=0)


HOPPER, BLACKWELL = Gpu(id="GPU-0", generation=9), Gpu(id="GPU-0", generation=10)
UNKNOWN = Gpu(id="GPU-0")


@pytest.mark.parametrize(
    ("megatron", "gpu", "before", "after"),
    [
        ({"tensor_model_parallel_size": 2}, HOPPER, None, "1"),
        ({"context_parallel_size": 2}, HOPPER, None, "1"),
        ({"tensor_model_parallel_size": 2}, Gpu(id="GPU-0", generation=8), None, "1"),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, BLACKWELL, None, None),
        ({"tensor_model_parallel_size": 2}, UNKNOWN, None, None),
        ({"tensor_model_parallel_size": 2}, HOPPER, "8", "8"),
        ({"tensor_model_parallel_size": 2}, HOPPER, "", ""),
        (
            {"tensor_model_parallel_size": 2, "overlap_moe_expert_parallel_comm": True},
            HOPPER,
            None,
            None,
        ),
        ({"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, HOPPER, None, None),
        ({}, HOPPER, None, None),
    ],
)
def test_megatrons_layers_get_the_one_queue_that_they_rely_on(
    megatron: dict[str, Any], gpu: Gpu, before: str | None, after: str | None
) -> None:
    """Tensor and context parallelism up to Hopper; what a user exported stays."""
    trainer = TrainerSettings(megatron=megatron)
    environment = {} if before is None else {"CUDA_DEVICE_MAX_CONNECTIONS": before}
    limit_connections(trainer, environment=environment, gpus=lambda: (gpu, gpu))
    assert environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == after


def test_ranks_on_a_cpu_ask_no_driver() -> None:
    """Nothing is set, and the list of GPUs is not read."""
    trainer = TrainerSettings(device="cpu", megatron={"tensor_model_parallel_size": 2})
    environment: dict[str, str] = {}
    limit_connections(trainer, environment=environment, gpus=lambda: pytest.fail("was asked"))
    assert environment == {}
