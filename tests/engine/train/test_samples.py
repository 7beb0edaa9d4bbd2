"""Which tokens are trained, in which row."""

from collections.abc import Callable

import numpy as np
import pytest

from outloop.buffer.errors import RecordError
from outloop.buffer.records import Sampling, Trajectory, Turn, VersionSpan
from outloop.engine.train.data.samples import build_samples, oldest_trained_version

MakeTurn = Callable[..., Turn]
MakeTrajectory = Callable[..., Trajectory]


def test_a_row_is_what_the_server_saw(make_turn: MakeTurn, make_trajectory: MakeTrajectory) -> None:
    """One branch of two turns: ids in order, outputs trained, tool result context."""
    first = make_turn("a", prompt=[1, 2], output=[3, 4], logprobs=[-0.1, -0.2], version=5)
    second = make_turn("b", parent="a", prompt=[6], output=[7], logprobs=[-0.3], version=6)
    (sample,) = build_samples(make_trajectory([first, second]))
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 6, 7]
    assert sample.loss_mask.tolist() == [False, False, True, True, False, True]
    assert sample.behavior_logprobs is not None
    assert np.allclose(sample.behavior_logprobs, [0, 0, -0.1, -0.2, 0, -0.3])
    assert sample.policy_versions.tolist() == [-1, -1, 5, 5, -1, 6]
    assert sample.oldest_version == 5
    assert not sample.advantages.any()


def test_a_shared_turn_is_trained_once(
    make_turn: MakeTurn, make_trajectory: MakeTrajectory
) -> None:
    """The prefix of two branches is trained in the first and is context in the second."""
    root = make_turn("root", prompt=[1], output=[2, 3])
    left = make_turn("left", parent="root", prompt=[4], output=[5])
    right = make_turn("right", parent="root", prompt=[6, 7], output=[8])
    first, second = build_samples(make_trajectory([root, left, right]))
    assert first.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert first.loss_mask.tolist() == [False, True, True, False, True]
    assert second.token_ids.tolist() == [1, 2, 3, 6, 7, 8]
    assert second.loss_mask.tolist() == [False, False, False, False, False, True]


def test_every_trainable_token_is_trained_exactly_once(
    make_turn: MakeTurn, make_trajectory: MakeTrajectory
) -> None:
    """Over a random tree of turns, trained tokens are the union of loss_spans, each once."""
    generator = np.random.default_rng(3)
    for _ in range(50):
        turns: list[Turn] = []
        for index in range(int(generator.integers(1, 9))):
            parent = (
                str(generator.integers(0, index)) if index and generator.random() < 0.8 else None
            )
            size = int(generator.integers(1, 4))
            # Every token carries its turn's number, so rows can be read back.
            output = [100 * (index + 1) + position for position in range(size)]
            turns.append(make_turn(str(index), parent=parent, prompt=[1], output=output))
        samples = build_samples(make_trajectory(turns))
        trained = [int(i) for s in samples for i in s.token_ids[s.loss_mask]]
        assert sorted(trained) == sorted(int(i) for turn in turns for i in turn.output_ids)


def test_tokens_outside_loss_spans_are_context(
    make_turn: MakeTurn, make_trajectory: MakeTrajectory
) -> None:
    """Tokens after a stop, or undelivered, carry no loss, logprob or version."""
    turn = make_turn("a", prompt=[1], output=[2, 3, 4], loss_spans=((0, 2),))
    (sample,) = build_samples(make_trajectory([turn]))
    assert sample.loss_mask.tolist() == [False, True, True, False]
    assert sample.policy_versions[3] == -1


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0),
        Sampling(temperature=1.0, top_p=0.9),
        Sampling(temperature=1.0, repetition_penalty=1.1),
    ],
)
def test_a_distribution_that_cannot_be_rebuilt_is_not_trained(
    sampling: Sampling, make_turn: MakeTurn, make_trajectory: MakeTrajectory
) -> None:
    """Greedy, truncated and penalised turns yield no sample."""
    turn = make_turn("a", sampling=sampling)
    assert build_samples(make_trajectory([turn])) == ()


