"""Advantages by a critic: the recursion, where rewards lie, and one step against a reference."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outloop.buffer.errors import SettingsError
from outloop.buffer.records import CheckpointMark
from outloop.buffer.settings import Settings
from outloop.buffer.settings.trainer import CriticSettings, TrainerSettings
from outloop.engine.train.algorithms.credit import ScoredEpisode, ScoredGroup, ScoredTurn
from outloop.engine.train.algorithms.gae import (
    Chain,
    gae,
    rewards_on,
    targets_on,
)
from outloop.engine.train.checkpoint.async_writer import save_checkpoint
from outloop.engine.train.checkpoint.checkpoint_format import latest_checkpoint, load_checkpoint
from outloop.engine.train.data.batch_builder import Credit
from outloop.engine.train.data.samples import Sample
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.megatron import import_weights, model_and_optimizer
from outloop.engine.train.megatron.model_and_optimizer import Policy, ValueModel
from outloop.engine.train.step.critic_update import (
    critic_update,
    cut_rows,
    values_of,
    with_values,
)

MARK = CheckpointMark(fence=1, group_ids=(), next_slot=0, policy_version=0)


def by_definition(
    rewards: Sequence[float], values: Sequence[float], *, bootstrap: float, gamma: float, lam: float
) -> list[float]:
    """Equation 16 as it stands: a weighted sum of the errors of all later steps."""
    known = [*values, bootstrap]
    errors = [r + gamma * known[k + 1] - known[k] for k, r in enumerate(rewards)]
    return [
        sum((gamma * lam) ** (later - k) * errors[later] for later in range(k, len(errors)))
        for k in range(len(errors))
    ]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.8, 0.0)])
def test_gae_is_its_papers_sum(gamma: float, lam: float) -> None:
    """In float64, with a value after the last step and without."""
    generator = np.random.default_rng(3)
    rewards, values = generator.normal(size=(2, 7))
    for bootstrap in (0.0, 1.5):
        got = gae(rewards, values, bootstrap=bootstrap, gamma=gamma, gae_lambda=lam)
        wanted = by_definition(
            rewards.tolist(), values.tolist(), bootstrap=bootstrap, gamma=gamma, lam=lam
        )
        assert got == pytest.approx(wanted, abs=1e-12)
    # Lambda 1 trusts rewards alone: what is to come less the value, whatever other values say.
    to_go = [sum(gamma ** (later - k) * rewards[later] for later in range(k, 7)) for k in range(7)]
    got = gae(rewards, values, bootstrap=0.0, gamma=gamma, gae_lambda=1.0)
    assert got == pytest.approx(np.array(to_go) - values, abs=1e-12)


def turn(name: str, *, num_tokens: int = 3, **earned: Any) -> ScoredTurn:
    """A turn that earned something."""
    return ScoredTurn(
        turn_id=name,
        parent=None,
        request=0,
        num_tokens=num_tokens,
        oldest_version=0,
        is_cut=False,
        **earned,
    )


def chain(*tokens: tuple[int, int]) -> Chain:
    """Trained tokens, each (turn, which of its tokens)."""
    turns, offsets = np.array(tokens, np.int64).reshape(-1, 2).T
    return Chain(places=np.arange(len(tokens)), turns=turns, offsets=offsets)


def test_every_reward_lies_once_where_it_was_earned() -> None:
    """Turns at their last trained token, spans at the last in them, the episode at the end."""
    episode = ScoredEpisode(
        episode_id="e",
        reward=10.0,
        turns=(
            turn("a", reward=1.0, spans=((0, 2, 5.0),)),
            turn("masked", reward=2.0),
            turn("b", branch_reward=3.0, spans=((0, 1, 7.0), (2, 3, -1.0))),
        ),
    )
    tokens = chain((0, 0), (0, 1), (0, 2), (2, 1), (2, 2))
    found = rewards_on(tokens, episode)
    # The first span of b has no trained token: the token before it has it, as the masked turn's.
    assert found.tolist() == [0.0, 5.0, 1.0 + 2.0 + 7.0, 0.0, 10.0 + 3.0 - 1.0]
    assert found.sum() == episode.total
    assert rewards_on(chain(), episode).tolist() == []
    # What was earned before the first trained token was caused by none.
    assert rewards_on(chain((2, 0)), episode).sum() == 10.0 + 3.0 + 7.0 - 1.0


def test_over_turns_a_turn_is_one_step() -> None:
    """Its tokens share its advantage; its value is that before its first token."""
    tokens = chain((0, 0), (0, 1), (3, 0), (4, 0), (4, 1), (4, 2))
    rewards = np.array([0.0, 1.0, 2.0, 0.0, 0.0, 4.0])
    values = np.array([0.5, 9.0, 0.25, -1.0, 9.0, 9.0])
    settings = CriticSettings(over="turns", gamma=0.9, gae_lambda=0.8, value_lambda=1.0)
    found = targets_on(tokens, rewards, values, bootstrap=0.5, settings=settings)
    earned, expected = [1.0, 2.0, 4.0], [0.5, 0.25, -1.0]
    a = by_definition(earned, expected, bootstrap=0.5, gamma=0.9, lam=0.8)
    assert found.advantages == pytest.approx([a[0], a[0], a[1], a[2], a[2], a[2]])
    b = by_definition(earned, expected, bootstrap=0.5, gamma=0.9, lam=1.0)
    assert found.is_target.tolist() == [True, False, True, True, False, False]
    assert found.returns[found.is_target] == pytest.approx([b[k] + expected[k] for k in range(3)])
    nothing = targets_on(chain(), np.zeros(0), np.zeros(0), bootstrap=0.0, settings=settings)
    assert len(nothing.advantages) == 0


def played(make_samples: Callable[..., list[Sample]]) -> tuple[TrainBatch, Credit]:
    """Two episodes of two rows each, of which the second was truncated."""
    samples = make_samples(4)
    rows = TrainBatch.of(samples)
    turns = rows.turns.copy()
    for row, (start, end) in enumerate(pairwise(rows.starts.tolist())):
        own = turns[start:end]
        own[own >= 0] = row % 2
    rows = rows.with_columns(turns=turns)
    episodes = tuple(
        ScoredEpisode(
            episode_id=name,
            reward=reward,
            outcome="truncated" if is_truncated else "completed",
            is_truncated=is_truncated,
            turns=(turn("a", reward=0.5), turn("b")),
        )
        for name, reward, is_truncated in (("e0", 1.0, False), ("e1", -1.0, True))
    )
    group = ScoredGroup(group_id="g0", task_id="t", episodes=episodes)
    return rows, Credit(groups=(group,), teaches=(True,), rows={0: ((0, 1), (2, 3))})


@pytest.fixture
def make_critic(tiny_folder: Callable[..., Path]) -> Callable[..., Policy]:
    """A tiny critic with its optimizer, whose head says something."""

    def make(kind: str = "qwen3", **critic: object) -> Policy:
        folder = tiny_folder(kind)
        settings = TrainerSettings(advantage="gae", critic={"learning_rate": 1e-2} | critic)
        made = model_and_optimizer.build_critic(
            model_and_optimizer.read_config(folder, {}), settings, num_updates=10
        )
        import_weights.load_huggingface(made.model, folder)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(1)
            head = made.model.output_layer.weight
            head.copy_(torch.randn(head.shape, generator=generator) * 0.1)
        made.take_weights()
        return made

    return make


def reference_values(folder: Path, head: torch.Tensor, row: Sample) -> np.ndarray:
    """[T + 1] in float64 by transformers: before each token (the first: 0) and after the last."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).double()
    with torch.no_grad():
        ids = torch.tensor(row.token_ids.astype(np.int64))[None]
        hidden = model.model(ids).last_hidden_state[0]
    return np.append(0.0, (hidden @ head[0].double()).numpy())


