"""Every function of engine/train/data against what it should give, by loops, and its mutants.

As in test_formulas: which tokens are trained, in which row, with which numbers. A new function
needs a line in HELD.
"""

import dataclasses
import importlib
import itertools
import math
import pkgutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from fakes.mutants import Held, held, passes, public_functions_of
from fakes.records import trajectory_of
from outloop.buffer.records import (
    SOURCE,
    Group,
    Reward,
    Sampling,
    TokenReward,
    Trajectory,
    Turn,
    VersionSpan,
)
from outloop.buffer.settings import Settings, TrainerSettings
from outloop.buffer.settings.trainer import CriticSettings
from outloop.engine.train import data
from outloop.engine.train.algorithms.credit import reward_to_go
from outloop.engine.train.data import (
    batch_builder,
    context_parallel,
    microbatch,
    packing,
    reward_rows,
    samples,
    scored_groups,
    supports,
    train_batch,
)
from outloop.engine.train.megatron import value_head
from outloop.engine.train.step import (
    critic_update,
    head_update,
    recompute_logprobs,
    reference_model,
)

VOCAB = 100


def turn(
    name: str,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    parent: str | None = None,
    version: int = 0,
    **more: Any,
) -> Turn:
    """Of ids; each output token has a logprob that says which it is."""
    size = len(output)
    known: dict[str, Any] = {
        "turn_id": name,
        "episode_id": "e",
        "parent_turn_id": parent,
        "prompt_ids": np.array(prompt, np.int32),
        "output_ids": np.array(output, np.int32),
        "behavior_logprobs": -np.array(output, np.float32) / 10,
        "version_spans": (VersionSpan(policy_version=version, start=0, end=size),),
        "loss_spans": ((0, size),),
        "sampling": Sampling(temperature=0.5),
        "finish_reason": "stop",
        "started_at": 0.0,
        "finished_at": 0.0,
    }
    return Turn(**known | more)


def trajectory(turns: Sequence[Turn], reward: Any = 1.0, **more: Any) -> Trajectory:
    """A closed episode."""
    given = Reward(value=reward) if isinstance(reward, float) else reward
    return trajectory_of(turns, reward=given, **more)


def group(*trajectories: Trajectory, slot: int = 0) -> Group:
    """Of these attempts."""
    return Group(
        group_id=f"g{slot}", slot=slot, task_id="t", group_size=4, trajectories=trajectories
    )


TREE = (
    turn("a", [1, 2], [3, 4], version=5),
    turn("b", [6], [7, 8, 9], parent="a", version=6, loss_spans=((0, 1), (2, 3))),
    turn("c", [11], [12], parent="a", version=4, sampling=Sampling(temperature=0.0)),
    turn("d", [13], [14, 15], parent="c", version=7, finish_reason="length"),
)
"""A root with two answers; of one a token is not trained, the other was not sampled."""


def check_build_samples(m: Any) -> None:
    """Each trainable token in the first row that has it, with what its turn knows of it."""
    first, second = m.build_samples(trajectory(TREE))
    assert first.token_ids.tolist() == [1, 2, 3, 4, 6, 7, 8, 9]
    assert second.token_ids.tolist() == [1, 2, 3, 4, 11, 12, 13, 14, 15]
    wanted = ({2: 5, 3: 5, 5: 6, 7: 6}, {7: 7, 8: 7})
    turns = ({2: 0, 3: 0, 5: 1, 6: 1, 7: 1}, {5: 2, 7: 3, 8: 3})
    for index, (row, versions, places) in enumerate(
        zip((first, second), wanted, turns, strict=True)
    ):
        assert row.branch == index
        for place, token in enumerate(row.token_ids.tolist()):
            is_trained = place in versions
            assert row.loss_mask[place] == is_trained
            assert row.behavior_logprobs[place] == np.float32(-token / 10 if is_trained else 0)
            assert row.policy_versions[place] == versions.get(place, -1)
            assert row.temperature[place] == (0.5 if is_trained else 1.0)
            assert row.turns[place] == places.get(place, -1)
    (alone,) = m.build_samples(trajectory([turn("a", [], [3, 4])]))
    assert alone.loss_mask.tolist() == [False, True]


def check_sample(m: Any) -> None:
    """Numbers of a row."""
    first, second = m.build_samples(trajectory(TREE))
    assert [first.num_tokens, second.num_tokens] == [8, 9]
    assert [first.num_trained_tokens, second.num_trained_tokens] == [4, 2]
    assert [first.oldest_version, second.oldest_version] == [5, 7]
    first.advantages[:] = np.arange(8)
    assert first.advantage == (2 + 3 + 5 + 7) / 4


def check_row_ends(m: Any) -> None:
    """Context around a row; every id but the first of a prompt."""
    first, _ = m.build_samples(trajectory(TREE))
    longer = m.padded(first, before=2, after=1)
    assert longer.token_ids.tolist() == [0, 0, *first.token_ids.tolist(), 0]
    assert longer.loss_mask.tolist() == [False] * 2 + first.loss_mask.tolist() + [False]
    assert longer.temperature[[0, 1, -1]].tolist() == [1.0] * 3
    assert longer.policy_versions[[0, 1, -1]].tolist() == [-1] * 3
    sent = m.padded(dataclasses.replace(first, routed_experts=m.unknown_routes(8, 2)), after=1)
    assert sent.routed_experts.tobytes() == b"\xff" * 18
    asked = m.with_one_more(first)
    assert asked.loss_mask.tolist() == [*first.loss_mask.tolist(), True]
    prompt = m.prompt_sample([5, 6, 7])
    assert prompt.token_ids.tolist() == [5, 6, 7]
    assert prompt.loss_mask.tolist() == [False, True, True]
    assert prompt.temperature.tolist() == [1.0] * 3
    assert m.unknown_routes(3, 4).tobytes() == b"\xff" * 12
    assert len(m.unknown_routes(3, 4)) == 3


