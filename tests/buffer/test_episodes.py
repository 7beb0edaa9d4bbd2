"""From open to close: turns, rewards, failures, and calls that come twice or too late."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from outloop.buffer.errors import Conflict, Gone, NotFound, RecordError
from outloop.buffer.records import NO_REFUSALS, Refusals, Reward, Turn


async def test_an_episode_is_read_back_as_it_was_written(
    start: Callable[..., Any], make_turn: Callable[..., Turn]
) -> None:
    """load_episode shows the opening, the turns in order, and how it ended."""
    loop = await start()
    assert await loop.writer.load_episode("nobody") is None
    (claim, *_) = (await loop.claim()).claims
    episode_id = await loop.open(claim)
    for index, parent in ((0, None), (1, 0), (2, 0)):
        await loop.writer.append_turn(make_turn(episode_id, index, parent=parent))
    now = await loop.writer.load_episode(episode_id)
    assert (now.is_closed, now.outcome, now.reward) == (False, None, None)
    await loop.close(episode_id, 0.5)
    then = await loop.writer.load_episode(episode_id)
    assert then.opening == loop.opening(claim)
    assert [turn.turn_id for turn in then.turns] == [f"{episode_id}.{i}" for i in range(3)]
    np.testing.assert_array_equal(then.turns[1].output_ids, make_turn("x").output_ids)
    assert (then.is_closed, then.outcome, then.reward) == (True, "completed", Reward(value=0.5))
    stats = loop.reader.stats()
    assert (stats["buffer/turns"], stats["buffer/branches"]) == (3, 1)


async def test_every_call_may_be_repeated(
    start: Callable[..., Any], make_turn: Callable[..., Turn]
) -> None:
    """The same open, turn, reward and close twice are one; the answers are equal."""
    loop = await start()
    first, second, *_ = (await loop.claim()).claims
    await loop.play(first)
    results = []
    for _ in range(2):
        episode_id = await loop.open(second)
        await loop.writer.append_turn(make_turn(episode_id))
        await loop.writer.put_reward(episode_id, Reward(value=0.5), key="score")
        results.append(await loop.close(episode_id, None))
    assert results[0] == results[1]
    assert (results[0].counted, results[0].sealed_group) == (True, "g0-1")
    await loop.open(second)
    await loop.writer.append_turn(make_turn(episode_id))
    (lease,) = loop.take(1)
    assert [len(t.turns) for t in lease.group.trajectories] == [1, 1]
    assert [t.episode.reward for t in lease.group.trajectories] == [
        Reward(value=1.0),
        Reward(value=0.5),
    ]
    assert await loop.close(episode_id, None) == results[0]
    loop.reader.acknowledge(loop.train([lease], 1))
    assert await loop.close(episode_id, None) == results[0]


async def test_the_same_key_with_another_content_is_refused(
    start: Callable[..., Any], make_turn: Callable[..., Turn]
) -> None:
    """Idempotency keys do not hide mistakes."""
    loop = await start()
    (claim, *_) = (await loop.claim()).claims
    episode_id = await loop.open(claim)
    with pytest.raises(Conflict, match=episode_id):
        await loop.writer.open_episode(replace(loop.opening(claim), metadata={"a": "b"}))
    await loop.writer.append_turn(make_turn(episode_id))
    with pytest.raises(Conflict, match="turn_id"):
        await loop.writer.append_turn(make_turn(episode_id, num_output=5))
    await loop.writer.put_reward(episode_id, Reward(value=0.5), key="score")
    with pytest.raises(Conflict, match="differently"):
        await loop.writer.put_reward(episode_id, Reward(value=0.6), key="score")
    await loop.close(episode_id)
    with pytest.raises(Conflict, match="differently"):
        await loop.close(episode_id, 0.1)
    with pytest.raises(Gone, match="closed already"):
        await loop.close(episode_id, key="another")


async def test_unknown_things_are_named(
    start: Callable[..., Any], make_turn: Callable[..., Turn]
) -> None:
    """No such episode, parent turn, group or evaluation."""
    loop = await start()
    (claim, *_) = (await loop.claim()).claims
    for call in (
        loop.writer.append_turn(make_turn("nobody")),
        loop.writer.put_reward("nobody", Reward(value=1.0), key="k"),
        loop.close("nobody"),
    ):
        with pytest.raises(NotFound, match="nobody"):
            await call
    episode_id = await loop.open(claim)
    with pytest.raises(NotFound, match="parent_turn_id"):
        await loop.writer.append_turn(make_turn(episode_id, 1, parent=0))
    with pytest.raises(NotFound, match="g77-1"):
        await loop.writer.open_episode(replace(loop.opening(claim, "x"), group_id="g77-1"))
    with pytest.raises(NotFound, match="nowhere"):
        await loop.writer.open_episode(
            replace(loop.opening(claim, "x"), purpose="eval", eval_name="nowhere", group_id=None)
        )
    with pytest.raises(Conflict, match="plays task_id"):
        await loop.writer.open_episode(replace(loop.opening(claim, "x"), task_id="other"))


async def test_many_openings_fail_one_by_one(start: Callable[..., Any]) -> None:
    """A refused opening does not stop the others of the same call."""
    loop = await start()
    first, second, *_ = (await loop.claim()).claims
    bad = replace(loop.opening(first, "x"), group_id="g77-1")
    answers = await loop.writer.open_episodes([bad, loop.opening(first), loop.opening(second)])
    assert isinstance(answers[0], NotFound)
    assert answers[1:] == (None, None)
    assert await loop.writer.open_episodes([]) == ()


async def test_a_later_opening_takes_the_attempt_over(
    start: Callable[..., Any], make_turn: Callable[..., Turn]
) -> None:
    """Only the newest episode of an attempt counts; the earlier one is refused from then on."""
    loop = await start()
    first, second, *_ = (await loop.claim()).claims
    await loop.open(first, "lost")
    await loop.writer.append_turn(make_turn("lost"))
    await loop.play(first)
    with pytest.raises(Gone, match="replaced"):
        await loop.writer.append_turn(make_turn("lost", 1, parent=0))
    assert (await loop.writer.load_episode("lost")).turns == ()
    assert not (await loop.close("lost", 9.0)).counted
    await loop.play(second)
    (lease,) = loop.take(1)
    assert {t.episode.episode_id for t in lease.group.trajectories} == {"g0-1-0", "g0-1-1"}


async def test_a_reward_may_come_late(
    start: Callable[..., Any], make_turn: Callable[..., Turn]
) -> None:
    """A closed episode without a reward waits for it; a missing reward is never zero."""
    loop = await start()
    first, second, *_ = (await loop.claim()).claims
    episode_id = await loop.open(first)
    assert not (await loop.close(episode_id, None)).counted
    with pytest.raises(Gone, match="is closed"):
        await loop.writer.append_turn(make_turn(episode_id))
    assert (await loop.play(second)).sealed_group is None
    await loop.writer.put_reward(episode_id, Reward(value=0.1), key="a")
    assert loop.reader.stats()["buffer/ready_groups"] == 1
    with pytest.raises(Gone, match="sealed"):
        await loop.writer.put_reward(episode_id, Reward(value=0.9), key="b")
    (lease,) = loop.take(1)
    assert lease.group.trajectories[0].episode.reward == Reward(value=0.1)
    assert loop.reader.stats()["buffer/late_rewards"] == 1


async def test_a_later_reward_replaces_an_earlier_one_until_the_group_seals(
    start: Callable[..., Any],
) -> None:
    """Another key scores again."""
    loop = await start()
    first, second, *_ = (await loop.claim()).claims
    await loop.play(first, value=0.1)
    await loop.writer.put_reward("g0-1-0", Reward(value=0.7), key="regraded")
    await loop.play(second)
    (lease,) = loop.take(1)
    assert lease.group.trajectories[0].episode.reward == Reward(value=0.7)


@pytest.mark.parametrize(
    ("changes", "is_replaced"),
    [
        ({"failure_kind": "infrastructure", "outcome": "aborted"}, True),
        ({"failure_kind": "environment", "outcome": "failed"}, True),
        ({"failure_kind": None, "outcome": "aborted"}, True),
        ({"failure_kind": "infrastructure", "outcome": "failed", "value": 1.0}, True),
        ({"failure_kind": "environment", "outcome": "failed", "value": 1.0}, False),
        ({"failure_kind": "agent", "outcome": "failed"}, False),
        ({"failure_kind": "agent", "outcome": "aborted"}, False),
        ({"failure_kind": None, "outcome": "truncated", "value": 0.3}, False),
    ],
)
async def test_failures_are_not_rewards(
    start: Callable[..., Any], changes: dict[str, Any], is_replaced: bool
) -> None:
    """Only what cannot depend on the policy is replaced; an agent's failure scores."""
    loop = await start(env__failure_reward=-1.0)
    (claim, *_) = (await loop.claim()).claims
    result = await loop.close(await loop.open(claim), **({"value": None} | changes))
    assert result.counted is not is_replaced
    replacements = [c.attempt for c in (await loop.claim()).claims if c.group_id == claim.group_id]
    assert replacements == ([2] if is_replaced else [])
    loaded = await loop.writer.load_episode("g0-1-0")
    if changes["failure_kind"] == "agent":
        assert loaded.reward == Reward(value=-1.0)
    stats = loop.reader.stats()
    assert stats["buffer/replaced_attempts"] == int(is_replaced)
    assert (await loop.claim()).reason == "admission"


