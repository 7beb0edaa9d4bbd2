"""Muon for the layers' matrices, Adam for the rest, against float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import TrainerSettings, build_settings
from outloop.engine.train.data.samples import Sample
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.megatron.model_and_optimizer import Policy
from outloop.engine.train.megatron.muon import check_muon
from outloop.engine.train.step.policy_update import rl_update

MakePolicy = Callable[..., Policy]
MakeSamples = Callable[..., list[Sample]]
RATE, DECAY = 1e-2, 0.1
A, B, C = 3.4445, -4.7750, 2.0315
MAX_ERROR = 0.06
"""Of an update, relative, by Frobenius' norm: torch makes it orthogonal in bfloat16, whose rounding
grows where a singular value is small (0.03 was seen)."""


def orthogonal(matrix: torch.Tensor, *, steps: int = 5) -> torch.Tensor:
    """Newton-Schulz by the quintic of the source, float64."""
    x = matrix.double()
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    x = x / x.norm()
    for _ in range(steps):
        gram = x @ x.T
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def weights_of(policy: Policy) -> dict[str, torch.Tensor]:
    """Copies in float64."""
    return {n: p.detach().double().clone() for n, p in policy.model.named_parameters()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_three_updates_follow_the_formulas(
    dtype: str, make_policy: MakePolicy, make_samples: MakeSamples
) -> None:
    """Every parameter by its own: matrices of layers are made orthogonal, with decoupled decay and
    a step of 0.2 times the root of the longer side; embeddings and norms are Adam's."""
    options = {"optimizer": "muon", "learning_rate": RATE, "weight_decay": DECAY, "dtype": dtype}
    policy = make_policy(max_grad_norm=1e9, **options)
    trainer = TrainerSettings(max_grad_norm=1e9)
    momentum = {name: torch.zeros_like(value) for name, value in weights_of(policy).items()}
    first, second = dict(momentum), dict(momentum)
    num_by_muon = 0
    for step in (1, 2, 3):
        before = weights_of(policy)
        rl_update(
            policy,
            TrainBatch.of(make_samples(6, seed=step)),
            trainer,
            policy_version=0,
            on_microbatch=lambda: None,
        )
        for name, parameter in policy.model.named_parameters():
            gradient = parameter.main_grad.double()
            found = parameter.detach().double() - before[name]
            if name.startswith("decoder.") and parameter.dim() == 2:
                num_by_muon += 1
                momentum[name] = 0.95 * momentum[name] + 0.05 * gradient
                direction = orthogonal(0.05 * gradient + 0.95 * momentum[name])
                wanted = -RATE * 0.2 * max(parameter.shape) ** 0.5 * direction
                wanted -= RATE * DECAY * before[name]
                limit = MAX_ERROR
            else:
                first[name] = 0.9 * first[name] + 0.1 * gradient
                second[name] = 0.999 * second[name] + 0.001 * gradient**2
                scale = (second[name] / (1 - 0.999**step)).sqrt() + 1e-8
                wanted = -RATE * (first[name] / (1 - 0.9**step)) / scale
                decays = parameter.dim() == 2
                wanted -= RATE * DECAY * before[name] * decays
                limit = 1e-3
            if dtype == "bfloat16":
                # Weights are rounded to 8 bits of mantissa, before and after.
                limit += float(before[name].norm() / wanted.norm()) * 2**-8
            assert (found - wanted).norm() <= limit * wanted.norm(), (step, name)
    assert num_by_muon == 3 * 2 * 4, "queries with keys and values, output, gate with up, down"


def direction_after(
    gradients: list[torch.Tensor], *, momentum: float = 0.95, nesterov: bool = True, steps: int = 5
) -> torch.Tensor:
    """Of the last of some updates."""
    buffer = torch.zeros_like(gradients[0])
    for gradient in gradients:
        buffer = momentum * buffer + (1 - momentum) * gradient
    last = (1 - momentum) * gradients[-1] + momentum * buffer if nesterov else buffer
    return orthogonal(last, steps=steps)


@pytest.mark.parametrize("changed", [{"momentum": 0.8}, {"nesterov": False}, {"steps": 4}])
def test_other_constants_are_another_update(changed: dict[str, Any]) -> None:
    """By more than the tolerance above, so that it tells them apart."""
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(24, 40, generator=generator).double() for _ in range(3)]
    exact = direction_after(gradients)
    assert (direction_after(gradients, **changed) - exact).norm() > 1.5 * MAX_ERROR * exact.norm()


@pytest.mark.parametrize(
    ("split", "sentence"),
    [
        ({"tensor": 2}, "tensor_model_parallel_size=2"),
        ({"has_experts": True}, "a mixture of experts"),
        ({"is_sharded": True}, "use_distributed_optimizer=true"),
    ],
)
def test_what_splits_matrices_is_refused(split: dict[str, object], sentence: str) -> None:
    """With what is allowed instead."""
    whole: dict[str, object] = {"tensor": 1, "has_experts": False, "is_sharded": False}
    check_muon(**whole)
    with pytest.raises(SettingsError, match=sentence):
        check_muon(**whole | split)


def test_its_momentum_alone_has_no_effect() -> None:
    """With Adam it is refused."""
    tree = {"model": {"path": "."}, "trainer": {"muon_momentum": 0.9}}
    with pytest.raises(SettingsError, match='it needs trainer.optimizer = "muon"'):
        build_settings(tree, source="test")