def check_limits(m: Any) -> None:
    """Cut at the end of a branch; ended by a limit; the oldest that sampled a trained token."""
    cut, whole = trajectory(TREE), trajectory(TREE[:2])
    between = trajectory(
        [replace(TREE[0], finish_reason="length"), turn("b", [6], [7], parent="a")]
    )
    assert [m.is_cut(one) for one in (cut, whole, between)] == [True, False, False]
    late = trajectory(TREE[:2], outcome="truncated")
    assert [m.is_truncated(one) for one in (cut, whole, between, late)] == [
        True,
        False,
        False,
        True,
    ]
    assert m.oldest_trained_version(cut) == 5
    assert m.oldest_trained_version(trajectory([TREE[2]])) is None


# Groups.

PARTS = Reward(
    value=1.0,
    components={"form": 0.5},
    turns={"c": 2.0},
    branches={"b": 3.0, "d": 4.0},
    tokens=(TokenReward("b", 1, 2, -1.0), TokenReward("b", 0, 1, 7.0)),
)


def sourced(source: str, *rewards: Any) -> Group:
    """Attempts at a task of a list."""
    return group(*(trajectory(TREE, one, metadata={SOURCE: source}) for one in rewards))


def check_scored_group(m: Any) -> None:
    """Attempts with a reward, each turn with what it earned."""
    given = sourced("proofs", PARTS, None, 2.0)
    assert [t.episode.reward.value for t in m.scored(given)] == [1.0, 2.0]
    assert m.source_of(given) == "proofs"
    assert m.source_of(group()) == ""
    found = m.scored_group(given)
    assert (found.source, found.rewards.tolist()) == ("proofs", [1.0, 2.0])
    assert found.totals.tolist() == [1.0 + 2 + 3 + 4 - 1 + 7, 2.0]
    one = found.episodes[0]
    assert [t.reward for t in one.turns] == [0.0, 0.0, 2.0, 0.0]
    assert [t.branch_reward for t in one.turns] == [0.0, 3.0, 0.0, 4.0]
    assert one.turns[1].spans == ((0, 1, 7.0), (1, 2, -1.0))
    assert [t.parent for t in one.turns] == [None, 0, 0, 2]
    assert [t.request for t in one.turns] == [0, 1, 2, 3]
    assert [t.num_tokens for t in one.turns] == [2, 3, 1, 2]
    assert one.branches == ((0, 1), (0, 2, 3))
    assert one.is_truncated
    assert m.scored_group(given, has_parts=False).totals.tolist() == [1.0, 2.0]


def check_reward_metrics(m: Any) -> None:
    """Means over the episodes that have it, in all and by source."""
    groups = [
        m.scored_group(sourced("proofs", PARTS, 2.0)),
        m.scored_group(sourced("games", Reward(value=4.0, components={"form": 1.0}), 0.0)),
    ]
    got = m.reward_metrics(groups)
    assert got == {
        "reward/form": 0.75,
        "train/return_mean": (16.0 + 2.0 + 4.0 + 0.0) / 4,
        "source/proofs/reward_mean": 1.5,
        "source/proofs/episodes": 2,
        "source/proofs/reward/form": 0.5,
        "source/games/reward_mean": 2.0,
        "source/games/episodes": 2,
        "source/games/reward/form": 1.0,
    }


def settings(**more: Any) -> Settings:
    """A run's, with what is given."""
    trainer = {"advantage": "dr_grpo"} | more.pop("trainer", {})
    return Settings(model={"path": "m"}, trainer=trainer, **more)


def take() -> list[Group]:
    """One that teaches, one without signal, one too old, one without a score; in no order."""
    short = [turn("a", [1], [2, 3], version=9)]
    old = [turn("a", [1], [2, 3], version=7)]
    cut = [turn("a", [1], [4, 5, 6, 7], version=8, finish_reason="length")]
    return [
        group(trajectory(old, 1.0), trajectory(short, 0.0), slot=2),
        group(trajectory(short, 1.0), trajectory(cut, 0.0), slot=1),
        group(trajectory(short, 1.0), trajectory(short, 1.0), slot=3),
        group(trajectory(short, None), slot=4),
    ]


def built(m: Any, chosen: Settings, groups: Sequence[Group] | None = None) -> Any:
    """The batch of a take, at version 10."""
    groups = take() if groups is None else groups
    return m.build_batch(groups, chosen, policy_version=10, vocab_size=VOCAB, max_age=2)


def check_build_batch(m: Any) -> None:
    """What is dropped, what is trained, and the advantages of both attempts."""
    got = built(m, settings())
    assert got.group_ids == ("g1",)
    assert dict(got.dropped) == {"g2": "stale", "g3": "no_signal", "g4": "failed"}
    assert got.trained == ((0, 1),)
    assert [row.advantage for row in got.rows] == [0.5, -0.5]
    assert got.metrics["train/reward_mean"] == pytest.approx(4 / 6)
    assert got.metrics["train/staleness_max"] == 2
    assert got.metrics["train/truncated_share"] == pytest.approx(1 / 7)
    masked = built(m, settings(trainer={"mask_truncated": True}))
    assert masked.trained == ((0,),)
    assert [row.advantage for row in masked.rows] == [0.5]
    # Its reward pays for its KL, so its rows are there; they are not trained.
    scored = built(m, settings(trainer={"mask_truncated": True, "kl": "k1", "kl_coefficient": 0.1}))
    assert (scored.trained, len(scored.rows)) == (((0,),), 2)
    kept = built(m, settings(buffer={"drop_zero_signal": False}))
    assert kept.group_ids == ("g1", "g3")
    assert [row.advantage for row in kept.rows] == [0.5, -0.5, 0.0, 0.0]
    shaped = {"overlong_penalty": 1.0, "overlong_max_tokens": 4, "overlong_buffer_tokens": 2}
    paid = built(m, settings(trainer=shaped))
    assert [row.advantage for row in paid.rows] == [1.0, -1.0]


