"""The user's own advantage and loss: found, checked before the start, used."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from fakes.bandit_run import Setup
from outloop.buffer.errors import SettingsError
from outloop.buffer.records import Group, Reward, Trajectory, Turn
from outloop.buffer.settings import Settings, TrainerSettings, build_settings
from outloop.buffer.settings.buffer import BufferSettings
from outloop.engine.train.algorithms.credit import ScoredEpisode, ScoredGroup, take_credits
from outloop.engine.train.algorithms.losses import LossFunction
from outloop.engine.train.algorithms.user_functions import (
    advantage_of,
    check_custom,
    filter_of,
    loss_of,
)
from outloop.engine.train.data.batch_builder import build_batch
from outloop.engine.train.data.samples import Sample
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.main import check_settings
from outloop.engine.train.megatron.model_and_optimizer import Policy
from outloop.engine.train.step.policy_update import rl_update

CODE = """
import torch

from outloop.engine.train.algorithms.losses import sequence_level

def best_of(group):
    return (group.rewards == group.rewards.max()) - 0.5

def by_turn(group):
    return [[turn.reward for turn in episode.turns] for episode in group.episodes]

def by_token(group):
    return [
        [[float(place)] * turn.num_tokens for place, turn in enumerate(episode.turns)]
        for episode in group.episodes
    ]

def short(group):
    return group.rewards[:1]

def infinite(group):
    return [float("inf")] * len(group.episodes)

def one_turn(group):
    return [[1.0] for episode in group.episodes]

def one_token(group):
    return [[[1.0] for turn in episode.turns] for episode in group.episodes]

def raises(group):
    raise RuntimeError("no")

def as_dict(group):
    return {episode.episode_id: 1.0 for episode in group.episodes}

def words(group):
    return [["good"] * len(episode.turns) for episode in group.episodes]

def ragged(group):
    return [[[[1.0], [1.0, 2.0]]] * len(episode.turns) for episode in group.episodes]

def late(wrong):
    # Right where it is tried, wrong at the step.
    def advantage(group):
        return wrong(group) if group.group_id != "probe" else by_turn(group)
    return advantage

def too_long(group):
    return [[[1.0] * 9 for turn in episode.turns] for episode in group.episodes]

late_raises, late_short, late_words, late_long = map(late, (raises, short, words, too_long))

def keeps(group):
    return "easy" if group.rewards.mean() > 0.9 and group.episodes[0].components["form"] else ""

def says_true(group):
    return True

def as_a_record(group):
    return "" if group.trajectories else "empty"

def late_keeps(group):
    if group.group_id != "probe":
        raise KeyError("level")
    return ""

CODE = "no function"

async def waits(argument):
    return argument

def no_arguments():
    return 0

def clipped(inputs):
    cut = inputs.ratio.clamp(1 - inputs.clip_low, 1 + inputs.clip_high)
    return -torch.minimum(inputs.ratio * inputs.advantages, cut * inputs.advantages)

def two_arguments(policy_logprobs, advantages):
    return -advantages * policy_logprobs

def averaged(inputs):
    return (-inputs.advantages * inputs.policy_logprobs).mean()

def constant(inputs):
    return -inputs.advantages

def half_known(inputs):
    return -inputs.advantages * inputs.sequence_mean(inputs.policy_logprobs)

