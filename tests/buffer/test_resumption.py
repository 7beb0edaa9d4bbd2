"""Attempts lost to the infrastructure are resumed from their records before they are replaced."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from outloop.buffer.errors import Gone
from outloop.buffer.records import Claim, Turn

ONE_GROUP = {"buffer__group_size": 2, "trainer__groups_per_step": 1}
GROUPS_OF_ONE = {"trainer__advantage": "reinforce_pp", "trainer__groups_per_step": 2}
LOST = {"failure_kind": "infrastructure", "outcome": "failed"}


async def lose(loop: Any, make_turn: Callable[..., Turn], *, num_turns: int = 2) -> Claim:
    """Claim one attempt, record turns, and lose it to the infrastructure."""
    (claim,) = (await loop.claim(1)).claims
    await record(loop, make_turn, await loop.open(claim), num_turns)
    await loop.close(id_of(claim), None, **LOST)
    return claim


def id_of(claim: Claim) -> str:
    """The id under which the tests' loop opens a claim."""
    return f"{claim.group_id}-{claim.attempt}"


async def record(
    loop: Any, make_turn: Callable[..., Turn], episode_id: str, num_turns: int, **words: Any
) -> None:
    """Append a chain of turns."""
    for index in range(num_turns):
        turn = make_turn(episode_id, index, parent=index - 1 if index else None, **words)
        await loop.writer.append_turn(turn)


def keys_of(loop: Any, pattern: str) -> list[bytes]:
    """Keys of the run that match."""
    return list(loop.reader.client.scan_iter(match=f"{loop.reader.prefix}{pattern}"))


async def test_the_next_claim_resumes_a_lost_attempt(
    start: Callable[..., Any], make_turn: Callable[..., Turn]
) -> None:
    """It names the lost episode; whoever loads the new one gets the recorded turns, bit by bit."""
    loop = await start(**ONE_GROUP)
    lost = await lose(loop, make_turn)
    (claim,) = (await loop.claim(1)).claims
    assert (claim.group_id, claim.task) == (lost.group_id, lost.task)
    assert (lost.resumes, claim.resumes) == (None, id_of(lost))
    loaded = await loop.writer.load_episode(await loop.open(claim))
    assert loaded is not None
    assert (loaded.resumes, loaded.turns) == (id_of(lost), ())
    old = (await loop.writer.load_episode(id_of(lost))).turns
    assert [turn.turn_id for turn in loaded.recorded] == [turn.turn_id for turn in old]
    for one, other in zip(loaded.recorded, old, strict=True):
        assert one.output_ids.tobytes() == other.output_ids.tobytes()
        assert one.behavior_logprobs.tobytes() == other.behavior_logprobs.tobytes()
        assert one.version_spans == other.version_spans
    with pytest.raises(Gone):
        await loop.writer.append_turn(make_turn(id_of(lost), 2, parent=1))
    stats = loop.reader.stats()
    assert (stats["buffer/resumed_attempts"], stats["buffer/replaced_attempts"]) == (1, 0)
    assert (stats["buffer/turns_of_resumed_attempts"], stats["buffer/resultless_attempts"]) == (
        2,
        0,
    )
    assert (stats["buffer/train_attempts"], stats["buffer/resumed_share"]) == (1, 1)


async def test_what_is_replayed_counts_once_and_the_rest_is_gone(
    start: Callable[..., Any], make_turn: Callable[..., Turn]
) -> None:
    """One turn is asked for again, then another way is taken: only what was replayed is trained."""
    loop = await start(**ONE_GROUP)
    await lose(loop, make_turn, num_turns=3)
    claims = (await loop.claim(2)).claims
    ids = [await loop.open(claim) for claim in claims]
    resumed = next(x for x, claim in zip(ids, claims, strict=True) if claim.resumes)
    recorded = (await loop.writer.load_episode(resumed)).recorded
    await loop.writer.append_turn(replace(recorded[0], episode_id=resumed))
    left = (await loop.writer.load_episode(resumed)).recorded
    assert [turn.turn_id for turn in left] == [turn.turn_id for turn in recorded[1:]]
    fresh = replace(
        make_turn(resumed, 9), parent_turn_id=recorded[0].turn_id, branch_cause="extension"
    )
    await loop.writer.append_turn(fresh)
    for episode_id in ids:
        await loop.close(episode_id)
    (lease,) = loop.take(1)
    turns = {t.episode.episode_id: t.turns for t in lease.group.trajectories}[resumed]
    assert [turn.turn_id for turn in turns] == [recorded[0].turn_id, fresh.turn_id]
    assert {turn.episode_id for turn in turns} == {resumed}
    stats = loop.reader.stats()
    assert (stats["buffer/turns"], stats["buffer/output_tokens"]) == (4, 16)
    assert (stats["buffer/replayed_turns"], stats["buffer/replayed_tokens"]) == (1, 4)
    assert stats["buffer/turns_not_replayed"] == 2
    assert len(keys_of(loop, "episode:*:turns")) == 1