def check_overlong_penalties(m: Any) -> None:
    """By attempt, of what it generated."""
    shaped = {"overlong_penalty": 1.0, "overlong_max_tokens": 5, "overlong_buffer_tokens": 4}
    assert m.overlong_penalties(take()[1], settings(trainer=shaped)) == [0.25, 0.75]
    assert m.overlong_penalties(take()[1], settings()) == [0.0, 0.0]
    assert m.group_rewards(take()[1]) == [1.0, 0.0]
    assert m.group_rewards(take()[3]) == []


def check_credit_advantages(m: Any) -> None:
    """By episode, and by token of each turn."""
    one = trajectory(TREE, PARTS, episode_id="0")
    two = trajectory(TREE[:2], 0.0, episode_id="1")
    got = m.build_batch(
        [group(one, two)],
        settings(trainer={"advantage": "reward_to_go"}),
        policy_version=7,
        vocab_size=VOCAB,
        max_age=9,
    )
    found = reward_to_go(got.credit.groups[0])
    owners = [0, 0, 1]
    for row, owner in zip(got.rows, owners, strict=True):
        counts: dict[int, int] = {}
        for place, at in enumerate(row.turns.tolist()):
            token = counts.get(at, 0)
            counts[at] = token + 1
            own = [0.0] if at < 0 else found[owner][at]
            assert row.advantages[place] == pytest.approx(float(own[min(token, len(own) - 1)]))


def check_updates(m: Any) -> None:
    """Whole groups, each once a pass, in equal numbers."""
    groups = [
        group(
            trajectory([turn("a", [1], [2], version=9)], 1.0),
            trajectory([turn("a", [1], [3], version=9)], 0.0),
            slot=slot,
        )
        for slot in range(5)
    ]
    got = built(m, settings(), groups)
    assert got.updates(2) == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]]
    assert len(got.updates(9)) == 5
    twice = got.updates(2, num_epochs=2, seed=3)
    assert twice[:2] == got.updates(2)
    assert sorted(itertools.chain(*twice[2:])) == list(range(10))
    assert twice[2:] != twice[:2]
    assert all(row + 1 in own for own in twice for row in own if row % 2 == 0)


def check_with_reference(m: Any) -> None:
    """k1 comes off the rewards, one sum an episode; other kinds change no advantage."""
    for kind in ("k1", "k3"):
        chosen = settings(trainer={"kl": kind, "kl_coefficient": 0.1, "advantage": "rloo"})
        got = built(m, chosen)
        mask = got.rows.loss_mask
        reference = np.where(mask, got.rows.behavior_logprobs - 0.5, 0.0).astype(np.float32)
        rows, measured = m.with_reference(got.rows, got.credit, reference, chosen)
        assert rows.reference_logprobs.tolist() == reference.tolist()
        assert measured["train/kl"] == pytest.approx(0.5)
        # Two and four trained tokens.
        rewards = [1.0 - 0.1 * 0.5 * 2, 0.0 - 0.1 * 0.5 * 4] if kind == "k1" else [1.0, 0.0]
        wanted = [rewards[0] - rewards[1], rewards[1] - rewards[0]]
        assert [row.advantage for row in rows] == pytest.approx(wanted)


# Columns of many rows.


def random_rows(count: int = 5) -> list[Any]:
    """Of unequal length, with all numbers known."""
    random = np.random.default_rng(2)
    found = []
    for index in range(count):
        size = int(random.integers(2, 8))
        row = samples.prompt_sample(random.integers(1, VOCAB, size).tolist())
        mask = random.random(size) < 0.6
        mask[0], mask[-1] = False, True
        row.loss_mask[:] = mask
        row.advantages[:] = random.normal(size=size)
        row.temperature[:] = random.uniform(0.5, 1.0, size)
        found.append(
            dataclasses.replace(
                row, episode_id=f"e{index}", behavior_logprobs=-np.arange(size, dtype=np.float32)
            )
        )
    return found


def check_train_batch(m: Any) -> None:
    """Rows behind each other, and back."""
    rows = random_rows()
    batch = m.TrainBatch.of(rows)
    assert batch.token_ids.tolist() == [i for row in rows for i in row.token_ids.tolist()]
    assert batch.lengths == [len(row.token_ids) for row in rows]
    assert batch.num_trained_tokens == [int(row.loss_mask.sum()) for row in rows]
    assert batch.starts.tolist() == [0, *np.cumsum(batch.lengths).tolist()]
    assert batch.row(2).advantages.tolist() == rows[2].advantages.tolist()
    assert batch.row(2).episode_id == "e2"
    some = batch.select([3, 1])
    assert some.episode_ids == ("e3", "e1")
    assert some.temperature.tolist() == [*rows[3].temperature, *rows[1].temperature]
    assert len(batch.select([])) == 0
    values = np.arange(len(batch.token_ids), dtype=np.float32)
    assert batch.with_columns(advantages=values).advantages.tolist() == values.tolist()
    with pytest.raises(ValueError, match="values has shape"):
        batch.with_columns(values=values[1:])
    again = m.TrainBatch.decode(batch.encode())
    assert again.advantages.tolist() == batch.advantages.tolist()
    assert again.lengths == batch.lengths
    assert m.restored(np.ndarray, m.plain(values)).tolist() == values.tolist()
    assert m.restored(Path, m.plain(Path("a"))) == Path("a")


KEPT = [[3, 1], [], [4, 5, 6], [2]]
"""Ids among which tokens were sampled."""


def check_supports(m: Any) -> None:
    """Ragged columns: counts, some tokens, padded, joined."""
    ids = np.array([i for own in KEPT for i in own], np.int32)
    known = m.Supports.of(np.array([len(own) for own in KEPT]), ids)
    assert known.counts.tolist() == [2, 0, 3, 1]
    assert m.Supports.whole(3).counts.tolist() == [0, 0, 0]
    some = known.at(np.array([3, 0, 2]))
    assert some.counts.tolist() == [1, 2, 3]
    assert some.ids.tolist() == [2, 3, 1, 4, 5, 6]
    found, is_kept = known.padded(torch.device("cpu"))
    assert [own[kept].tolist() for own, kept in zip(found, is_kept, strict=True)] == KEPT
    joined = m.joined_supports([None, known, None], [2, 4, 1])
    assert joined is not None
    assert joined.counts.tolist() == [0, 0, 2, 0, 3, 1, 0]
    assert joined.ids.tolist() == ids.tolist()
    assert m.joined_supports([None, None], [1, 1]) is None