@sequence_level
def by_sequence(inputs):
    logprobs = inputs.policy_logprobs
    distance = inputs.sequence_mean(logprobs - inputs.behavior_logprobs)
    height = inputs.options.get("height", 1.0)
    return -height * inputs.advantages * torch.exp(distance + (logprobs - logprobs.detach()))
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Settings]:
    """Settings whose trainer uses functions of a module that lies in env.import_dir."""
    (tmp_path / "own_algorithms.py").write_text(CODE)
    (tmp_path / "own_broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)

    def make(**trainer: object) -> Settings:
        return Settings(model={"path": "m"}, env={"import_dir": tmp_path}, trainer=trainer)

    return make


@pytest.mark.parametrize(
    ("trainer", "sentence"),
    [
        ({"advantage_path": "own_algorithms"}, "is not package.module:function"),
        ({"advantage_path": "own_algorithms:nothing"}, "has no 'nothing'"),
        ({"advantage_path": "own_missing:f"}, "there is no module 'own_missing'"),
        ({"advantage_path": "own_broken:f"}, "importing it raised ZeroDivisionError"),
        ({"advantage_path": "own_algorithms:no_arguments"}, "cannot be called as `def advantage"),
        ({"advantage_path": "own_algorithms:short"}, "one entry for each of group.episodes"),
        ({"advantage_path": "own_algorithms:infinite"}, "finite numbers are allowed"),
        ({"advantage_path": "own_algorithms:one_turn"}, "which has 2 turns"),
        ({"advantage_path": "own_algorithms:one_token"}, "shape (2,)"),
        ({"advantage_path": "own_algorithms:raises"}, "raised RuntimeError: no"),
        ({"advantage_path": "own_algorithms:as_dict"}, "one entry for each of group.episodes"),
        ({"advantage_path": "own_algorithms:words"}, "which is no number"),
        ({"advantage_path": "own_algorithms:ragged"}, "which is no number"),
        ({"loss_path": "own_algorithms:no_arguments"}, "cannot be called as `def loss"),
        ({"loss_path": "own_algorithms:two_arguments"}, "def loss(inputs)"),
        ({"loss_path": "own_algorithms:half_known"}, "sequence_level"),
        ({"loss_path": "own_algorithms:averaged"}, "Do not sum or average"),
        ({"loss_path": "own_algorithms:constant"}, "without gradient"),
    ],
)
def test_what_is_wrong_is_reported_before_the_start(
    trainer: dict[str, str], sentence: str, own: Callable[..., Settings]
) -> None:
    """One line that names the setting and what to change, before any process group."""
    with pytest.raises(SettingsError) as caught:
        check_settings(own(**trainer))
    assert sentence in str(caught.value)
    assert next(iter(trainer)) in str(caught.value)


@pytest.mark.parametrize("name", ["advantage_path", "loss_path", "filter_path"])
@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("own_algorithms", "is not package.module:function"),
        ("own_algorithms:", "is not package.module:function"),
        ("own_algorithms:keps", "has no 'keps'; did you mean 'keeps'"),
        ("own_algorithms:CODE", "cannot be called as `def"),
        ("own_algoritms:f", "there is no module 'own_algoritms'.*did you mean 'own_algorithms'"),
        ("own_broken:f", r"importing it raised ZeroDivisionError at .*own_broken\.py:1"),
        ("own_syntax:f", r"importing it raised SyntaxError.*own_syntax\.py, line 2"),
        ("own_exit:f", r"importing it raised SystemExit at .*own_exit\.py:1"),
        ("own_algorithms:no_arguments", "cannot be called as `def"),
        ("own_algorithms:raises", r"raised RuntimeError: no in .*own_algorithms\.py:\d+ on "),
        ("own_algorithms:waits", "is async; `def"),
    ],
)
def test_every_function_of_the_user_is_tried_before_the_start(
    name: str, function: str, sentence: str, own: Callable[..., Settings], tmp_path: Path
) -> None:
    """Filter, advantage and loss are refused alike, with the setting and the file and line."""
    (tmp_path / "own_exit.py").write_text("raise SystemExit('no key')")
    (tmp_path / "own_syntax.py").write_text("x = 1\ndef f(:\n")
    section = "buffer" if name == "filter_path" else "trainer"
    settings = build_settings(
        {"model": {"path": "m"}, "env": {"import_dir": tmp_path}, section: {name: function}},
        source="test",
    )
    with pytest.raises(SettingsError, match=sentence) as refused:
        check_settings(settings)
    assert f"{section}.{name}={function!r}" in str(refused.value)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("says_true", "an empty string (train) or the reason not to is allowed"),
        ("as_a_record", "'ScoredGroup' object has no attribute 'trajectories'"),
    ],
)
def test_a_filter_that_does_not_fit_is_refused_before_the_start(
    function: str, sentence: str, own: Callable[..., Settings], tmp_path: Path
) -> None:
    """A filter is tried on the record of an advantage."""
    settings = own().model_copy(
        update={"buffer": BufferSettings(filter_path=f"own_algorithms:{function}")}
    )
    with pytest.raises(SettingsError, match=re.escape(sentence)):
        check_custom(settings)


def test_a_filter_sees_what_an_advantage_sees(own: Callable[..., Settings]) -> None:
    """Rewards, and components by any name where it is tried."""
    settings = own().model_copy(
        update={"buffer": BufferSettings(filter_path="own_algorithms:keeps")}
    )
    check_custom(settings)
    keep = filter_of(settings)
    assert keep is not None
    assert keep(scored([0.0, 1.0])) == ""


def scored(rewards: list[float]) -> ScoredGroup:
    """A group of episodes without turns."""
    episodes = (ScoredEpisode(episode_id="e", reward=reward) for reward in rewards)
    return ScoredGroup(group_id="g", task_id="t", episodes=tuple(episodes))


