"""`episode.score(...)`, and what becomes of what `play` returns."""

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from outloop.buffer.errors import RecordError, SettingsError
from outloop.buffer.records import Reward, TokenReward
from outloop.envs.rollout.episode_result import as_reward
from outloop.envs.rollout.episode_rewards import Scores

PlayWith = Callable[..., Any]


def scores(*, takes_turns: bool = True, **weights: float) -> Scores:
    """An episode's scores in a run that keeps those of turns."""
    return Scores(takes_turns=takes_turns, weights=weights)


def test_a_returned_reward_wins_and_components_join_it() -> None:
    """The value is what play returned; scores by name stay beside it."""
    given = scores()
    given.add(0.5, None, None, None, {"form": 1.0})
    assert given.reward(2.0, "play") == Reward(value=2.0, components={"form": 1.0})
    assert given.reward(None, "play") == Reward(value=0.5, components={"form": 1.0})


def test_components_alone_add_up_with_their_weights() -> None:
    """A component without a weight counts once."""
    given = scores(form=0.1)
    given.add(None, None, None, None, {"form": 1.0, "right": 2.0})
    assert given.reward(None, "play").value == pytest.approx(2.1)
    assert as_reward({"form": 1, "right": np.float32(2)}, {"form": 0.1}).value == pytest.approx(2.1)


NUMBERS = [
    1,
    np.float64(1.0),
    np.float32(1.0),
    np.float16(1.0),
    np.int64(1),
    np.uint8(1),
    np.array(1.0),
    np.mean([1.0, 1.0]),
    Decimal("1.0"),
    Fraction(2, 2),
]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda one: f"{type(one).__name__}-{one!r:.40}")
def test_a_number_of_any_library_is_a_reward(number: Any) -> None:
    """It becomes a plain float wherever a score is given, so that it can be encoded."""
    given = scores()
    given.add(number, None, None, None, {"form": number})
    given.add(number, "a", None, None, {})
    given.add(number, None, "b", None, {})
    given.add(number, "a", None, (np.int64(0), np.int8(2)), {})
    expected = Reward(
        value=1.0,
        components={"form": 1.0},
        turns={"a": 1.0},
        branches={"b": 1.0},
        tokens=(TokenReward("a", 0, 2, 1.0),),
    )
    for reward in (given.reward(None, "play"), given.reward(number, "play")):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(reward), type=Reward) == expected
    for reward in (as_reward(number, {}), as_reward(Reward(value=number), {})):
        assert msgspec.msgpack.encode(reward) == msgspec.msgpack.encode(Reward(value=1.0))
    mapped = as_reward({"right": number, np.str_("form"): number}, {})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(mapped), type=Reward).value == 2.0


@pytest.mark.parametrize(
    "value",
    [
        np.bool_(True),
        np.array([1.0]),
        np.ma.masked,
        np.ma.masked_all(3).mean(),
        np.timedelta64(3, "s"),
        np.float64("nan"),
        np.float32("inf"),
        Decimal("sNaN"),
        Decimal("1e400"),
        10**5000,
        Fraction(10**400),
        1j,
        np.complex128(1),
        "1.0",
        {"form": None},
        {"form": np.nan},
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_finite_number_is_refused(value: Any) -> None:
    """The sentence says what is allowed."""
    with pytest.raises(RecordError, match="a finite number is allowed"):
        as_reward(value, {})


def test_text_that_utf_8_cannot_hold_is_kept_as_escapes() -> None:
    """In names of components and in what was answered, which is text by then."""
    given = scores()
    given.add(1.0, None, None, None, {"a\ud800": 1.0}, "b\udfff")
    reward = given.reward(None, "play")
    assert (reward.components, reward.answer) == ({"a\\ud800": 1.0}, "b\\udfff")
    given.add(None, None, None, None, {}, 42)
    assert given.reward(None, "play").answer == "42"


def test_turns_and_branches_are_scored_by_answer_or_id() -> None:
    """A later score of the same turn replaces the earlier one."""
    given = scores()
    given.add(1.0, None, None, None, {})
    given.add(0.25, SimpleNamespace(id="chatcmpl-a"), None, None, {})
    given.add(0.5, "chatcmpl-a", None, None, {})
    given.add(-2.0, "chatcmpl-a", None, (0, 3), {})
    given.add(-1.0, None, "chatcmpl-b", None, {})
    reward = given.reward(None, "play")
    assert (reward.turns, reward.branches) == ({"chatcmpl-a": 0.5}, {"chatcmpl-b": -1.0})
    assert reward.tokens == (TokenReward("chatcmpl-a", 0, 3, -2.0),)
    assert given.of_failed(-7.0) == replace(reward, value=-7.0)


def test_scores_of_parts_are_a_reward() -> None:
    """The episode's own is 0 then."""
    given = scores()
    given.add(0.25, "chatcmpl-a", None, None, {})
    assert given.reward(None, "play") == Reward(value=0.0, turns={"chatcmpl-a": 0.25})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ((None, None, None, None, {}), "without a score"),
        ((float("nan"), None, None, None, {}), "reward value=nan"),
        ((1.0, None, None, None, {"form": "good"}), "form='good' is a str"),
        ((None, "a", None, None, {}), "either a turn or a branch"),
        ((1.0, "a", "b", None, {}), "either a turn or a branch"),
        ((1.0, 3, None, None, {}), "by the answer of the model call or its id"),
        ((1.0, None, None, (0, 1), {}), "either a turn or a branch"),
        ((1.0, None, "b", (0, 1), {}), "beside a turn"),
        ((1.0, "a", None, (0, 1.5), {}), "two whole numbers"),
        ((1.0, "a", None, (2, 2), {}), "0 <= start < end"),
    ],
)
def test_a_score_that_is_none_is_refused_where_it_is_given(
    call: tuple[Any, ...], words: str
) -> None:
    """With what is allowed, and nothing of it is kept."""
    given = scores()
    with pytest.raises(RecordError, match=words):
        given.add(*call)
    with pytest.raises(RecordError, match="no reward"):
        given.reward(None, "play")


