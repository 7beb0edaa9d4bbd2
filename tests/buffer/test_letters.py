"""Dead letters: groups dropped as failed or malformed are kept, read and resolved."""

from collections.abc import Callable
from typing import Any

import pytest

from outloop.buffer.errors import Conflict, NotFound
from outloop.buffer.records import Turn


async def fail_group(loop: Any, make_turn: Callable[..., Turn]) -> str:
    """Play group 0 so that one attempt scores and the other fails; returns its id."""
    first, second = (await loop.claim(2)).claims
    await loop.play(first)
    episode_id = await loop.open(second)
    await loop.writer.append_turn(make_turn(episode_id))
    await loop.close(
        episode_id, None, failure_kind="environment", outcome="failed", error="no sandbox"
    )
    return str(first.group_id)


async def test_a_failed_group_leaves_a_letter(
    start: Callable[..., Any], make_turn: Callable[..., Turn], clock: Any
) -> None:
    """The letter says why, what failed last, and holds the episode that was scored."""
    loop = await start(env__max_replacements=0)
    group_id = await fail_group(loop, make_turn)
    (letter,) = loop.reader.dead_letters.list_all()
    assert (letter.group_id, letter.slot, letter.reason) == (group_id, 0, "failed")
    assert letter.error == (
        "scored 1 of 2 attempts (at least 2 are needed), replaced 0, given up 1"
    )
    assert letter.last_failure == "environment: no sandbox"
    assert letter.dropped_at == clock()
    same, (episode,) = loop.reader.dead_letters.read(group_id)
    assert same == letter
    assert episode.trajectory is not None
    assert len(episode.trajectory.turns) == 1
    stats = loop.reader.stats()
    assert stats["buffer/dropped/failed"] == stats["buffer/dead_letters"] == 1


async def test_a_malformed_group_can_be_read(start: Callable[..., Any]) -> None:
    """Damaged records stay where they are, with what is wrong with them."""
    loop = await start(buffer__max_staleness=1)
    await loop.play_all()
    turns = loop.reader.key("episode:g0-1-0:turns")
    loop.reader.client.lset(turns, 0, b"\x04\0rubbish")
    loop.take(2)
    (letter,) = loop.reader.dead_letters.list_all()
    assert letter.reason == "malformed"
    assert "turn is damaged" in letter.error
    _, (damaged, whole) = loop.reader.dead_letters.read("g0-1")
    assert (damaged.episode_id, damaged.trajectory, damaged.num_bytes) == ("g0-1-0", None, 9)
    assert "turn is damaged" in damaged.error
    assert whole.trajectory is not None


async def test_a_requeued_slot_is_played_again_once(
    start: Callable[..., Any], make_turn: Callable[..., Turn]
) -> None:
    """It comes before new slots, as a group of its own, and is trained once."""
    loop = await start(env__max_replacements=0)
    group_id = await fail_group(loop, make_turn)
    await loop.play_all()
    loop.train(loop.take(), 1)
    loop.reader.dead_letters.requeue(group_id)
    with pytest.raises(NotFound, match=group_id):
        loop.reader.dead_letters.requeue(group_id)
    assert loop.reader.dead_letters.list_all() == ()
    await loop.play_all(version=1)
    leases = loop.take(version=1)
    assert [lease.group.slot for lease in leases] == [0, 3]
    assert leases[0].group.group_id != group_id
    assert loop.reader.stats()["buffer/requeued_dead_letters"] == 1


async def test_a_discarded_letter_frees_its_data(
    start: Callable[..., Any], make_turn: Callable[..., Turn]
) -> None:
    """Nothing is left but hashes that expire."""
    loop = await start(env__max_replacements=0)
    group_id = await fail_group(loop, make_turn)
    loop.reader.dead_letters.discard(group_id)
    with pytest.raises(NotFound):
        loop.reader.dead_letters.read(group_id)
    client = loop.reader.client
    names = list(client.scan_iter(match=f"{loop.reader.prefix}*", count=1000))
    # The last episodes that failed stay for whoever asks why.
    failed = client.lrange(f"{loop.reader.prefix}failed", 0, -1)
    own = [
        name
        for name in names
        if (b"episode:" in name or b"group:g0" in name)
        and not any(episode_id in name for episode_id in failed)
    ]
    assert not [name for name in names if b"dead" in name]
    assert all(client.pttl(name) > 0 for name in own)
    assert loop.reader.stats()["buffer/slots_to_replay"] == 0


async def test_a_run_that_begins_anew_plays_the_slot_anyway(
    start: Callable[..., Any], make_turn: Callable[..., Turn]
) -> None:
    """Then a letter can be read and dropped; requeueing it would train its slot twice."""
    loop = await start(env__max_replacements=0)
    group_id = await fail_group(loop, make_turn)
    loop.reader.recover(None, fence=loop.fence)
    with pytest.raises(Conflict, match="anyway"):
        loop.reader.dead_letters.requeue(group_id)
    (letter,) = loop.reader.dead_letters.list_all()
    assert letter.slot is None
    loop.reader.dead_letters.discard(group_id)


@pytest.mark.medium
async def test_letters_are_bounded(start: Callable[..., Any]) -> None:
    """The last 256 are kept, the newest 16 with their episodes; no data of others stays."""
    loop = await start(env__max_replacements=0, buffer__max_staleness=1, trainer__groups_per_step=8)
    num_groups = 0
    while num_groups < 260:
        claims = (await loop.claim()).claims
        num_groups += len(claims) // 2
        for number, claim in enumerate(claims):
            episode_id = await loop.open(claim)
            words = {"failure_kind": "environment", "outcome": "failed"} if number % 2 else {}
            await loop.close(episode_id, None if words else 1.0, **words)
    letters = loop.reader.dead_letters.list_all()
    assert [letter.slot for letter in letters] == list(range(num_groups - 256, num_groups))
    reads = [loop.reader.dead_letters.read(letter.group_id)[1] for letter in letters[-17:]]
    assert [len(episodes) for episodes in reads] == [0] + [1] * 16
    names = loop.reader.client.scan_iter(match=f"{loop.reader.prefix}dead:*", count=1000)
    assert len(list(names)) == 256 + 16