def test_an_own_advantage_of_turns_or_tokens_reaches_them(
    own: Callable[..., Settings],
    make_turn: Callable[..., Turn],
    make_trajectory: Callable[..., Trajectory],
) -> None:
    """Each in the row in which it is trained: a shared turn once, context nothing."""
    turns = [
        make_turn("a", prompt=[1], output=[2, 3]),
        make_turn("b", parent="a", prompt=[4], output=[5]),
        make_turn("c", parent="a", prompt=[6], output=[7, 8]),
    ]
    trajectories = []
    for name, earned in (("x", {"a": 0.5, "b": -1.0, "c": 2.0}), ("y", {})):
        named = [replace(turn, episode_id=name) for turn in turns]
        trajectory = make_trajectory(named, episode_id=name)
        reward = Reward(value=0.0, turns=earned)
        trajectories.append(replace(trajectory, episode=replace(trajectory.episode, reward=reward)))
    group = Group(group_id="g", slot=0, task_id="t", group_size=2, trajectories=tuple(trajectories))
    column = {}
    for name in ("by_turn", "by_token"):
        settings = own(advantage_path=f"own_algorithms:{name}")
        check_custom(settings)
        batch = build_batch([group], settings, policy_version=0, vocab_size=16)
        column[name] = [row.advantages.tolist() for row in list(batch.rows)[:2]]
    assert column["by_turn"] == [[0.0, 0.5, 0.5, 0.0, -1.0], [0.0, 0.0, 0.0, 0.0, 2.0, 2.0]]
    assert column["by_token"] == [[0.0, 0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0, 2.0, 2.0]]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("late_raises", "raised RuntimeError: no in "),
        ("late_short", "one entry for each of group.episodes"),
        ("late_words", "which is no number"),
        ("late_long", "one for the episode, for a turn, or for each of the turn's tokens"),
        ("late_keeps", "buffer.filter_path='own_algorithms:late_keeps' raised KeyError: 'level'"),
    ],
)
def test_what_is_wrong_at_a_step_ends_it_before_any_weight_moves(
    name: str, sentence: str, own: Callable[..., Settings], setup: Callable[..., Setup]
) -> None:
    """The functions passed where they were tried; the step is refused by a sentence, and nothing of
    it is counted as trained or dropped."""
    settings = own(advantage_path=f"own_algorithms:{name}")
    sections = {"trainer": {"num_steps": 1, "advantage_path": f"own_algorithms:{name}"}}
    if name == "late_keeps":
        path = "own_algorithms:late_keeps"
        sections = {"trainer": {"num_steps": 1}, "buffer": {"filter_path": path}}
    run = setup(**sections, env={"import_dir": settings.env.import_dir})
    check_settings(run.run.settings)
    with pytest.raises(SettingsError, match=re.escape(sentence)):
        run.train()
    assert run.server.num_publishes == 1
    kinds = {kind for kind, _ in run.events}
    assert "take" in kinds
    assert not kinds & {"mark_trained", "drop"}
    assert run.buffer.marks == []


def test_an_own_advantage_is_used(own: Callable[..., Settings]) -> None:
    """It sees one group at a time, and none without signal."""
    settings = own(advantage_path="own_algorithms:best_of")
    check_custom(settings)
    groups = [scored([0.0, 2.0, 1.0]), scored([1.0, 1.0])]
    got = take_credits(groups, advantage_of(settings), signal=[True, False])
    assert got == [[-0.5, 0.5, -0.5], [0.0, 0.0]]
    assert advantage_of(own()) == "grpo"
    assert loss_of(own()) is None


def test_an_own_loss_is_used(
    own: Callable[..., Settings],
    make_policy: Callable[..., Policy],
    make_samples: Callable[..., list[Sample]],
) -> None:
    """PPO written by the user trains bit for bit as the built-in one does."""
    settings = own(loss_path="own_algorithms:clipped")
    builtin = TrainerSettings(dual_clip=0)
    check_custom(settings)
    assert_equal_updates(
        make_policy, make_samples, (settings.trainer, loss_of(settings)), (builtin, None)
    )


def test_an_own_loss_of_whole_sequences_is_used(
    own: Callable[..., Settings],
    make_policy: Callable[..., Policy],
    make_samples: Callable[..., list[Sample]],
) -> None:
    """Marked as such it sees all tokens of a sequence, however their logits are chunked, and its
    options: GSPO without clips, written by the user, trains as the built-in one does."""
    settings = own(
        loss_path="own_algorithms:by_sequence",
        loss_options={"height": 1.0},
        denominator="episode_means",
    )
    check_custom(settings)
    wide = TrainerSettings(loss="gspo", clip_low=0.19, clip_high=1e9, dual_clip=0)
    assert_equal_updates(
        make_policy, make_samples, (settings.trainer, loss_of(settings)), (wide, None)
    )