async def test_scores_of_turns_stop_a_run_that_trains_nothing_by_them(
    router: Any, play_with: PlayWith
) -> None:
    """Silently ignored credit would be worse than none."""
    source = "async def play(task, episode):\n    episode.score(1.0, turn='chatcmpl-a')\n"
    with pytest.raises(SettingsError, match='env.turn_scores="record"'):
        await play_with(router, source)
    assert router.closed("failure_kind")[0] == "environment"


@pytest.mark.medium
async def test_scores_reach_the_router(router: Any, play_with: PlayWith) -> None:
    """Of the episode, its components, turns and branches, from a function that returns nothing."""
    source = """
async def play(task, episode):
    messages = [{"role": "user", "content": task.payload["question"]}]
    answer = await episode.client.chat.completions.create(model="policy", messages=messages)
    episode.score(0.5, form=1.0)
    episode.score(0.25, turn=answer)
    episode.score(0.75, branch=answer.id)
    episode.score(-1.0, turn=answer, tokens=(0, 2))
"""
    await play_with(router, source, turn_scores="record")
    assert (
        router.closed("reward")
        == [
            {
                "value": 0.5,
                "components": {"form": 1.0},
                "turns": {"chatcmpl-fake-1": 0.25},
                "branches": {"chatcmpl-fake-1": 0.75},
                "tokens": [{"turn": "chatcmpl-fake-1", "start": 0, "end": 2, "value": -1.0}],
            }
        ]
        * 4
    )


async def test_scores_that_the_router_refuses_do_not_stop_the_run(
    router: Any, play_with: PlayWith
) -> None:
    """The episode is closed as a failure of the environment, with what the router said."""
    router.refusals["/episodes/ep-0/close"] = [422]
    await play_with(router, "async def play(task, episode):\n    return 1.0\n")
    assert router.closes["ep-0"]["failure_kind"] == "environment"
    assert "status=422" in router.closes["ep-0"]["error"]
    assert router.closed("outcome").count("completed") == 3


async def test_an_agent_whose_calls_are_all_refused_stops_the_run_with_the_cause(
    router: Any, play_with: PlayWith
) -> None:
    """The first such episode is a warning with the router's words, 32 of them end the run."""
    router.num_episodes = 80
    router.counts_turns = True
    router.refused_calls = {"counts": {"tools_refused": 2, "too_long": 3}, "last": "785 > 512"}
    words = "the router refused every call of the first {}: too_long: 785 > 512"
    with pytest.raises(SettingsError, match=words.format("32 episodes")):
        await play_with(router, "async def play(task, episode):\n    return 0.0\n")
    assert words.format("episode") in router.warnings


async def test_an_agent_that_talks_to_another_endpoint_stops_the_run(
    router: Any, play_with: PlayWith
) -> None:
    """None of the first 32 episodes made a model call: the sentence says where to point it."""
    router.num_episodes = 80
    router.counts_turns = True
    with pytest.raises(SettingsError, match="none of the first 32 episodes made a model call"):
        await play_with(router, "async def play(task, episode):\n    return 1.0\n")


@pytest.mark.medium
async def test_one_model_call_is_enough(router: Any, play_with: PlayWith) -> None:
    """A task that some episodes end without asking is no mistake."""
    router.num_episodes = 80
    router.counts_turns = True
    source = """
async def play(task, episode):
    if episode.episode_id == "ep-3":
        await episode.client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "x"}]
        )
    return 1.0
"""
    await play_with(router, source, max_concurrent_episodes=4)
    assert len(router.closes) == 80