@pytest.mark.medium
def test_a_step_of_the_critic_is_that_of_the_formulas(
    make_critic: Callable[..., Policy],
    make_samples: Callable[..., list[Sample]],
    tiny_folder: Callable[..., Path],
) -> None:
    """Values, advantages across branches, bootstrap and loss against float64; split into small
    microbatches or whole."""
    batch, credit = played(make_samples)
    critic = make_critic(learning_rate=1e-4)
    assert isinstance(critic.model, ValueModel)
    assert cut_rows(batch, credit, CriticSettings()) == [3]
    head = critic.model.output_layer.weight.detach().clone()
    wanted = [reference_values(tiny_folder(), head, row) for row in batch]
    settings = TrainerSettings(
        advantage="gae",
        critic={"normalizes_advantages": False, "gamma": 0.99},
    )
    for max_tokens in (40, 1000):
        values, behind = values_of(
            critic.model, batch, cut_rows=[3], max_tokens=max_tokens, on_microbatch=lambda: None
        )
        expected = np.concatenate([column[:-1] for column in wanted])
        assert values == pytest.approx(np.where(batch.loss_mask, expected, 0.0), abs=1e-5)
        assert behind == {3: pytest.approx(wanted[3][-1], abs=1e-5)}
    rows, targets, metrics = with_values(batch, credit, values, behind, settings)
    losses = []
    for first, reward, bootstrap in ((0, 1.0, 0.0), (2, -1.0, wanted[3][-1])):
        known, earned, places = [], [], []
        for row in (first, first + 1):
            at = np.flatnonzero(batch.row(row).loss_mask)
            known += wanted[row][at].tolist()
            earned += [0.0] * len(at)
            places += (batch.starts[row] + at).tolist()
            if row == first:
                earned[-1] += 0.5
        earned[-1] += reward
        wanted_advantages = by_definition(earned, known, bootstrap=bootstrap, gamma=0.99, lam=0.95)
        assert rows.advantages[places] == pytest.approx(wanted_advantages, abs=1e-5)
        assert targets.returns[places] == pytest.approx(
            np.array(wanted_advantages) + known, abs=1e-5
        )
        losses += [0.5 * a * a for a in wanted_advantages]
    assert (targets.loss_mask == batch.loss_mask).all()
    measured = critic_update(critic, targets, settings, rows=range(4), on_microbatch=lambda: None)
    assert measured["train/value_loss"] == pytest.approx(np.mean(losses), abs=1e-5)
    assert measured["train/critic_learning_rate"] == 1e-4
    again, _ = values_of(
        critic.model, batch, cut_rows=[], max_tokens=1000, on_microbatch=lambda: None
    )
    after = np.square(again - targets.returns)[batch.loss_mask].mean()
    assert after < np.square(values - targets.returns)[batch.loss_mask].mean()
    assert metrics["train/value_target_mean"] == pytest.approx(
        targets.returns[batch.loss_mask].mean()
    )