# Microbatches.


def check_microbatch(m: Any) -> None:
    """Every trained token once over the ranks, each with its numbers and its predictor."""
    batch = train_batch.TrainBatch.of(random_rows())
    for num_ranks, multiple in ((1, 1), (1, 8), (2, 4)):
        seen: list[int] = []
        for rank in range(num_ranks):
            context = context_parallel.ContextPlace(rank=rank, num_ranks=num_ranks)
            got = m.build_microbatch(
                batch, [3, 0, 4], torch.device("cpu"), multiple=multiple, context=context
            )
            assert len(got.token_ids_T) % multiple == 0
            places = got.targets.places_N.tolist()
            seen += places
            for n, place in enumerate(places):
                assert got.targets.token_ids_N[n] == batch.token_ids[place]
                assert got.targets.advantages_N[n] == batch.advantages[place]
                assert got.targets.behavior_logprobs_N[n] == batch.behavior_logprobs[place]
                assert got.targets.temperature_N[n] == batch.temperature[place]
                predictor = int(got.predictors_N[n])
                assert got.token_ids_T[predictor] == batch.token_ids[place - 1]
                row = int(np.searchsorted(batch.starts, place, side="right")) - 1
                assert [3, 0, 4][int(got.sequences_N[n])] == row
                assert got.row.positions[predictor] == place - 1 - batch.starts[row]
        wanted = [
            place
            for row in (3, 0, 4)
            for place in range(batch.starts[row], batch.starts[row + 1])
            if batch.loss_mask[place]
        ]
        assert sorted(seen) == sorted(wanted)
        assert got.num_trained_tokens == len(wanted)


def check_targets(m: Any) -> None:
    """Some of the tokens, in all their columns; the teacher's ids behind each."""
    batch = train_batch.TrainBatch.of(random_rows())
    top = np.arange(2 * len(batch.token_ids), dtype=np.int32).reshape(-1, 2)
    batch = batch.with_columns(teacher_top_ids=top)
    whole = m.build_microbatch(batch, [0, 1], torch.device("cpu")).targets
    ids = whole.scored_ids
    assert ids[:, 0].tolist() == whole.token_ids_N.tolist()
    assert ids[:, 1:].tolist() == top[whole.places_N.numpy()].tolist()
    part = whole.part(slice(1, 3))
    assert part.advantages_N.tolist() == whole.advantages_N[1:3].tolist()
    assert part.places_N.tolist() == whole.places_N[1:3].tolist()
    where = whole.places_N % 2 == 0
    assert whole.at(where).token_ids_N.tolist() == whole.token_ids_N[where].tolist()


def check_context_parallel(m: Any) -> None:
    """Two chunks of each sample a rank: as many from its end as from its beginning."""
    lengths = [8, 4]
    seen = []
    for rank in range(2):
        place = m.ContextPlace(rank=rank, num_ranks=2)
        own = place.places(lengths).tolist()
        seen += own
        assert sum(i if i < 8 else i - 8 for i in own) == (28 + 6) / 2
        assert [place.padded_length(n) for n in (4, 5, 8)] == [4, 8, 8]
        assert [place.row_multiple(n) for n in (1, 3, 4)] == [4, 12, 8]
    assert sorted(seen) == list(range(12))
    alone = m.ContextPlace()
    assert alone.places(lengths).tolist() == list(range(12))
    assert (alone.padded_length(5), alone.row_multiple(3)) == (5, 3)


LENGTHS = [5, 3, 9, 2, 7, 1, 4, 4, 6]


def check_packing(m: Any) -> None:
    """Each sample once, no microbatch over its budget, few of them, ranks alike."""
    packed = m.pack(LENGTHS, max_tokens=10)
    assert sorted(itertools.chain(*packed)) == list(range(len(LENGTHS)))
    assert max(sum(LENGTHS[i] for i in own) for own in packed) <= 10
    assert len(packed) <= 11 / 9 * math.ceil(sum(LENGTHS) / 10) + 1
    assert m.cost(30, 10) == pytest.approx(30 + 30 * 30 / 120)
    for num_ranks in (1, 2):
        dealt = m.deal(LENGTHS, max_tokens=10, num_ranks=num_ranks, hidden_size=4)
        flat = [own for rank in dealt for own in rank]
        assert sorted(itertools.chain(*flat)) == list(range(len(LENGTHS)))
        assert max(sum(LENGTHS[i] for i in own) for own in flat) <= 10
        assert len({len(rank) for rank in dealt}) == 1
    work = [
        sum(n + n * n / 48 for i in own for n in [LENGTHS[i]])
        for own in [list(itertools.chain(*rank)) for rank in dealt]
    ]
    wanted = max(work) / (sum(work) / len(work)) - 1
    assert m.imbalance(dealt, LENGTHS, 4) == pytest.approx(wanted)
    assert wanted < 0.2
    # By cost alone all small ones would go where the large one is not, and not fit.
    tight = [8, *[1] * 12]
    dealt = m.deal(tight, max_tokens=10, num_ranks=2, hidden_size=1)
    assert [sum(tight[i] for own in rank for i in own) for rank in dealt] == [10, 10]
    large, small = m.deal([10, 10, 3, 3], max_tokens=10, num_ranks=2, hidden_size=4)
    assert sorted(map(len, large + small)) == [1, 1, 1, 1]
    assert m.imbalance([large, small], [10, 10, 3, 3], 4) == pytest.approx(0.0)
    assert m.imbalance([[[0], [1, 2]], [[3]]], [1, 1, 2, 4], 10**9) == pytest.approx(0.0, abs=1e-6)
    assert m.imbalance([[[0]], [[1]]], [1, 3], 10**9) == pytest.approx(0.5)


# Reward models.