async def test_failures_before_the_first_turn_are_counted_apart(
    start: Callable[..., Any], make_turn: Callable[..., Turn]
) -> None:
    """They are the agent's before its first model call, or of what an episode needs."""
    loop = await start()
    failed = {"outcome": "failed", "value": None}
    for number, kind in enumerate(("environment", "environment", "infrastructure", "agent")):
        (claim, *_) = (await loop.claim()).claims
        episode_id = await loop.open(claim, f"e{number}")
        if number == 0:
            await loop.writer.append_turn(make_turn(episode_id))
        await loop.close(episode_id, failure_kind=kind, **failed)
    assert loop.reader.stats()["buffer/failed_before_turns"] == 1


async def test_a_sealed_group_takes_nothing_more(
    start: Callable[..., Any], clock: Any, make_turn: Callable[..., Turn]
) -> None:
    """After the group's deadline, turns, openings and rewards of its attempts are Gone."""
    loop = await start(
        buffer__group_size=4,
        trainer__groups_per_step=1,
        buffer__group_deadline_s=10,
        buffer__cuts_slow_episodes=True,
    )
    first, second, third, fourth = (await loop.claim()).claims
    await loop.play(first)
    await loop.play(second)
    episode_id = await loop.open(third)
    clock.advance(11)
    loop.take(1)
    with pytest.raises(Gone, match="sealed"):
        await loop.writer.append_turn(make_turn(episode_id))
    with pytest.raises(Gone, match="is over"):
        await loop.open(fourth)
    with pytest.raises(Gone, match="sealed"):
        await loop.writer.put_reward(episode_id, Reward(value=1.0), key="k")
    assert not (await loop.close(episode_id)).counted


