"""Each algorithm learns a two-armed bandit, and none from rewards that mean nothing."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from fakes.bandit_run import Answer, Server, Setup, arm

MakeRun = Callable[..., Setup]
BANDIT = {"learning_rate": 4e-3, "groups_per_step": 8, "num_steps": 25}
RECOMPUTE = {"proximal": "recompute"}
ALGORITHMS = {
    "dr_grpo": {"advantage": "dr_grpo", "denominator": "budget", "token_budget": 1},
    "rloo": {"advantage": "rloo"},
    "reinforce_pp": {"advantage": "reinforce_pp"},
    "reinforce_pp_baseline": {"advantage": "reinforce_pp_baseline"},
    "pass_at_k": {"advantage": "pass_at_k", "pass_k": 2},
    "two_passes": RECOMPUTE | {"num_epochs_per_take": 2, "num_updates_per_take": 2},
    "reward_to_go": {"advantage": "reward_to_go"},
    "ppo": {"recipe": "ppo", "critic": {"learning_rate": 1e-2}},
    "ppo_head": {"recipe": "ppo", "critic": {"kind": "head", "learning_rate": 1e-2}},
    "gspo": {"loss": "gspo"},
    "cispo": {"loss": "cispo"},
    "decoupled": RECOMPUTE,
    "token_tis": RECOMPUTE | {"correction": "token_tis"},
    "sequence_tis": RECOMPUTE | {"correction": "sequence_tis"},
    "masked_veto": RECOMPUTE
    | {"correction": "token_mis", "correction_floor": 0.5, "correction_veto": 0.01},
    "sequence_mis": RECOMPUTE | {"correction": "sequence_mis"},
    "k1": {"kl": "k1", "kl_coefficient": 0.01},
    "k2": {"kl": "k2", "kl_coefficient": 0.01},
    "k3": {"kl": "k3", "kl_coefficient": 0.01},
    "entropy": {"entropy_coefficient": 0.01},
    "overlong": {"overlong_penalty": 0.5, "overlong_max_tokens": 4, "overlong_buffer_tokens": 2},
}
TWO = BANDIT | {"num_steps": 16, "learning_rate": 8e-3, "checkpoint_every": 0}
SHORT = BANDIT | {"num_steps": 12, "learning_rate": 1.2e-2, "checkpoint_every": 0}


@pytest.mark.medium
def test_a_bandit_is_learned(setup: MakeRun, tiny_folder: Callable[..., Path]) -> None:
    """The paying arm wins; the trainer's logprobs are the server's at every step."""
    made = setup(trainer=BANDIT)
    rows = made.train()
    assert rows[0]["train/reward_mean"] < 0.65
    assert rows[-1]["train/reward_mean"] > 0.9
    assert all(row["train/logprob_gap_max"] < 1e-4 for row in rows)
    assert all(abs(row["train/ratio_mean"] - 1) < 1e-4 for row in rows)
    assert all(row["train/grad_norm"] > 0 for row in rows[:3])
    assert made.buffer.states == ["running", "finished"]
    exported = transformers.AutoModelForCausalLM.from_pretrained(made.run.dir / "hf")
    with torch.no_grad():
        probabilities = exported(torch.tensor([[1, 2]])).logits[0, -1].softmax(-1)
    assert probabilities[:200].sum() > 0.9


@pytest.mark.medium
def test_shuffled_rewards_teach_nothing(setup: MakeRun) -> None:
    """With rewards that do not depend on the action the arm's share stays what it was."""
    generator = np.random.default_rng(7)
    made = setup(reward_of=lambda token: float(generator.integers(0, 2)), trainer=BANDIT)
    made.train()
    assert 0.25 < made.server.share_of_the_paying_arm() < 0.75


@pytest.mark.medium
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_learns_the_bandit(name: str, setup: MakeRun) -> None:
    """The paying arm wins, and the first ratio of every step is 1."""
    made = setup(trainer=SHORT | ALGORITHMS[name])
    rows = made.train()
    assert rows[0]["train/reward_mean"] < 0.65
    assert made.server.share_of_the_paying_arm() > 0.75
    trained = [row for row in rows if row["train/samples"]]
    assert all(abs(row["train/ratio_mean"] - 1) < 1e-4 for row in trained)
    for row in trained:
        assert row.get("train/proximal_ratio_max", 1.0) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_algorithm_learns_from_shuffled_rewards(name: str, setup: MakeRun) -> None:
    """Rewards that do not depend on the action leave the arm's share where it was."""
    generator = np.random.default_rng(7)
    made = setup(
        reward_of=lambda token: float(generator.integers(0, 2)),
        trainer=SHORT | ALGORITHMS[name],
    )
    made.train()
    assert 0.2 < made.server.share_of_the_paying_arm() < 0.8