def check_reward_rows(m: Any) -> None:
    """Conversations of a pair, or attempts of a group; one score after the last token of each."""
    played = [
        trajectory(TREE[:2], reward, group_id=name, episode_id=str(index))
        for index, (name, reward) in enumerate((("x", 1.0), ("y", 0.0), ("x", 0.0), ("y", 0.0)))
    ]
    found = m.comparisons(played)
    assert [(one.name, one.targets) for one in found] == [("x", (1.0, 0.0)), ("y", (0.0, 0.0))]
    assert [one.differs for one in found] == [True, False]
    got = m.scored_rows(found)
    assert (got.targets, got.sets) == ([1.0, 0.0, 0.0, 0.0], [0, 0, 1, 1])
    for row in got.batch:
        assert row.token_ids[:-1].tolist() == [1, 2, 3, 4, 6, 7, 8, 9]
        assert row.loss_mask.tolist() == [False] * 8 + [True]
    names = [str(number) for number in range(2000)]
    assert sum(m.is_held_out(name, 0.1) for name in names) / 2000 == pytest.approx(0.1, abs=0.03)
    assert not any(m.is_held_out(name, 0.0) for name in names)
    assert all(m.is_held_out(name, 1.0) for name in names)


# What a step makes of rows.


def episode_of_two_rows() -> tuple[Any, Any]:
    """A truncated episode of two branches that were sampled in turns, with its logprobs under a
    reference. The first token of b earned 7, c 2, the whole 1."""
    turns = (
        turn("a", [1], [2, 3]),
        turn("b", [4], [5, 6], parent="a"),
        turn("c", [7], [8], parent="a"),
        turn("d", [9], [10, 11], parent="b", finish_reason="length"),
    )
    reward = Reward(value=1.0, turns={"c": 2.0}, tokens=(TokenReward("b", 0, 1, 7.0),))
    one = trajectory(turns, reward)
    rows = train_batch.TrainBatch.of(samples.build_samples(one))
    assert rows.behavior_logprobs is not None
    reference = np.where(rows.loss_mask, rows.behavior_logprobs - 0.5, 0.0).astype(np.float32)
    credit = batch_builder.Credit(
        groups=(scored_groups.scored_group(group(one)),), teaches=(True,), rows={0: ((0, 1),)}
    )
    return rows.with_columns(reference_logprobs=reference), credit


def check_values(m: Any) -> None:
    """One chain over both rows in the order of turns, with a value after the last token."""
    rows, credit = episode_of_two_rows()
    chosen = TrainerSettings(
        advantage="gae",
        kl="k1",
        kl_coefficient=0.1,
        critic={
            "gamma": 0.9,
            "gae_lambda": 0.8,
            "normalizes_advantages": False,
            "bootstrap": "cut_answers",
        },
    )
    assert m.cut_rows(rows, credit, chosen.critic) == [1]
    assert m.cut_rows(rows, credit, CriticSettings()) == []
    values = np.random.default_rng(0).normal(size=len(rows.token_ids)).astype(np.float32)
    got, targets, metrics = m.with_values(rows, credit, values, {1: 1.5}, chosen)
    order = [int(np.flatnonzero(rows.token_ids == i)[0]) for i in (2, 3, 5, 6, 8, 10, 11)]
    earned = np.array([0.0, 0.0, 7.0, 0.0, 2.0, 0.0, 1.0]) - 0.1 * 0.5
    known = [*values[order].astype(np.float64).tolist(), 1.5]
    errors = [r + 0.9 * known[k + 1] - known[k] for k, r in enumerate(earned)]
    wanted = [
        math.fsum(0.72 ** (later - k) * errors[later] for later in range(k, 7)) for k in range(7)
    ]
    assert got.advantages[order] == pytest.approx(wanted, abs=1e-5)
    assert targets.returns[order] == pytest.approx(np.array(wanted) + known[:7], abs=1e-5)
    assert np.flatnonzero(targets.loss_mask).tolist() == sorted(order)
    assert metrics["train/kl_penalty_mean"] == pytest.approx(0.05 * 7)


def check_proximal(m: Any) -> None:
    """Weights of each sequence by its own tokens; none of what is imitated."""
    batch = train_batch.TrainBatch.of(random_rows())
    batch = dataclasses.replace(batch, is_imitated=(False, True, False, False, False))
    assert batch.behavior_logprobs is not None
    drift = np.random.default_rng(1).normal(0.1, 0.3, len(batch.token_ids)).astype(np.float32)
    proximal = batch.behavior_logprobs + drift
    chosen = TrainerSettings(proximal="recompute", correction="geometric_tis", correction_cap=1.02)
    got, _ = m.with_proximal(batch, proximal, chosen, rows=[0, 1, 2])
    assert got.proximal_logprobs.tolist() == proximal.tolist()
    for index, row in enumerate(got):
        mask = row.loss_mask
        own = drift[batch.starts[index] : batch.starts[index + 1]][mask]
        weight = min(math.exp(float(own.mean())), 1.02) if index in (0, 2) else 1.0
        assert row.correction[mask] == pytest.approx(weight, abs=1e-5)
        assert (row.correction[~mask] == 1.0).all()


def check_value_targets(m: Any) -> None:
    """The policy's rows keep their loss mask; what is no target has no return."""
    rows, _ = episode_of_two_rows()
    column = np.arange(len(rows.token_ids), dtype=np.float32)
    is_target = rows.loss_mask & (column % 2 == 1)
    assert is_target.any()
    assert (rows.loss_mask & ~is_target).any()
    targets = dataclasses.replace(
        rows.with_columns(values=column / 2, returns=column), loss_mask=is_target
    )
    got = m.with_value_targets(rows, targets)
    assert got.loss_mask.tolist() == rows.loss_mask.tolist()
    assert got.values.tolist() == (column / 2).tolist()
    assert np.isnan(got.returns).tolist() == (~is_target).tolist()
    assert got.returns[is_target].tolist() == column[is_target].tolist()


def with_a_head(**critic: Any) -> TrainerSettings:
    """Of a head whose values go at most 0.2 from what they were."""
    chosen = {"kind": "head", "value_coefficient": 0.25, "learning_rate": 0.5} | critic
    return TrainerSettings(advantage="gae", critic=chosen, weight_decay=0.1)