async def test_rubbish_is_refused_by_name(
    start: Callable[..., Any], make_turn: Callable[..., Turn]
) -> None:
    """Wrong words, empty ids and oversized records never reach Redis."""
    loop = await start()
    (claim, *_) = (await loop.claim()).claims
    episode_id = await loop.open(claim)
    with pytest.raises(RecordError, match="outcome='won'"):
        await loop.close(episode_id, outcome="won")
    with pytest.raises(RecordError, match="failure_kind='bad'"):
        await loop.close(episode_id, failure_kind="bad")
    with pytest.raises(RecordError, match="key has 0 characters"):
        await loop.close(episode_id, key="")
    with pytest.raises(RecordError, match="count=0"):
        await loop.writer.claim(key="k", count=0)
    with pytest.raises(RecordError, match="purpose='sft'"):
        await loop.writer.open_episode(replace(loop.opening(claim), purpose="sft"))
    with pytest.raises(RecordError, match="turn_id has 300 characters"):
        await loop.writer.append_turn(replace(make_turn(episode_id), turn_id="x" * 300))
    huge = replace(make_turn(episode_id), prompt_ids=np.zeros(17 * 2**20, np.int32))
    with pytest.raises(RecordError, match="at most 67108864 are allowed"):
        await loop.writer.append_turn(huge)