@pytest.mark.medium
async def test_resumptions_are_bounded(
    start: Callable[..., Any], make_turn: Callable[..., Turn]
) -> None:
    """After env.max_resumptions the attempt is replaced, whatever it had replayed and generated."""
    loop = await start(**ONE_GROUP, env__max_resumptions=2)
    await lose(loop, make_turn)
    for expected in (2, 3):
        (claim,) = (await loop.claim(1)).claims
        episode_id = await loop.open(claim)
        loaded = await loop.writer.load_episode(episode_id)
        assert len(loaded.recorded) == expected
        first, second, *_ = loaded.recorded
        await loop.writer.append_turn(replace(first, episode_id=episode_id))
        await loop.writer.append_turn(replace(second, episode_id=episode_id))
        await loop.writer.append_turn(make_turn(episode_id, 7))
        await loop.close(episode_id, None, **LOST)
    (claim,) = (await loop.claim(1)).claims
    assert claim.resumes is None
    stats = loop.reader.stats()
    assert (stats["buffer/resumed_attempts"], stats["buffer/replaced/infrastructure"]) == (2, 1)
    assert (stats["buffer/turns_of_lost_attempts"], stats["buffer/resultless_attempts"]) == (3, 1)
    assert not keys_of(loop, "episode:*:turns")


async def test_resumption_can_be_switched_off(
    start: Callable[..., Any], make_turn: Callable[..., Turn]
) -> None:
    """Then every lost attempt is replaced."""
    loop = await start(**ONE_GROUP, env__max_resumptions=0)
    await lose(loop, make_turn)
    assert (await loop.claim(1)).claims[0].resumes is None
    assert loop.reader.stats()["buffer/replaced_attempts"] == 1


@pytest.mark.parametrize("kind", ["environment", None])
async def test_only_the_infrastructure_s_losses_are_resumed(
    start: Callable[..., Any], make_turn: Callable[..., Turn], kind: str | None
) -> None:
    """A failed environment is played again, and so is an attempt without any turn."""
    loop = await start(**ONE_GROUP)
    (claim,) = (await loop.claim(1)).claims
    episode_id = await loop.open(claim)
    if kind is not None:
        await record(loop, make_turn, episode_id, 1)
    await loop.close(episode_id, None, failure_kind=kind or "infrastructure", outcome="failed")
    claims = (await loop.claim(5)).claims
    assert [claim.resumes for claim in claims] == [None, None]
    assert loop.reader.stats()["buffer/replaced_attempts"] == 1


async def test_a_silent_runner_is_resumed_at_the_deadline(
    start: Callable[..., Any], make_turn: Callable[..., Turn], clock: Any
) -> None:
    """Nobody closes it; so it is when the next runner dies between its claim and its opening."""
    loop = await start(**ONE_GROUP, env__episode_deadline_s=30)
    (claim,) = (await loop.claim(1)).claims
    episode_id = await loop.open(claim)
    await record(loop, make_turn, episode_id, 2)
    for _ in range(2):
        clock.advance(36)
        claims = (await loop.claim(1)).claims
        assert claims[0].resumes == episode_id
    again = await loop.writer.load_episode(await loop.open(claims[0]))
    assert len(again.recorded) == 2
    assert loop.reader.stats()["buffer/resumed_attempts"] == 2


