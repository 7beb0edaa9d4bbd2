"""The RL loop with a reference, recomputed logprobs and a loss of one's own."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from fakes.bandit_run import FAST, Setup
from fakes.families import make_family
from outloop.buffer.errors import SettingsError
from outloop.engine.train.algorithms.kl import adapted_coefficient
from outloop.engine.train.step.reference_model import content_hash

MakeRun = Callable[..., Setup]
RECOMPUTE = {"proximal": "recompute"}


@pytest.mark.medium
def test_the_second_update_of_a_take_is_corrected_for_the_first(
    setup: MakeRun,
) -> None:
    """Both updates take their ratio to the weights before the first.

    Recomputed before each update, the second's clip would start again from its own weights: a range
    so narrow that one update leaves it shows that it does not.
    """
    chosen = RECOMPUTE | {"correction": "token_tis", "num_updates_per_take": 2}
    narrow = {"clip_low": 1e-4, "clip_high": 1e-4}
    rows = setup(trainer=FAST | {"num_steps": 2} | chosen | narrow).train()
    for row in rows:
        assert row["train/clip_share"] == 0.0
        assert row["train/last_clip_share"] > 0.1
        assert row["train/last_ratio_max"] > 1.0 + 1e-4
        assert row["train/proximal_ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert row["train/correction_ratio_max"] == pytest.approx(1.0, abs=1e-3)
        assert row["train/correction_masked_share"] == 0.0


@pytest.mark.medium
def test_the_reference_is_pinned_across_a_resume(
    setup: MakeRun, tmp_path: Path, tiny_folder: Callable[..., Path]
) -> None:
    """The checkpoint names its content; another folder's content is refused."""
    chosen = {"kl": "k3", "num_steps": 2}
    first = setup(trainer=FAST | chosen)
    first.train()
    state = json.loads((first.run.dir / "checkpoints/step_2/state.json").read_text())
    assert state["reference_hash"] == content_hash(tiny_folder())
    # A run that leaves the KL term out for a while keeps the pin.
    setup(trainer=FAST | {"num_steps": 3}).train()
    again = setup(trainer=FAST | chosen | {"num_steps": 4})
    state_file = again.run.dir / "checkpoints/step_3/state.json"
    state = json.loads(state_file.read_text())
    assert state["reference_hash"] == content_hash(tiny_folder())
    forged = json.dumps(state | {"reference_hash": "0" * 64}, indent=1)
    state_file.write_text(forged)
    complete = state_file.with_name("COMPLETE")
    sizes = json.loads(complete.read_text()) | {"state.json": len(forged)}
    complete.write_text(json.dumps(sizes))
    with pytest.raises(SettingsError, match="pinned to the reference model 000000000000"):
        again.train()