async def test_an_evaluation_episode_may_be_opened_by_anybody(
    start: Callable[..., Any], make_turn: Callable[..., Turn]
) -> None:
    """Without a claim and a name it is recorded, scored once and never leased or requeued."""
    loop = await start()
    opening = replace(
        loop.opening((await loop.claim()).claims[0]),
        episode_id="own-1",
        group_id=None,
        purpose="eval",
    )
    await loop.writer.open_episode(opening)
    await loop.writer.open_episode(opening)
    await loop.writer.append_turn(make_turn("own-1"))
    assert (await loop.close("own-1", 0.25)).counted
    loaded = await loop.writer.load_episode("own-1")
    assert (loaded.reward, len(loaded.turns)) == (Reward(value=0.25), 1)
    assert loop.reader.stats().get("buffer/scored", 0) == 0
    await loop.writer.open_episode(replace(opening, episode_id="own-2"))
    assert not (await loop.close("own-2", None, failure_kind="infrastructure")).counted
    assert (await loop.writer.load_episode("own-2")).is_closed


async def test_the_last_failed_episodes_stay(
    start: Callable[..., Any], make_turn: Callable[..., Turn]
) -> None:
    """With their turns, though their groups are gone; older ones make room."""
    loop = await start(
        num_tasks=40, buffer__max_staleness=1000, buffer__group_size=2, trainer__groups_per_step=40
    )
    failed = []
    while len(failed) < 70:
        for claim in (await loop.claim(10)).claims:
            episode_id = await loop.open(claim)
            await loop.writer.append_turn(make_turn(episode_id))
            await loop.close(
                episode_id, None, outcome="failed", failure_kind="agent", error="KeyError: 'x'"
            )
            failed.append(episode_id)
    leases = loop.take(len(failed) // 2)
    assert leases
    for lease in leases:
        loop.reader.drop(lease.group.group_id, "no_signal", fence=loop.fence)
    kept = list(loop.reader.archive.episode_ids())
    assert kept == failed[-64:]
    assert len(loop.reader.load_episode(failed[-1]).turns) == 1
    assert loop.reader.load_episode(failed[-1]).error == "KeyError: 'x'"
    assert loop.reader.load_episode(failed[0]).turns == ()


async def test_refusals_are_counted_until_the_close(
    start: Callable[..., Any], make_turn: Callable[..., Turn]
) -> None:
    """By code, with the last sentence; the first spent budget stays."""
    loop = await start()
    first, second, *_ = (await loop.claim()).claims
    episode_id = await loop.open(first)
    put, text = loop.writer.refusal_notes.put, "x" * 999
    await put(episode_id, "a", "one", is_budget=False)
    await put(episode_id, "turns", "two", is_budget=True)
    await put(episode_id, "a", "\ud800", is_budget=False)
    await put(episode_id, "tokens", text, is_budget=True)
    assert await loop.writer.refusal_notes.read_budget(episode_id) == "turns"
    await loop.writer.append_turn(make_turn(episode_id))
    await loop.close(episode_id, 1.0)
    await put(episode_id, "a", "late", is_budget=False)
    await loop.play(second)
    expected = Refusals(counts={"a": 2, "turns": 1, "tokens": 1}, last=text[:500])
    assert (await loop.writer.load_episode(episode_id)).refusals == expected
    (lease,) = loop.take(1)
    found = {one.episode.episode_id: one.episode.refusals for one in lease.group.trajectories}
    assert found.pop(episode_id) == expected
    assert list(found.values()) == [NO_REFUSALS]
