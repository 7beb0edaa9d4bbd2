"""A critic that is a head on the policy: what it leaves alone, whole runs, checkpoints."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors import safe_open

from fakes.bandit_run import FAST, Setup
from outloop.buffer.errors import UpdateRefused
from outloop.engine.train.checkpoint.checkpoint_format import latest_checkpoint
from outloop.engine.train.megatron.model_and_optimizer import Policy

MakeRun = Callable[..., Setup]


def with_a_head(**more: Any) -> dict[str, Any]:
    """Settings of a short run."""
    critic = {"kind": "head", "learning_rate": 1e-2} | more.pop("critic", {})
    return FAST | {"recipe": "ppo", "num_steps": 3, "critic": critic} | more


def weights(policy: Policy) -> list[torch.Tensor]:
    """Copies."""
    return [parameter.detach().clone() for parameter in policy.model.parameters()]


@pytest.mark.medium
def test_a_head_trained_alone_leaves_the_policy(setup: MakeRun) -> None:
    """For steps_alone steps, whatever value_coefficient says; then both learn."""
    made = setup(trainer=with_a_head(critic={"steps_alone": 2, "value_coefficient": 1.0}))
    seen: list[list[torch.Tensor]] = []
    made.buffer.on_take = lambda: seen.append(weights(made.policy))
    rows = made.train()
    seen.append(weights(made.policy))
    is_same = [
        all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        for before, after in itertools.pairwise(seen)
    ]
    assert is_same[:2] == [True, True]
    assert not is_same[-1]
    assert [row["train/critic_learning_rate"] for row in rows] == [1e-2] * 3
    assert all(row["train/value_loss"] > 0 for row in rows)
    assert rows[0]["train/value_mean"] == 0.0
    assert rows[2]["train/value_mean"] != 0.0


@pytest.mark.medium
def test_the_value_loss_reaches_the_policy_by_its_coefficient_alone(setup: MakeRun) -> None:
    """With 0 the second update's gradient is what it is for a head that learns nothing."""
    norms = {}
    for name, critic in (
        ("detached", {"learning_rate": 1e-9}),
        ("still", {"learning_rate": 1e-9, "value_coefficient": 1e-9}),
        ("attached", {"value_coefficient": 10.0}),
    ):
        rows = setup(trainer=with_a_head(critic=critic, resume=False)).train()
        norms[name] = [row["train/grad_norm"] for row in rows[-3:-1]]
    # A head of zeros gives no gradient.
    assert norms["attached"][0] == norms["detached"][0]
    assert norms["still"] == pytest.approx(norms["detached"], rel=1e-6)
    assert norms["attached"][1] > 1.5 * norms["detached"][1]


@pytest.mark.medium
def test_a_run_goes_on_with_its_head(setup: MakeRun) -> None:
    """Weights, moments and schedule are in the checkpoint, and nothing of it in what is
    published."""
    made = setup(trainer=with_a_head(checkpoint_every=1, num_steps=4))
    made.buffer.stop_after = 2
    rows = made.train()
    found = latest_checkpoint(made.run.dir / "checkpoints")
    assert found is not None
    assert found.critic == {"kind": "head", "hidden_size": made.policy.config.hidden_size}
    assert found.num_critic_updates == len(rows) == 2
    names = [spec.name for spec in made.ranks.specs]
    again = setup(trainer=with_a_head(checkpoint_every=1, num_steps=4)).train()
    assert len(again) == 4
    # A head that began anew would expect nothing.
    assert again[2]["train/value_mean"] != 0.0
    with safe_open(made.run.dir / "hf" / "model.safetensors", "pt") as folder:
        assert sorted(folder.keys()) == sorted(names)
    assert not any("critic" in name or "value" in name for name in names)


@pytest.mark.medium
def test_a_refused_update_leaves_the_head(setup: MakeRun) -> None:
    """A value loss too large for a gradient at step 2: neither head nor policy is touched."""
    critic = {"normalizes_advantages": False, "value_coefficient": 1e30}
    made = setup(trainer=with_a_head(critic=critic))
    before: list[torch.Tensor] = []

    def reward_of(token: int) -> float:
        if made.policy.scheduler.num_steps == 1:
            before[:] = weights(made.policy)
        return 1e12

    made.buffer.reward_of = reward_of
    with pytest.raises(UpdateRefused, match="step 2: grad_norm"):
        made.train()
    after = weights(made.policy)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