def check_head_update(m: Any) -> None:
    """Loss, gradient of the head and share of the hidden states' gradient, in float64; row 0 is
    not of this update, and one of the others' tokens is no target."""
    generator = np.random.default_rng(5)
    rows, _ = episode_of_two_rows()
    rows = train_batch.TrainBatch.of([*rows, *rows, *rows])
    size = len(rows.token_ids)
    returns = generator.normal(size=size).astype(np.float32)
    before = generator.normal(size=size).astype(np.float32)
    chosen = [1, 2, 3, 5]
    first = int(np.flatnonzero(rows.loss_mask[rows.starts[2] :])[0] + rows.starts[2])
    returns[first] = np.nan
    rows = rows.with_columns(values=before, returns=returns)
    places = np.concatenate([np.arange(*rows.starts[row : row + 2]) for row in chosen])
    places = places[rows.loss_mask[places]]
    hidden = generator.normal(size=(len(places), 3))
    given = generator.normal(size=(len(places), 3))
    weight, bias = np.array([0.3, -0.2, 0.1]), 0.05
    scale = float(np.isfinite(returns[places]).sum())
    wanted_head, wanted_hidden, loss = np.zeros(4), given.copy(), 0.0
    for index, place in enumerate(places.tolist()):
        if place == first:
            continue
        value = float(hidden[index] @ weight + bias)
        old, target = float(before[place]), float(returns[place])
        near = old + min(0.2, max(-0.2, value - old))
        errors = ((value - target) ** 2, (near - target) ** 2)
        loss += 0.5 * max(errors) / scale
        slope = (value - target) / scale if errors[0] >= errors[1] else 0.0
        wanted_head += slope * np.append(hidden[index], 1.0)
        wanted_hidden[index] += 0.25 * slope * weight
    for trains_policy in (True, False):
        head = value_head.ValueHead(3, with_a_head(), num_updates=5)
        with torch.no_grad():
            head.weight.copy_(torch.tensor(weight)[None])
            head.bias.fill_(bias)
        update = m.HeadUpdate(head, rows, with_a_head(), rows=chosen, trains_policy=trains_policy)
        parts, begin = [], 0
        for members in (chosen[:1], chosen[1:]):
            packed = microbatch.build_microbatch(rows, members, torch.device("cpu"))
            where = slice(begin, begin + packed.num_trained_tokens)
            begin = where.stop
            own = torch.tensor(hidden[where]).float(), torch.tensor(given[where]).float()
            parts.append(update.add(packed, *own))
        got = torch.cat(parts)
        expected = wanted_hidden if trains_policy else given
        assert got.double().numpy() == pytest.approx(expected, abs=1e-6)
        assert head.weight.grad is not None
        assert head.bias.grad is not None
        found = torch.cat([head.weight.grad[0], head.bias.grad]).double().numpy()
        assert found == pytest.approx(wanted_head, abs=1e-6)
        update.sum_gradients()
        update.step()
        assert update.metrics == {
            "train/value_loss": pytest.approx(loss, abs=1e-6),
            "train/critic_grad_norm": pytest.approx(np.linalg.norm(wanted_head), abs=1e-6),
            "train/critic_learning_rate": 0.5,
        }


def check_value_head(m: Any) -> None:
    """Adam with decoupled decay of the matrix alone, clipped, over a warm-up, in float64; what a
    checkpoint held goes on as if it had never been away."""
    settings = with_a_head(max_grad_norm=0.5, warmup_steps=2)
    gradients = np.array([[0.3, -0.4, 1.2], [0.1, 0.0, -0.2], [2.0, 1.0, -1.0]])
    head = m.ValueHead(2, settings, num_updates=5)
    assert head.values(torch.ones(2, 2)).tolist() == [0.0, 0.0]
    weights, first, second = np.zeros(3), np.zeros(3), np.zeros(3)
    for number, gradient in enumerate(gradients, 1):
        norm = float(np.linalg.norm(gradient))
        clipped = gradient * min(1.0, 0.5 / (norm + 1e-6))
        rate = 0.5 * min(1.0, number / 2)
        first = 0.9 * first + 0.1 * clipped
        second = 0.999 * second + 0.001 * clipped**2
        weights = weights * (1.0 - rate * 0.1 * np.array([1.0, 1.0, 0.0]))
        hat = (second / (1 - 0.999**number)) ** 0.5
        weights = weights - rate * first / (1 - 0.9**number) / (hat + 1e-8)
        if number == 3:
            away, state = head, head.sharded_state(has_moments=True)
            head = m.ValueHead(2, settings, num_updates=5)
            head.put_state({name: one.data for name, one in state.items()}, num_updates=2)
            assert away.num_updates == head.num_updates == 2
        head.zero_grad()
        loss = (head.values(torch.eye(3)[:, :2]) * torch.tensor([1.0, 1.0, 0.0])).sum() * 0.0
        loss.backward()
        head.weight.grad += torch.tensor(gradient[:2]).float()
        head.bias.grad += float(gradient[2])
        assert head.sum_gradients() == pytest.approx(norm, rel=1e-5)
        assert head.step(norm) == pytest.approx(rate)
        got = torch.cat([head.weight[0], head.bias]).detach().double().numpy()
        assert got == pytest.approx(weights, abs=1e-5)
    assert head.values(torch.ones(1, 2)).item() == pytest.approx(weights.sum(), abs=1e-5)
    assert head.described == m.described(2) == {"kind": "head", "hidden_size": 2}
    head.zero_grad()
    (head.values(torch.ones(1, 2)) * float("nan")).sum().backward()
    try:
        head.sum_gradients()
    except FloatingPointError:
        return
    raise AssertionError("a gradient that is no number is refused")