@pytest.mark.medium
def test_the_reference_may_be_another_model(
    setup: MakeRun, tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Of another shape and family; the first step is at a distance from it, and it is pinned."""
    make_family("llama", tmp_path / "other", is_tied=False, hidden_size=32, head_dim=8)
    chosen = {"kl": "k3", "num_steps": 1, "reference_path": tmp_path / "other"}
    made = setup(trainer=FAST | chosen)
    (row,) = made.train()
    assert abs(row["train/kl"]) > 1e-3
    state = json.loads((made.run.dir / "checkpoints/step_1/state.json").read_text())
    assert state["reference_hash"] == content_hash(tmp_path / "other")


@pytest.mark.medium
def test_the_weight_of_the_kl_follows_its_target(
    setup: MakeRun, tiny_folder: Callable[..., Path]
) -> None:
    """Down by at most 2% a step while the policy is near its reference, up while it is far; a
    resumed run goes on where it was."""
    chosen = {"kl": "k3", "kl_coefficient": 0.1, "kl_target": 1e3, "num_steps": 2}
    setup(trainer=FAST | chosen).train()
    rows = setup(trainer=FAST | chosen | {"num_steps": 3}).train()
    weights = [row["train/kl_coefficient"] for row in rows]
    assert weights == pytest.approx([0.1, 0.1 * 0.98, 0.1 * 0.98**2])
    far = {"kl_target": 1e-9, "learning_rate": 1e-2, "num_steps": 4, "resume": False}
    rows = setup(trainer=FAST | chosen | far).train()[3:]
    measured = [row["train/kl"] for row in rows]
    weights = [row["train/kl_coefficient"] for row in rows]
    for kl, (before, after) in zip(measured, pairwise(weights), strict=False):
        assert after == pytest.approx(adapted_coefficient(before, kl, target=1e-9))
    assert max(after / before for before, after in pairwise(weights)) == pytest.approx(1.02)


@pytest.mark.medium
def test_an_own_loss_takes_the_place_of_the_built_in_one(
    setup: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is zero everywhere leaves the weights as they were."""
    (tmp_path / "own_zero.py").write_text(
        "def zero(inputs):\n    return 0.0 * inputs.policy_logprobs\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    rows = setup(trainer=FAST | {"num_steps": 1, "loss_path": "own_zero:zero"}).train()
    assert rows[0]["train/samples"] > 0
    assert rows[0]["train/grad_norm"] == 0.0


@pytest.fixture
def zero_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A loss that is zero everywhere, so that the terms beside it are all of a step's loss."""
    (tmp_path / "own_nothing.py").write_text(
        "def zero(inputs):\n    return 0.0 * inputs.policy_logprobs\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "own_nothing:zero"


def test_a_weight_that_follows_no_target_is_that_of_the_settings(setup: MakeRun) -> None:
    """A run that resumes without the target takes the settings' weight, not the moved one of the
    checkpoint."""
    moving = {"kl": "k3", "kl_coefficient": 0.1, "kl_target": 1e3, "num_steps": 2}
    bonus = {"entropy_coefficient": 0.1, "entropy_target": 1e-3}
    setup(trainer=FAST | moving | bonus).train()
    still = {"kl": "k3", "kl_coefficient": 0.5, "num_steps": 3, "entropy_coefficient": 0.3}
    made = setup(trainer=FAST | still)
    assert made.train()[-1]["train/kl_coefficient"] == 0.5
    # Nor does its own checkpoint give it another one.
    setup(trainer=FAST | still | {"num_steps": 4, "entropy_target": 50.0}).train()
    rows = setup(trainer=FAST | still | {"num_steps": 5, "entropy_target": 50.0}).train()
    weights = [row["train/entropy_coefficient"] for row in rows[3:]]
    assert weights[0] == 0.3
    assert weights[1] > 0.3


def test_a_step_reports_the_critic_of_its_first_update(setup: MakeRun) -> None:
    """As the policy's: the first update's numbers are of values from before the step."""
    critic = {"learning_rate": 1e-2, "warmup_steps": 8}
    chosen = {"recipe": "ppo", "critic": critic, "num_updates_per_take": 2, "num_steps": 2}
    rows = setup(trainer=FAST | chosen).train()
    # Two updates a step, each at a higher rate than the one before.
    first, third = (row["train/critic_learning_rate"] for row in rows)
    assert third == pytest.approx(3 * first)


def test_a_steps_loss_has_the_weights_that_its_row_says(
    setup: MakeRun, tmp_path: Path, zero_loss: str
) -> None:
    """The moved weight of the KL, and that of the entropy bonus, are those of the update."""
    make_family("llama", tmp_path / "other", is_tied=False, hidden_size=32, head_dim=8)
    alone = {"loss_path": zero_loss, "num_steps": 4, "learning_rate": 1e-12, "resume": False}
    far = {"kl": "k2", "kl_coefficient": 1.0, "reference_path": tmp_path / "other"}
    # The policy hardly moves, so that both runs sample the same tokens.
    steady = setup(trainer=FAST | alone | far).train()
    moved = setup(trainer=FAST | alone | far | {"kl_target": 1e9}).train()[4:]
    weights = [row["train/kl_coefficient"] for row in moved]
    assert weights == pytest.approx([1.0, 0.98, 0.98**2, 0.98**3])
    shares = [row["train/loss"] / one["train/loss"] for row, one in zip(moved, steady, strict=True)]
    assert shares == pytest.approx(weights, rel=1e-3)
    bonus = {"entropy_coefficient": 1.0, "entropy_target": 1e-3}
    rows = setup(trainer=FAST | alone | bonus).train()[8:]
    for row in rows:
        paid = row["train/entropy_coefficient"] * row["train/entropy"]
        assert row["train/loss"] == pytest.approx(-paid, rel=1e-4)
    assert rows[-1]["train/entropy_coefficient"] == pytest.approx(0.98**3)


def test_a_kl_in_the_reward_is_paid_by_every_episode(setup: MakeRun, tmp_path: Path) -> None:
    """k1 asks the reference as the KL terms of the loss do; each episode pays its sum."""
    make_family("llama", tmp_path / "other", is_tied=False, hidden_size=32, head_dim=8)
    chosen = {"kl": "k1", "kl_coefficient": 0.5, "advantage": "rloo", "num_steps": 1}
    far = {"reference_path": tmp_path / "other"}
    (row,) = setup(trainer=FAST | chosen | far).train()
    # One token an episode.
    assert abs(row["train/kl"]) > 1e-3
    assert row["train/kl_penalty_mean"] == pytest.approx(0.5 * row["train/kl"])


def test_proximal_logprobs_are_those_before_every_pass(setup: MakeRun) -> None:
    """A take that is trained in several passes recomputes each row's logprobs once."""
    chosen = RECOMPUTE | {"num_epochs_per_take": 3, "num_updates_per_take": 2}
    for row in setup(trainer=FAST | {"num_steps": 2} | chosen).train():
        assert row["train/proximal_ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert row["train/proximal_ratio_mean"] == pytest.approx(1.0, abs=1e-5)