def test_k1_is_paid_by_each_token(make_samples: Callable[..., list[Sample]]) -> None:
    """With lambda 1 and no values a token's advantage is less what it and later ones pay."""
    batch, credit = played(make_samples)
    assert batch.behavior_logprobs is not None
    batch = batch.with_columns(reference_logprobs=batch.behavior_logprobs - 0.5)
    settings = TrainerSettings(
        advantage="gae",
        kl="k1",
        kl_coefficient=0.1,
        critic={"gae_lambda": 1.0, "normalizes_advantages": False},
    )
    values = np.zeros(batch.token_ids.shape, np.float32)
    rows, _, metrics = with_values(batch, credit, values, {3: 0.0}, settings)
    mask = batch.row(0).loss_mask, batch.row(1).loss_mask
    count = int(mask[0].sum() + mask[1].sum())
    found = np.concatenate([rows.row(0).advantages[mask[0]], rows.row(1).advantages[mask[1]]])
    assert found[0] == pytest.approx(1.5 - 0.05 * count, abs=1e-5)
    assert found[-1] == pytest.approx(1.0 - 0.05, abs=1e-5)
    assert metrics["train/kl_penalty_mean"] == pytest.approx(
        0.05 * batch.loss_mask.sum() / 2, abs=1e-5
    )