def test_the_temperature_is_recorded_per_token(
    make_turn: MakeTurn, make_trajectory: MakeTrajectory
) -> None:
    """Trained tokens carry their turn's temperature, context 1."""
    hot = make_turn("a", prompt=[1], output=[2], sampling=Sampling(temperature=0.5))
    cold = make_turn("b", parent="a", prompt=[3], output=[4], sampling=Sampling(temperature=2.0))
    (sample,) = build_samples(make_trajectory([hot, cold]))
    assert sample.temperature.tolist() == [1.0, 0.5, 1.0, 2.0]


def test_an_episode_without_turns_yields_nothing(make_trajectory: MakeTrajectory) -> None:
    """It counts in statistics only."""
    assert build_samples(make_trajectory([])) == ()


def test_an_evaluation_is_never_trained(
    make_turn: MakeTurn, make_trajectory: MakeTrajectory
) -> None:
    """purpose = eval is refused."""
    with pytest.raises(RecordError, match="eval"):
        build_samples(make_trajectory([make_turn("a")], purpose="eval"))


def test_missing_logprobs_are_allowed_for_sft_only(
    make_turn: MakeTurn, make_trajectory: MakeTrajectory
) -> None:
    """SFT rows have none; an RL episode without them is refused."""
    turn = make_turn("a", prompt=[1], output=[2, 3], logprobs=None)
    (sample,) = build_samples(make_trajectory([turn], purpose="sft"))
    assert sample.behavior_logprobs is None
    assert sample.loss_mask.tolist() == [False, True, True]
    with pytest.raises(RecordError, match="behavior_logprobs"):
        build_samples(make_trajectory([turn]))


def test_the_oldest_trained_version_looks_at_trained_tokens_only(
    make_turn: MakeTurn, make_trajectory: MakeTrajectory
) -> None:
    """A turn outside the loss does not make an episode stale."""
    old = make_turn("a", output=[2, 3], version=1, loss_spans=())
    new = make_turn("b", parent="a", output=[4], version=4)
    assert oldest_trained_version(make_trajectory([old, new])) == 4
    assert oldest_trained_version(make_trajectory([])) is None


def test_a_token_is_as_old_as_what_it_attended_to(
    make_turn: MakeTurn, make_trajectory: MakeTrajectory
) -> None:
    """A turn that went on across a publish is old to its end: its keys and values were kept."""
    spans = (
        VersionSpan(policy_version=1, start=0, end=1),
        VersionSpan(policy_version=4, start=1, end=2),
    )
    turn = make_turn("a", prompt=[1], output=[2, 3], spans=spans, loss_spans=((1, 2),))
    (sample,) = build_samples(make_trajectory([turn]))
    assert sample.policy_versions.tolist() == [-1, -1, 1]
    assert oldest_trained_version(make_trajectory([turn])) == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"temperature": 0.0},
        {"top_p": 0.9},
        {"top_k": 20},
        {"min_p": 0.05},
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"constraint": "json_schema:0"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_each_parameter_that_changes_the_distribution_masks_its_turn(
    changed: dict[str, object], make_turn: MakeTurn, make_trajectory: MakeTrajectory
) -> None:
    """Alone, and only its own turn: the next one is trained (6.1 rule 2)."""
    odd = make_turn("a", output=[3, 4], sampling=Sampling(**{"temperature": 1.0} | changed))
    plain = make_turn("b", parent="a", prompt=[5], output=[6], version=4)
    trajectory = make_trajectory([odd, plain])
    (sample,) = build_samples(trajectory)
    assert sample.token_ids[sample.loss_mask].tolist() == [6]
    assert oldest_trained_version(trajectory) == 4
    assert build_samples(make_trajectory([odd])) == ()


def test_the_oldest_version_is_that_of_the_oldest_turn(
    make_turn: MakeTurn, make_trajectory: MakeTrajectory
) -> None:
    """Not the newest turn's, and not the last one's."""
    turns = [make_turn("a", version=5), make_turn("b", parent="a", version=2)]
    assert oldest_trained_version(make_trajectory(turns)) == 2
    turns = [make_turn("a", version=2), make_turn("b", parent="a", version=5)]
    assert oldest_trained_version(make_trajectory(turns)) == 2


def test_the_first_token_of_a_row_is_never_trained(
    make_turn: MakeTurn, make_trajectory: MakeTrajectory
) -> None:
    """A turn without a prompt: nothing predicts its first token."""
    (sample,) = build_samples(make_trajectory([make_turn("a", prompt=[], output=[3, 4])]))
    assert sample.loss_mask.tolist() == [False, True]