def check_moved_reference(m: Any) -> None:
    """A moving average; at 0 a copy."""
    for decay in (0.9, 0.0):
        reference, policy = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        pairs = zip(reference.parameters(), policy.parameters(), strict=True)
        wanted = [decay * r.detach().double() + (1 - decay) * p.detach().double() for r, p in pairs]
        m.move_reference(reference, policy, decay=decay)
        for parameter, expected in zip(reference.parameters(), wanted, strict=True):
            assert torch.allclose(parameter.double(), expected, atol=1e-6)


def several(module: Any, check: Any, **mutants: tuple[str, ...]) -> list[Held]:
    """Functions of one check, each with one mutant; `_` in a class's function is a dot."""
    return [held(module, name.replace("__", "."), check, one) for name, one in mutants.items()]


HELD: tuple[Held, ...] = (
    held(
        samples,
        "build_samples",
        check_build_samples,
        ("owned |= new.keys()", "pass"),
        ("loss_mask[:1] = False", "pass", "_row"),
        ("start + low : start + high", "start : end", "_row"),
        ("if not turn.is_behavior_known", "if False", "_trainable_spans"),
        ("turn.sampling.temperature or 1.0", "1.0", "_row"),
        ("temperature[~loss_mask] = 1.0", "pass", "_row"),
    ),
    *several(
        samples,
        check_sample,
        Sample__num_tokens=("len(self.token_ids)", "len(self.token_ids) - 1"),
        Sample__num_trained_tokens=("self.loss_mask.sum()", "self.loss_mask.size"),
        Sample__advantage=("self.advantages[self.loss_mask]", "self.advantages"),
        Sample__oldest_version=("self.loss_mask].min()", "self.loss_mask].max()"),
    ),
    *several(
        samples,
        check_row_ends,
        padded=("[ends[0], column, ends[1]]", "[ends[1], column, ends[0]]"),
        with_one_more=("longer.loss_mask[-1] = True", "pass"),
        prompt_sample=("np.arange(num) > 0", "np.arange(num) >= 0"),
        unknown_routes=("0xFF", "0xFE"),
    ),
    *several(
        samples,
        check_limits,
        is_cut=("branch[-1]", "branch[0]"),
        is_truncated=('trajectory.episode.outcome == "truncated" or ', ""),
        oldest_trained_version=(" if t.is_behavior_known", ""),
    ),
    *several(
        scored_groups,
        check_scored_group,
        scored=("for t in group.trajectories", "for t in group.trajectories[:1]"),
        source_of=("len(sources) == 1", "len(sources) > 1"),
    ),
    held(
        scored_groups,
        "scored_group",
        check_scored_group,
        ("key=lambda span: span.start", "key=lambda span: -span.start", "_check_parts"),
        ("parts.branches.get(turn.turn_id, 0.0)", "0.0", "_scored_episode"),
        ("if turn.choice_index <= choice", "if turn.choice_index < choice", "_requests"),
    ),
    held(
        scored_groups,
        "reward_metrics",
        check_reward_metrics,
        ("group.source == source", "group.source"),
        ("episode.total for episode", "episode.reward for episode"),
    ),
    held(
        batch_builder,
        "build_batch",
        check_build_batch,
        ("> max_age", "> max_age + 1", "_reason_to_drop"),
        ("> max_age", ">= max_age", "_reason_to_drop"),
        (" and not has_signal", "", "_reason_to_drop"),
        ("if not _is_masked(trajectory, settings)", "", "_without_masked"),
        ("group.rewards - taken_off", "group.rewards + taken_off"),
        ("key=lambda group: group.slot", "key=lambda group: -group.slot"),
    ),
    held(
        batch_builder,
        "overlong_penalties",
        check_overlong_penalties,
        ("num_generated_tokens(trajectory)", "len(trajectory.turns)"),
    ),
    held(
        batch_builder,
        "group_rewards",
        check_overlong_penalties,
        ("[t.episode.reward.value for", "[1.0 for"),
    ),
    held(
        batch_builder,
        "Credit.advantages",
        check_credit_advantages,
        (
            "column[turns == place] = value[place]",
            "column[turns >= place] = value[0][0]",
            "_fill_turns",
        ),
        ("_fill_turns(column[where], rows.turns[where], value)", "column[where] = value[0][0]"),
    ),
    held(
        batch_builder,
        "Batch.updates",
        check_updates,
        ("len(groups) * index // count", "index * (len(groups) // count)"),
        ("order = generator.permutation(len(groups))", "pass"),
        ("[groups[index] for index in order.tolist()]", "groups[::-1]"),
    ),
    held(
        batch_builder,
        "with_reference",
        check_with_reference,
        ("trainer.kl_coefficient * sum", "sum"),
        ("rewards[index][place] -= penalties", "rewards[index][place] += penalties"),
        ("gaps[a:b][mask[a:b]].sum()", "gaps[a:b][mask[a:b]].mean()"),
        ('trainer.kl != "k1" or', 'trainer.kl == "none" or'),
    ),
    *several(
        train_batch,
        check_train_batch,
        TrainBatch__of=("np.cumsum([0, *lengths]", "np.cumsum([*lengths, 0]"),
        TrainBatch__lengths=("np.diff(self.starts)", "self.starts[1:]"),
        TrainBatch__num_trained_tokens=("np.cumsum(self.loss_mask)", "np.cumsum(~self.loss_mask)"),
        TrainBatch__row=("self.starts[index + 1]", "self.starts[index + 1] - 1"),
        TrainBatch__select=("for index in rows", "for index in sorted(rows)"),
        TrainBatch__with_columns=("dataclasses.replace(self, **changed)", "self"),
        TrainBatch__encode=("self, enc_hook", "self.select([0]), enc_hook"),
        TrainBatch__decode=("dec_hook=restored)", "dec_hook=restored).select([0])"),
        plain=("value.tobytes()", "value[::-1].tobytes()"),
        restored=("reshape(shape)", "reshape(shape)[::-1]"),
    ),
    *several(
        supports,
        check_supports,
        Supports__of=("np.cumsum(counts, dtype=np.int64)", "np.arange(1, len(counts) + 1)"),
        Supports__whole=("num_tokens + 1", "num_tokens"),
        Supports__counts=("np.diff(self.starts)", "self.starts[1:]"),
        Supports__at=("self.starts[:-1][places]", "self.starts[:-1][places] * 0"),
        Supports__padded=("ids[is_kept] = self.ids", "pass"),
        joined_supports=("Supports.whole(length)", "Supports.whole(0)"),
    ),
    held(
        microbatch,
        "build_microbatch",
        check_microbatch,
        ("local[trained - 1]", "local[trained]", "_predictors"),
        ("batch.temperature[source[trained]]", "batch.temperature[trained]"),
        ("lengths)[trained]", "lengths)[trained - 1] * 0"),
        ("len(all_trained)", "len(trained)"),
        ("np.arange(start, end)", "np.arange(start, end)[::-1]", "_sources"),
    ),
    *several(
        microbatch,
        check_targets,
        Targets__scored_ids=(
            "self.token_ids_N[:, None], self",
            "self.token_ids_N[:, None] * 0, self",
        ),
        Targets__part=("self._tensors(where)", "self"),
        Targets__at=("self._tensors(where)", "self._tensors(~where)"),
    ),
    *several(
        context_parallel,
        check_context_parallel,
        ContextPlace__padded_length=("-length % (2 * self.num_ranks)", "-length % self.num_ranks"),
        ContextPlace__row_multiple=("2 * self.num_ranks, ", "1, "),
        ContextPlace__places=("num_chunks - 1 - self.rank", "self.num_ranks + self.rank"),
    ),
    held(
        packing,
        "pack",
        check_packing,
        ("if length <= room", "if length <= room + 1"),
        ("rooms[place] -= length", "pass"),
        ("for place, room in enumerate(rooms)", "for place, room in ()"),
    ),
    held(packing, "cost", check_packing, ("12.0 * hidden_size", "hidden_size")),
    held(
        packing,
        "deal",
        check_packing,
        ("r: (totals[r], r)", "r: (-totals[r], r)"),
        ("rooms[place] >= lengths[index]", "True", "_spread"),
    ),
    held(packing, "imbalance", check_packing, ("max(totals) / mean", "min(totals) / mean")),
    *several(
        reward_rows,
        check_reward_rows,
        comparisons=("episode.metadata.get(PAIR) or episode.group_id or ", ""),
        Comparison__differs=("> 1", "> 0"),
        is_held_out=("share * 2**64", "share * 2**63"),
    ),
    held(
        reward_rows,
        "scored_rows",
        check_reward_rows,
        ("index for index, one", "0 for index, one"),
        ("longer.num_tokens - 1", "longer.num_tokens - 2", "_ending"),
    ),
)