@pytest.mark.medium
def test_a_checkpoint_holds_the_critic(
    make_policy: Callable[..., Policy],
    make_critic: Callable[..., Policy],
    make_samples: Callable[..., list[Sample]],
    tmp_path: Path,
) -> None:
    """With its moments: the next update is that of a critic that was never away. One of another
    size is refused, and so is a checkpoint without any."""
    batch, credit = played(make_samples)
    settings = TrainerSettings(advantage="gae", critic={"learning_rate": 1e-2})

    def update(critic: Policy) -> dict[str, float]:
        values, behind = values_of(
            critic.model, batch, cut_rows=[3], max_tokens=1000, on_microbatch=lambda: None
        )
        _, targets, _ = with_values(batch, credit, values, behind, settings)
        return critic_update(critic, targets, settings, rows=range(4), on_microbatch=lambda: None)

    policy, first = make_policy(), make_critic()
    update(first)
    save_checkpoint(policy, tmp_path, step=1, mark=MARK, keep=1, critic=first)
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert (found.num_updates, found.num_critic_updates) == (0, 1)
    second = make_critic()
    load_checkpoint(make_policy(), found, critic=second)
    assert update(second) == update(first)
    # A run that wants none of it leaves it where it is.
    load_checkpoint(make_policy(), found)
    with pytest.raises(SettingsError, match="holds a critic of another model"):
        load_checkpoint(make_policy(), found, critic=make_critic("llama3"))
    save_checkpoint(policy, tmp_path / "alone", step=1, mark=MARK, keep=1)
    alone = latest_checkpoint(tmp_path / "alone")
    assert alone is not None
    with pytest.raises(SettingsError, match="holds no critic"):
        load_checkpoint(make_policy(), alone, critic=second)


def test_settings_of_a_critic_need_one(tmp_path: Path) -> None:
    """Elsewhere they have no effect; a group of one is enough with it."""
    with pytest.raises(ValueError, match="trainer.critic=.* has no effect"):
        TrainerSettings(critic={"gamma": 0.5})
    for critic, words in (
        ({"kind": "head", "path": tmp_path}, "path=.* has no effect .*=.head., whose layers"),
        ({"value_coefficient": 0.1}, "value_coefficient=0.1 has no effect: it needs .*head"),
    ):
        with pytest.raises(ValueError, match=words):
            TrainerSettings(advantage="gae", critic=critic)
    made = Settings(model={"path": tmp_path}, trainer={"recipe": "ppo"}, buffer={"group_size": 1})
    assert made.trainer.advantage == "gae"


def test_an_update_of_some_rows_is_the_mean_over_their_targets(
    make_critic: Callable[..., Policy], make_samples: Callable[..., list[Sample]]
) -> None:
    """Other rows of the batch, which other updates train, stay out of the denominator."""
    batch, credit = played(make_samples)
    critic = make_critic(learning_rate=1e-12)
    settings = TrainerSettings(advantage="gae", critic={"value_clip": 0.0})
    values, behind = values_of(
        critic.model, batch, cut_rows=[3], max_tokens=1000, on_microbatch=lambda: None
    )
    _, targets, _ = with_values(batch, credit, values, behind, settings)
    assert targets.returns is not None
    for rows in ([1, 2], [3], [0, 1, 2, 3]):
        of_rows = np.concatenate([np.arange(*batch.starts[row : row + 2]) for row in rows])
        at = of_rows[targets.loss_mask[of_rows]]
        wanted = 0.5 * np.square(values[at] - targets.returns[at]).mean()
        found = critic_update(critic, targets, settings, rows=rows, on_microbatch=lambda: None)
        assert found["train/value_loss"] == pytest.approx(wanted, rel=1e-3)


def test_the_state_behind_an_episode_is_that_of_its_last_turn(
    make_samples: Callable[..., list[Sample]],
) -> None:
    """Whichever row holds that turn: rows are in the order of branches, not of turns."""
    batch, credit = played(make_samples)
    assert cut_rows(batch, credit, CriticSettings()) == [3]
    turns = batch.turns.copy()
    turns[turns >= 0] = 1 - turns[turns >= 0]
    assert cut_rows(batch.with_columns(turns=turns), credit, CriticSettings()) == [2]