def assert_equal_updates(
    make_policy: Callable[..., Policy],
    make_samples: Callable[..., list[Sample]],
    *ways: tuple[TrainerSettings, LossFunction | None],
) -> None:
    """One update in each way leads to the same weights, bit for bit."""
    policies = [make_policy() for _ in ways]
    before = [parameter.clone() for parameter in policies[0].model.parameters()]
    for policy, (trainer, loss) in zip(policies, ways, strict=True):
        rl_update(
            policy,
            TrainBatch.of(make_samples(5)),
            trainer,
            policy_version=0,
            on_microbatch=lambda: None,
            loss=loss,
        )
    pairs = zip(*(p.model.parameters() for p in policies), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    now = policies[0].model.parameters()
    assert not all(torch.equal(a, b) for a, b in zip(before, now, strict=True))


@pytest.mark.parametrize(
    ("trainer", "sentence"),
    [
        ({"overlong_penalty": 1.0}, "without overlong_max_tokens"),
        (
            {"overlong_penalty": 1.0, "overlong_max_tokens": 4, "overlong_buffer_tokens": 5},
            "exceeds overlong_max_tokens=4",
        ),
        ({"correction": "token_tis"}, 'set trainer.proximal = "recompute"'),
        ({"correction_veto": 0.1}, "has no effect: it needs a trainer.correction"),
        ({"loss": "gspo", "denominator": "tokens"}, 'set trainer.denominator = "episode_means"'),
        ({"loss": "gspo", "clip_low": 0.2, "clip_high": 0.28}, "never goes so far"),
        ({"dual_clip": 0.9}, "more than 1 is allowed"),
        ({"denominator": "constant"}, "needs trainer.denominator_constant"),
        ({"denominator": "budget"}, "needs trainer.token_budget"),
        ({"kl_coefficient": 0.1}, "has no effect: it needs a trainer.kl"),
        ({"kl_ratio_cap": 5.0, "kl": "k1"}, 'needs trainer.kl = "k2" or "k3"'),
        ({"denominator_constant": 4.0}, 'needs trainer.denominator = "constant"'),
        ({"token_budget": 4}, 'needs trainer.denominator = "budget"'),
        (
            {"proximal": "recompute", "correction": "token_tis", "correction_floor": 0.1},
            "needs a masked trainer.correction",
        ),
        ({"correction_cap": 5.0}, "has no effect: it needs a trainer.correction"),
        ({"loss": "cispo", "dual_clip": 4.0}, 'needs trainer.loss = "ppo_clip" or "gspo"'),
        ({"loss": "reinforce", "clip_low": 0.1}, 'other than "reinforce"'),
        ({"loss_path": "a:b", "loss": "cispo"}, "which takes its place"),
        ({"loss_options": {"height": 1.0}}, "needs trainer.loss_path"),
        ({"advantage_path": "a:b", "advantage": "rloo"}, "which takes its place"),
        ({"overlong_max_tokens": 4}, "needs trainer.overlong_penalty"),
        ({"min_lr_ratio": 0.5}, "needs trainer.lr_decay"),
        ({"kl_target": 0.1}, 'needs a trainer.kl other than "none"'),
        ({"lr_decay": "wsd"}, "needs trainer.wsd_decay_updates"),
        ({"wsd_decay_updates": 5}, 'needs trainer.lr_decay = "wsd"'),
        ({"advantage": "pass_at_k"}, "needs trainer.pass_k"),
        ({"pass_k": 4}, 'needs trainer.advantage = "pass_at_k"'),
        ({"advantage": "pass_at_k", "pass_k": 8}, "less than group_size is allowed"),
        ({"num_epochs": 2}, 'needs trainer.mode = "sft"'),
        ({"mode": "sft", "kl": "k2"}, 'has no effect with trainer.mode="sft"'),
        ({"mode": "sft", "recipe": "grpo"}, 'has no effect with trainer.mode="sft"'),
    ],
)
def test_contradictions_are_refused(trainer: dict[str, object], sentence: str) -> None:
    """The sentence says which setting to change, and nothing is rewritten."""
    with pytest.raises(ValueError, match="trainer") as caught:
        Settings(model={"path": "m"}, trainer=trainer)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    "setting",
    [
        "losses:soft_clip",
        "losses:by_sequence",
        "advantages:centred",
        "advantages:by_turn",
        "filters:keep",
    ],
)
def test_what_the_page_shows_is_accepted(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The functions of docs/algorithms.md pass the checks before a start."""
    page = (Path(__file__).parents[3] / "docs/algorithms.md").read_text()
    module, _, function = setting.partition(":")
    (code,) = re.findall(rf"```python title={module}\.py\n(.*?)```", page, re.DOTALL)
    (tmp_path / f"page_{module}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    section, name = {
        "losses": ("trainer", "loss_path"),
        "advantages": ("trainer", "advantage_path"),
        "filters": ("buffer", "filter_path"),
    }[module]
    check_custom(Settings(model={"path": "m"}, **{section: {name: f"page_{module}:{function}"}}))
