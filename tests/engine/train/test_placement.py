"""Weights, gradients and optimizer state leave the device and come back."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fakes.bandit_run import FAST, Setup
from outloop.buffer.settings.trainer import TrainerSettings
from outloop.engine.publish.verification.checksum import tensor_checksum
from outloop.engine.train.data.samples import Sample
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.megatron.export_weights import Exports
from outloop.engine.train.megatron.model_and_optimizer import Policy, optimizer_parts
from outloop.engine.train.megatron.offload import Offload
from outloop.engine.train.step.policy_update import rl_update

MakePolicy = Callable[..., Policy]
MakeSamples = Callable[..., list[Sample]]


def update(policy: Policy, samples: list[Sample]) -> None:
    """One RL update at version 0."""
    batch = TrainBatch.of(samples)
    rl_update(policy, batch, TrainerSettings(), policy_version=0, on_microbatch=lambda: None)


def tensors(policy: Policy) -> Iterator[torch.Tensor]:
    """Weights and Adam's two moments."""
    yield from (parameter.detach() for parameter in policy.model.parameters())
    yield from moments(policy)


def moments(policy: Policy) -> Iterator[torch.Tensor]:
    """Adam's two."""
    for part in optimizer_parts(policy.optimizer):
        optimizer = part.optimizer
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def test_everything_leaves_and_comes_back_bit_equal(
    make_policy: MakePolicy, make_samples: MakeSamples
) -> None:
    """While away no storage holds a byte and the model cannot run; back, nothing has changed."""
    policy, samples = make_policy(), make_samples(5)
    update(policy, samples)
    before = [tensor.clone() for tensor in tensors(policy)]
    assert any(tensor.abs().max() > 0 for tensor in before)
    addresses = [id(parameter) for parameter in policy.model.parameters()]
    placement = Offload(policy, is_colocated=True)
    placement.leave()
    assert placement.is_away
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors(policy))
    placement.leave()
    placement.come_back()
    assert not placement.is_away
    after = list(tensors(policy))
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert addresses == [id(parameter) for parameter in policy.model.parameters()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_were_hashed_can_leave(dtype: str, make_policy: MakePolicy) -> None:
    """Handing memory to numpy as torch does fixes its size, and a publish does so with weights."""
    policy = make_policy(dtype=dtype)
    exports = Exports(policy.model)
    for tensor in exports.gather([spec.name for spec in exports.specs]):
        tensor_checksum(tensor)
        tensor_checksum(tensor, "sha256")
    placement = Offload(policy, is_colocated=True)
    placement.leave()
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors(policy))
    placement.come_back()


def test_weights_alone_stay_for_a_publish_and_come_back_for_another(
    make_policy: MakePolicy, make_samples: MakeSamples
) -> None:
    """Weights are readable while the optimizer's state is away; the rest comes back after them."""
    policy, samples = make_policy(dtype="bfloat16"), make_samples(5)
    update(policy, samples)
    update(policy, samples)
    before = [tensor.clone() for tensor in (*policy.model.parameters(), *moments(policy))]
    placement = Offload(policy, is_colocated=True)
    placement.leave(keeps_weights=True)
    assert not placement.is_away
    assert placement.has_left
    assert all(t.untyped_storage().nbytes() for t in policy.model.parameters())
    assert all(t.untyped_storage().nbytes() == 0 for t in moments(policy))
    placement.leave()
    assert placement.is_away
    placement.come_back(weights_only=True)
    assert not placement.is_away
    assert placement.has_left
    placement.come_back()
    after = [*policy.model.parameters(), *moments(policy)]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    update(policy, samples)


def test_gradients_come_back_as_zeros(make_policy: MakePolicy, make_samples: MakeSamples) -> None:
    """They are not copied: an update begins with zeros."""
    policy = make_policy()
    update(policy, make_samples(5))
    gradients = [parameter.main_grad for parameter in policy.model.parameters()]
    assert any(gradient.abs().max() > 0 for gradient in gradients)
    placement = Offload(policy, is_colocated=True)
    placement.leave()
    assert all(gradient.untyped_storage().nbytes() == 0 for gradient in gradients)
    placement.come_back()
    assert all(gradient.abs().max() == 0 for gradient in gradients)


def test_without_colocation_nothing_leaves(make_policy: MakePolicy) -> None:
    """The same calls do nothing."""
    policy = make_policy()
    placement = Offload(policy, is_colocated=False)
    placement.leave()
    assert not placement.is_away
    assert all(parameter.untyped_storage().nbytes() for parameter in policy.model.parameters())


@pytest.mark.medium
@pytest.mark.parametrize("kl", ["none", "k3"])
def test_a_colocated_loop_gives_the_weights_of_another(
    kl: str, setup: Callable[..., Setup]
) -> None:
    """While groups are awaited the device is empty, reference included; the run ends the same."""
    ends: list[list[torch.Tensor]] = []
    for is_colocated in (False, True):
        chosen: dict[str, Any] = {"is_colocated": is_colocated, "resume": False, "kl": kl}
        made = setup(trainer=FAST | {"num_steps": 3, "checkpoint_every": 2} | chosen)
        seen: list[int] = []

        def note_size(made: Setup = made, seen: list[int] = seen) -> None:
            parameters = made.policy.model.parameters()
            seen.append(sum(parameter.untyped_storage().nbytes() for parameter in parameters))

        made.buffer.on_take = note_size
        made.buffer.joins_at = 2
        made.train()
        assert len(seen) == 3
        assert all((size == 0) == is_colocated for size in seen)
        made.ranks.come_back()
        ends.append([parameter.detach().clone() for parameter in made.policy.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