STEPS: tuple[Held, ...] = (
    held(
        critic_update,
        "with_values",
        check_values,
        ("behind[last_row] if goes_on(episode, critic) else 0.0", "0.0"),
        ("rewards_on(chain, episode) - penalties", "rewards_on(chain, episode) + penalties"),
        ("np.lexsort((everywhere, by_turn))", "np.argsort(everywhere)", "_chain"),
        ("paid.append(float(penalties[chain.places].sum()))", "paid.append(0.0)"),
    ),
    held(critic_update, "cut_rows", check_values, ("and goes_on(episode, settings)", "")),
    held(
        critic_update,
        "with_value_targets",
        check_value_targets,
        ("targets.loss_mask", "rows.loss_mask"),
    ),
    held(
        head_update,
        "HeadUpdate.add",
        check_head_update,
        ("self._coefficient * leaf.grad", "leaf.grad"),
        ("targets.values_N[where]", "targets.returns_N[where]"),
        ("losses.sum() / self._scale", "losses.mean()"),
        ("~np.isnan(batch.returns)", "batch.loss_mask", "HeadUpdate.__init__"),
        ("if trains_policy else 0.0", "", "HeadUpdate.__init__"),
    ),
    held(
        value_head,
        "ValueHead.step",
        check_value_head,
        ("norm + 1e-6", "1.0"),
        ("increment=1", "increment=2"),
        ('"wd_mult": 0.0', '"wd_mult": 1.0', "ValueHead.__init__"),
        ("critic.warmup_steps,", "0,", "ValueHead.__init__"),
        ("not math.isfinite(norm)", "False", "ValueHead.sum_gradients"),
        ("whole[-1:]", "whole[:1]", "ValueHead.sum_gradients"),
        ("float(num_updates)", "1.0", "ValueHead.put_state"),
        ("held.get(moment, ", "(", "ValueHead.sharded_state"),
    ),
    held(
        recompute_logprobs,
        "with_proximal",
        check_proximal,
        ("batch.is_imitated[row] or ", ""),
        ("cap=settings.correction_cap", "cap=1e9"),
        (
            "weights[start:end][mask] = correction.weights",
            "weights[start:end] = correction.weights[0]",
        ),
    ),
    held(
        reference_model,
        "move_reference",
        check_moved_reference,
        ("1.0 - decay", "decay"),
    ),
)
"""Of engine/train/step, those that compute columns or weights by a formula of their own."""

WITHOUT_NUMBERS = {"teacher_context": "ids of a tokenizer: test_distillation"}
"""Modules whose functions compute nothing, each with where they are held."""


@pytest.mark.parametrize("one", [*HELD, *STEPS], ids=str)
def test_a_function_gives_what_it_should_and_no_mutant_does(one: Held) -> None:
    """Then each wrong variant fails the same check."""
    one.check(one.module)
    for mutant in one.mutants:
        assert not passes(one, mutant), f"nothing tells {mutant.right!r} from {mutant.wrong!r}"


def test_every_function_is_held() -> None:
    """A new one needs a check and a mutant."""
    names = [item.name for item in pkgutil.iter_modules(data.__path__)]
    wanted = {
        f"{name}.{function}"
        for name in names
        if name not in WITHOUT_NUMBERS
        for function in public_functions_of(importlib.import_module(f"{data.__name__}.{name}"))
    }
    known = {str(one) for one in HELD}
    assert wanted - known == set(), "without a check: a line in HELD is due"
    assert known - wanted == set(), "no longer there"
    assert all(one.mutants for one in HELD)
