"""The user's own advantage and loss: found, checked before the start, used."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings
from outloop.engine.train.algorithms.advantages import take_advantages
from outloop.engine.train.algorithms.losses import ppo_clip
from outloop.engine.train.algorithms.user_functions import advantage_of, check_custom, loss_of
from outloop.engine.train.data.samples import Sample
from outloop.engine.train.main import check_settings
from outloop.engine.train.megatron.model_and_optimizer import Policy
from outloop.engine.train.step.policy_update import rl_update

CODE = """
import torch

def best_of(rewards):
    return (rewards == rewards.max()) - 0.5

def short(rewards):
    return rewards[:1]

def raises(rewards):
    raise RuntimeError("no")

def no_arguments():
    return 0

def clipped(policy_logprobs, proximal_logprobs, advantages, *, clip_low, clip_high):
    ratio = torch.exp(policy_logprobs - proximal_logprobs)
    cut = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, cut * advantages)

def without_clips(policy_logprobs, proximal_logprobs, advantages):
    return -advantages * policy_logprobs

def averaged(policy_logprobs, proximal_logprobs, advantages, *, clip_low, clip_high):
    return (-advantages * policy_logprobs).mean()

def constant(policy_logprobs, proximal_logprobs, advantages, *, clip_low, clip_high):
    return -advantages
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Settings]:
    """Settings whose trainer uses functions of a module that lies in env.import_dir."""
    (tmp_path / "own_algorithms.py").write_text(CODE)
    (tmp_path / "own_broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)

    def make(**trainer: str) -> Settings:
        return Settings(model={"path": "m"}, env={"import_dir": tmp_path}, trainer=trainer)

    return make


@pytest.mark.parametrize(
    ("trainer", "sentence"),
    [
        ({"advantage_path": "own_algorithms"}, "is not package.module:function"),
        ({"advantage_path": "own_algorithms:nothing"}, "has no function 'nothing'"),
        ({"advantage_path": "own_missing:f"}, "cannot be imported: ModuleNotFoundError"),
        ({"advantage_path": "own_broken:f"}, "cannot be imported: ZeroDivisionError"),
        ({"advantage_path": "own_algorithms:no_arguments"}, "cannot be called as `def advantage"),
        ({"advantage_path": "own_algorithms:short"}, "of the same shape"),
        ({"advantage_path": "own_algorithms:raises"}, "raised RuntimeError: no"),
        ({"loss_path": "own_algorithms:best_of"}, "cannot be called as `def loss"),
        ({"loss_path": "own_algorithms:without_clips"}, "clip_low"),
        ({"loss_path": "own_algorithms:averaged"}, "Do not sum or average"),
        ({"loss_path": "own_algorithms:constant"}, "without gradient"),
    ],
)
def test_what_is_wrong_is_said_before_the_start(
    trainer: dict[str, str], sentence: str, own: Callable[..., Settings]
) -> None:
    """One line that names the setting and what to change, before any process group."""
    with pytest.raises(SettingsError) as caught:
        check_settings(own(**trainer))
    assert sentence in str(caught.value)
    assert next(iter(trainer)) in str(caught.value)


def test_an_own_advantage_is_used(own: Callable[..., Settings]) -> None:
    """It sees one group at a time, and none without signal."""
    settings = own(advantage_path="own_algorithms:best_of")
    check_custom(settings)
    groups = [[0.0, 2.0, 1.0], [1.0, 1.0]]
    got = take_advantages(groups, advantage_of(settings), signal=[True, False])
    assert [values.tolist() for values in got] == [[-0.5, 0.5, -0.5], [0.0, 0.0]]
    assert advantage_of(own()) == "grpo"
    assert loss_of(own()) is None


def test_an_own_loss_is_used(
    own: Callable[..., Settings],
    make_policy: Callable[..., Policy],
    make_samples: Callable[..., list[Sample]],
) -> None:
    """PPO written by the user trains bit for bit as the built-in one does."""
    settings = own(loss_path="own_algorithms:clipped")
    check_custom(settings)
    policies = make_policy(), make_policy()
    for policy, loss in zip(policies, (loss_of(settings), None), strict=True):
        rl_update(
            policy,
            make_samples(5),
            settings.trainer,
            policy_version=0,
            on_microbatch=lambda: None,
            loss=loss,
        )
    pairs = zip(*(p.model.parameters() for p in policies), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    values = torch.tensor([-1.0, -2.0])
    clips = {"clip_low": 0.2, "clip_high": 0.28}
    wanted = ppo_clip(values, values - 1, torch.ones(2), **clips)
    loss = loss_of(settings)
    assert loss is not None
    assert np.allclose(loss(values, values - 1, torch.ones(2), **clips).loss, wanted.loss)


@pytest.mark.parametrize(
    ("trainer", "sentence"),
    [
        ({"overlong_penalty": 1.0}, "without overlong_max_tokens"),
        ({"overlong_max_tokens": 4, "overlong_buffer_tokens": 5}, "exceeds overlong_max_tokens=4"),
        ({"correction": "token_tis"}, 'set trainer.proximal = "recompute"'),
        ({"correction_veto": 0.1}, "masks nothing"),
        ({"loss": "gspo"}, 'set trainer.denominator = "episodes"'),
    ],
)
def test_contradictions_are_refused(trainer: dict[str, object], sentence: str) -> None:
    """The sentence says which setting to change, and nothing is rewritten."""
    with pytest.raises(ValueError, match="trainer") as caught:
        Settings(model={"path": "m"}, trainer=trainer)
    assert sentence in str(caught.value)
