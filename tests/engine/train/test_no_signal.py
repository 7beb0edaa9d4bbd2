"""What the terminal says of steps that teach nothing."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from outloop.buffer.records import Group, Outcome, Refusals, Trajectory, Turn
from outloop.buffer.settings import Settings
from outloop.engine.train.data.batch_builder import build_batch
from outloop.engine.train.no_signal import SignalWatch

REFUSED = Refusals(counts={"context_length_exceeded": 2}, last="prompt is too long: raise it")


def played(
    make_turn: Callable[..., Turn],
    make_trajectory: Callable[..., Trajectory],
    reward: float,
    *,
    turns: int = 1,
    finish_reason: str = "stop",
    outcome: Outcome = "completed",
    refusals: Refusals | None = None,
    output: Sequence[int] = (3, 4),
) -> Trajectory:
    """An episode that ended in this way."""
    made = [make_turn("a", output=output, finish_reason=finish_reason)] if turns else []
    one = make_trajectory(made, reward=reward)
    episode = replace(one.episode, outcome=outcome, refusals=refusals or Refusals())
    return replace(one, episode=episode)


@pytest.mark.parametrize(
    ("sections", "ways", "sentence"),
    [
        (
            {"sampling": {"max_new_tokens": 2}},
            [{"finish_reason": "length"}] * 4,
            "4 of 4 answers were cut at sampling.max_new_tokens=2; raise it",
        ),
        (
            {"sampling": {"max_new_tokens": 2}},
            [{"finish_reason": "length", "outcome": "failed"}] * 3 + [{}],
            "3 of 4 answers were cut at sampling.max_new_tokens=2; raise it",
        ),
        (
            {"model": {"path": "m", "max_context_tokens": 4}},
            [{"finish_reason": "length"}] * 4,
            "4 of 4 answers were cut at model.max_context_tokens=4; raise it",
        ),
        (
            {},
            [{"finish_reason": "length"}] * 4,
            "4 of 4 answers were cut at the agent's own limit of 256 tokens",
        ),
        (
            {},
            [{"turns": 0, "refusals": REFUSED}] * 4,
            "the router refused every call of 4 of 4 episodes: context_length_exceeded: prompt is "
            "too long: raise it",
        ),
        ({}, [{"turns": 0}] * 4, "4 of 4 episodes made no model call"),
        ({}, [{"outcome": "failed"}] * 4, "4 of 4 episodes failed by their agent; `outloop episod"),
        ({}, [{"outcome": "truncated"}] * 4, "4 of 4 episodes were ended by a limit"),
        ({}, [{}] * 4, "all rewards were equal in every group (mean reward 0.000). Check the ver"),
    ],
)
def test_a_step_without_signal_names_its_cause(
    make_turn: Callable[..., Turn],
    make_trajectory: Callable[..., Trajectory],
    sections: dict[str, Any],
    ways: list[dict[str, Any]],
    sentence: str,
) -> None:
    """After three steps in a row, and again after three more."""
    settings = Settings(**({"model": {"path": "m"}} | sections))
    episodes = tuple(played(make_turn, make_trajectory, 0.0, **way) for way in ways)
    group = Group(group_id="g", slot=0, task_id="t", group_size=4, trajectories=episodes)
    batch = build_batch([group], settings, policy_version=0, vocab_size=16)
    watch = SignalWatch(settings, Path("runs/r"))
    said = [watch.look(batch, [group]) for _ in range(6)]
    assert said[0] == said[1] == said[3] == said[4] == ""
    assert said[2].startswith("nothing was learned in 3 steps: ")
    assert sentence in said[2]
    assert said[5].startswith("nothing was learned in 6 steps: ")


def test_a_filter_that_drops_every_group_is_named(
    make_turn: Callable[..., Turn],
    make_trajectory: Callable[..., Trajectory],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rewards differ, and still nothing is trained."""
    (tmp_path / "drops_all.py").write_text("def keep(group):\n    return 'never'\n")
    monkeypatch.syspath_prepend(tmp_path)
    settings = Settings(model={"path": "m"}, buffer={"filter_path": "drops_all:keep"})
    group = Group(
        group_id="g",
        slot=0,
        task_id="t",
        group_size=2,
        trajectories=tuple(played(make_turn, make_trajectory, reward) for reward in (0.0, 1.0)),
    )
    batch = build_batch([group], settings, policy_version=0, vocab_size=16)
    watch = SignalWatch(settings, Path("runs/r"))
    said = [watch.look(batch, [group]) for _ in range(3)]
    assert "dropped (1 as filtered): buffer.filter_path='drops_all:keep'" in said[2]


def test_cut_answers_that_hold_a_learning_run_back_are_named_once(
    make_turn: Callable[..., Turn], make_trajectory: Callable[..., Trajectory]
) -> None:
    """Most of the episodes with the lowest reward were cut: said after three steps, once."""
    settings = Settings(model={"path": "m"}, sampling={"max_new_tokens": 2})
    cut, whole = {"finish_reason": "length"}, {"output": (3,)}
    ways: list[tuple[float, dict[str, Any]]] = [(0.0, cut), (0.0, cut), (0.0, whole), (1.0, whole)]
    group = Group(
        group_id="g",
        slot=0,
        task_id="t",
        group_size=4,
        trajectories=tuple(
            played(make_turn, make_trajectory, reward, **way) for reward, way in ways
        ),
    )
    batch = build_batch([group], settings, policy_version=0, vocab_size=16)
    watch = SignalWatch(settings, Path("runs/r"))
    said = [watch.look(batch, [group]) for _ in range(9)]
    assert [number for number, words in enumerate(said) if words] == [2]
    assert "2 of 3 answers were cut at sampling.max_new_tokens=2" in said[2]