@pytest.mark.medium
def test_a_strong_kl_term_keeps_the_policy_where_it_was(setup: MakeRun) -> None:
    """What is learned without it is not learned with it, in the reward or in the loss."""
    for kind, coefficient in (("k1", 5.0), ("k2", 5.0), ("k3", 5.0)):
        made = setup(trainer=SHORT | {"kl": kind, "kl_coefficient": coefficient, "resume": False})
        rows = made.train()
        assert made.server.share_of_the_paying_arm() < 0.75, kind
        assert rows[0]["train/kl"] == pytest.approx(0.0, abs=1e-5)
        assert all(row["train/kl"] is None or abs(row["train/kl"]) < 0.5 for row in rows)


MAX_LENGTH = 6
"""Of the first of two turns, which ends at the first even token."""


def two_turns(server: Server, *, pays_for_length: bool = False) -> tuple[list[Answer], float]:
    """The policy decides how long its first answer is; the reward is for the arm that its second,
    of one token, pulls, or for the length, where that is asked for."""
    ids, logprobs = [1, 2], []
    while len(logprobs) < MAX_LENGTH and (not logprobs or ids[-1] % 2):
        token, logprob = server.sample(ids)
        ids.append(token)
        logprobs.append(logprob)
    first = ([1, 2], ids[2:], list(logprobs))
    token, logprob = server.sample([*ids, 7])
    reward = len(logprobs) / MAX_LENGTH if pays_for_length else arm(token)
    return [first, ([7], [token], [logprob])], reward


def lengths_of(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Mean tokens of an episode over the first and over the last quarter of the steps."""
    means = [row["train/generated_tokens_mean"] for row in rows]
    quarter = len(means) // 4
    return float(np.mean(means[:quarter])), float(np.mean(means[-quarter:]))


TWO_TURNS = {
    "grpo": {"recipe": "grpo", "kl": "none"},
    "dr_grpo": {"recipe": "dr_grpo"},
    "dapo": {"recipe": "dapo", "overlong_penalty": 0},
    "gspo": {"recipe": "gspo"},
    "cispo": {"recipe": "cispo"},
    "rloo": {"recipe": "rloo", "kl": "none"},
    "reward_to_go": {"advantage": "reward_to_go", "denominator": "episodes"},
    "ppo": {"recipe": "ppo", "critic": {"learning_rate": 1e-2}},
    "ppo_over_turns": {"recipe": "ppo", "critic": {"learning_rate": 1e-2, "over": "turns"}},
    "ppo_head": {
        "recipe": "ppo",
        "critic": {"kind": "head", "learning_rate": 1e-2, "value_coefficient": 0.1},
    },
    "geometric_mis": RECOMPUTE
    | {"correction": "geometric_mis", "correction_floor": 0.5, "num_updates_per_take": 2},
}


@pytest.mark.medium
@pytest.mark.parametrize("name", TWO_TURNS)
def test_length_does_not_drift_where_it_earns_nothing(name: str, setup: MakeRun) -> None:
    """Two turns, lengths of the policy's choice, a reward that does not depend on them: the arm is
    learned and answers stay as long as they were."""
    made = setup(trainer=TWO | TWO_TURNS[name])
    made.buffer.episode = two_turns
    rows = made.train()
    first, last = lengths_of(rows)
    assert rows[-1]["train/reward_mean"] > 0.75 > 0.65 > rows[0]["train/reward_mean"]
    assert abs(last - first) < 0.6


@pytest.mark.medium
def test_a_drift_in_length_is_seen(setup: MakeRun) -> None:
    """The same where length is what pays: answers grow by more than what counts as no drift."""
    made = setup(trainer=TWO | TWO_TURNS["dr_grpo"])
    made.buffer.episode = functools.partial(two_turns, pays_for_length=True)
    first, last = lengths_of(made.train())
    assert last - first > 1.5


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_at_learning_rate_zero_nothing_moves(setup: Callable[..., Setup], optimizer: str) -> None:
    """The control of a run: every publish brings the weights that it began with, bit for bit, and
    gap and share stay where they are. Decay of the rate and of weights change nothing."""
    decay = {"lr_decay": "linear", "warmup_steps": 2, "weight_decay": 0.1}
    made = setup(
        trainer={"learning_rate": 0, "num_steps": 3, "groups_per_step": 8, "optimizer": optimizer}
        | decay
    )
    before = [one.detach().clone() for one in made.policy.model.parameters()]
    shares: list[float] = []
    made.server.on_publish = lambda version: shares.append(made.server.share_of_the_paying_arm())
    rows = made.train()
    after = list(made.policy.model.parameters())
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert len(set(shares)) == 1
    assert all(row["train/grad_norm"] > 0 for row in rows)
    assert all(row["train/logprob_gap_max"] < 1e-5 for row in rows)