async def test_too_stale_a_record_is_replaced(
    start: Callable[..., Any], make_turn: Callable[..., Turn]
) -> None:
    """Staleness is that of the oldest token: at the loss, and again when it is claimed."""
    loop = await start(buffer__max_staleness=1, buffer__group_size=1, **GROUPS_OF_ONE)
    claims = (await loop.claim(2)).claims
    ids = [await loop.open(claim) for claim in claims]
    for episode_id in ids:
        await record(loop, make_turn, episode_id, 1, version=0)
    loop.publish(1, 0)
    await loop.close(ids[0], None, **LOST)
    assert loop.reader.stats()["buffer/resumed_attempts"] == 1
    loop.publish(2, 1)
    await loop.close(ids[1], None, **LOST)
    assert loop.reader.stats()["buffer/resumed_attempts"] == 1
    again = (await loop.claim(2)).claims
    assert [claim.resumes for claim in again] == [None, None]
    assert {claim.group_id for claim in again} == {claim.group_id for claim in claims}
    stats = loop.reader.stats()
    assert stats["buffer/replaced/stale"] == stats["buffer/resultless_attempts"] == 2
    assert not keys_of(loop, "episode:*:turns")


async def test_a_record_of_abandoned_versions_is_replaced(
    start: Callable[..., Any], make_turn: Callable[..., Turn]
) -> None:
    """After a rollback neither a waiting, nor a claimed, nor an opened attempt keeps such turns."""
    loop = await start(buffer__max_staleness=2, buffer__group_size=1, **GROUPS_OF_ONE)
    for claim in (await loop.claim(2)).claims:
        await loop.play(claim)
    mark = loop.train(loop.take(2), 1)
    loop.reader.acknowledge(mark)
    loop.publish(2, 1)
    ids = [await loop.open(claim) for claim in (await loop.claim(3)).claims]
    for episode_id in ids:
        await record(loop, make_turn, episode_id, 1, version=2)
        await loop.close(episode_id, None, **LOST)
    claimed, opened = (await loop.claim(2)).claims
    assert {claimed.resumes, opened.resumes} < set(ids)
    await loop.open(opened)
    loop.fence = loop.reader.acquire_fence()
    highest = loop.reader.recover(mark, fence=loop.fence)
    loop.publish(highest + 1, 1)
    again = (await loop.claim(3)).claims
    assert [claim.resumes for claim in again] == [None] * 3
    stats = loop.reader.stats()
    assert (stats["buffer/replaced/stale"], stats["buffer/resultless_attempts"]) == (3, 0)
    assert not keys_of(loop, "episode:*:turns")


@pytest.mark.medium
async def test_a_group_that_ends_frees_what_waited_to_be_resumed(
    start: Callable[..., Any], make_turn: Callable[..., Turn], clock: Any
) -> None:
    """Sealed at its deadline with the scored ones; nothing of the lost one is left."""
    loop = await start(
        buffer__group_size=3,
        trainer__groups_per_step=1,
        buffer__group_deadline_s=20,
        buffer__cuts_slow_episodes=True,
    )
    lost = await lose(loop, make_turn)
    claims = (await loop.claim(3)).claims
    played = [claim for claim in claims if claim.resumes is None]
    for claim in played:
        await loop.play(claim)
    (resumed,) = [claim for claim in claims if claim.resumes is not None]
    await loop.open(resumed)
    await loop.close(id_of(resumed), None, **LOST)
    names = {key.decode().split(":")[-2] for key in keys_of(loop, "episode:*:turns")}
    assert names == {id_of(lost), *map(id_of, played)}
    assert len(keys_of(loop, "group:*:resumable")) == 1
    clock.advance(21)
    (lease,) = loop.take(1)
    assert len(lease.group.trajectories) == 2
    names = {key.decode().split(":")[-2] for key in keys_of(loop, "episode:*:turns")}
    assert names == set(map(id_of, played))
    assert not keys_of(loop, "group:*:resumable")


async def test_a_resumed_attempt_is_as_old_as_what_it_resumes(
    start: Callable[..., Any], make_turn: Callable[..., Turn]
) -> None:
    """Also while its own turns are newer: what it replays of the record, it replays later."""
    loop = await start(buffer__max_staleness=1, **ONE_GROUP)
    await lose(loop, make_turn)
    (claim,) = (await loop.claim(1)).claims
    episode_id = await loop.open(claim)
    loop.publish(1, 0)
    await loop.writer.append_turn(make_turn(episode_id, 7, version=1))
    assert loop.reader.stats()["buffer/replaced/stale"] == 0
    loop.publish(2, 1)
    assert loop.reader.stats()["buffer/replaced/stale"] == 1
    with pytest.raises(Gone):
        await loop.writer.append_turn(make_turn(episode_id, 8, parent=7, version=2))
