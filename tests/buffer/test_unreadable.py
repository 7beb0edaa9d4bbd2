"""Records that cannot be read cost their group, never the reader; their bytes are kept."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from outloop.buffer.errors import NotFound, RecordError, SchemaMismatch
from outloop.buffer.reader import BufferReader
from outloop.buffer.records import Turn
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.cli import cli

OTHER_SCHEMA = "was written with schema=9, this release reads schema=4"
RECORDS = ("opening", "closure", "reward", "turn")


def of_another_release(record: bytes) -> bytes:
    """The record, were it written by a release with schema 9."""
    return b"\x09\x00" + record[2:]


def damage(reader: BufferReader, episode_id: str, name: str, change: Callable[..., bytes]) -> bytes:
    """Change one stored record of an episode in place; returns what stands there now."""
    client, key = reader.client, reader.key(f"episode:{episode_id}")
    old: Any = client.lindex(f"{key}:turns", 0) if name == "turn" else client.hget(key, name)
    new = change(old)
    if name == "turn":
        client.lset(f"{key}:turns", 0, new)
    else:
        client.hset(key, name, new)
    return new


def untrained(reader: BufferReader) -> int:
    """Groups that admission counts and that are not trained yet; nothing is held besides."""
    state: Any = reader.client.hmget(reader.key("state"), "admitted", "trained", "held")
    assert int(state[2] or 0) == 0
    return int(state[0]) - int(state[1] or 0)


@pytest.mark.parametrize("name", RECORDS)
async def test_a_group_of_another_release_is_a_dead_letter(
    start: Callable[..., Any], name: str
) -> None:
    """Both schema numbers are in the letter, the bytes are kept, and the next group is taken; its
    credit is back at once, and the slot is played again when asked for."""
    loop = await start(buffer__max_staleness=1)
    await loop.play_all()
    stored = damage(loop.reader, "g0-1-1", name, of_another_release)
    assert [lease.group.slot for lease in loop.take(2)] == [1, 2]
    assert untrained(loop.reader) == loop.reader.client.zcard(loop.reader.key("groups")) == 3
    (letter,) = loop.reader.dead_letters.list_all()
    assert (letter.group_id, letter.slot, letter.reason) == ("g0-1", 0, "malformed")
    assert "episode_id=g0-1-1" in letter.error
    assert OTHER_SCHEMA in letter.error
    _, (whole, other) = loop.reader.dead_letters.read("g0-1")
    assert (whole.error, other.trajectory) == ("", None)
    assert OTHER_SCHEMA in other.error
    assert other.records["turn-0" if name == "turn" else name] == stored
    loop.reader.dead_letters.requeue("g0-1")
    (again, _) = (await loop.claim(2)).claims
    assert again.group_id.startswith("g0-")


async def test_an_unreadable_group_is_replaced_within_its_batch(
    start: Callable[..., Any],
) -> None:
    """At max_staleness 0 a take whose groups are all unreadable gets others in their place, sampled
    by the same version; nobody waits for a credit that is gone."""
    loop = await start()
    await loop.play_all()
    for group in ("g0-1", "g1-2"):
        damage(loop.reader, f"{group}-0", "turn", lambda _: b"")
    rounds = iter([False, False, True])
    taken = loop.reader.take(
        2,
        fence=loop.fence,
        policy_version=0,
        timeout_s=60.0,
        on_wait=lambda sentence: None,
        should_stop=lambda: next(rounds),
    )
    assert taken == []
    assert len(loop.reader.dead_letters.list_all()) == 2
    await loop.play_all()
    assert [lease.group.slot for lease in loop.take(2)] == [2, 3]


def any_change(data: st.DataObject) -> Callable[[bytes], bytes]:
    """Rubbish, a part, or the record with some bytes changed."""

    def flip(record: bytes) -> bytes:
        bad = bytearray(record)
        for _ in range(data.draw(st.integers(1, 6))):
            bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
        return bytes(bad)

    changes: list[Callable[[bytes], bytes]] = [
        lambda _: data.draw(st.binary(max_size=64)),
        lambda record: record[: data.draw(st.integers(0, len(record) - 1))],
        lambda record: record + data.draw(st.binary(min_size=1, max_size=16)),
        of_another_release,
        flip,
    ]
    return data.draw(st.sampled_from(changes))


# Dozens of runs, as long as each takes on a busy machine.
@pytest.mark.medium
@pytest.mark.timeout(300)
def test_no_bytes_stop_the_reader(
    where: str,
    url: str,
    make_run: Callable[..., Any],
    clock: Any,
    loop_of: Callable[..., Any],
    connect_faces: Callable[..., Any],
) -> None:
    """Whatever stands in the place of any record, the batch is full, and a group that cannot be
    read is a dead letter with these very bytes that may be played again."""
    numbers = iter(range(10**6))

    async def play(data: st.DataObject) -> None:
        run = make_run(
            url,
            run__name=f"u{next(numbers)}",
            run__dir="runs",
            buffer__max_staleness=1,
            trainer__groups_per_step=1,
        )
        loop = loop_of(*await connect_faces(run))
        reader = loop.reader
        await loop.start(3, num_eval_tasks=0)
        await loop.play_all()
        name = data.draw(st.sampled_from([*RECORDS, "closed"]))
        stored = damage(reader, "g0-1-0", name, any_change(data))
        (lease,) = loop.take(1)
        letters = reader.dead_letters.list_all()
        assert lease.group.slot == len(letters)
        assert untrained(reader) == 2 - len(letters)
        for letter in letters:
            assert letter.reason == "malformed"
            assert letter.error
            _, (bad, whole) = reader.dead_letters.read("g0-1")
            assert bad.error
            assert whole.trajectory is not None
            if name != "closed":
                assert bad.records["turn-0" if name == "turn" else name] == stored
            with suppress(RecordError, SchemaMismatch):
                reader.load_episode("g0-1-0")
            assert len(list(reader.archive.trajectories())) == 4
            reader.dead_letters.requeue("g0-1")
            await loop.play_all()
            assert [lease.group.slot for lease in loop.take(1)] == [0]
        reader.close()
        await loop.writer.close()

    with asyncio.Runner() as runner:

        @settings(max_examples=40 if where == "twin" else 25, deadline=None)
        @given(data=st.data())
        def search(data: st.DataObject) -> None:
            runner.run(play(data))

        search()


async def test_recorded_turns_that_cannot_be_read_are_generated_again(
    start: Callable[..., Any], make_turn: Callable[..., Turn]
) -> None:
    """A resumed attempt replays what is whole; what came after a damaged turn is not replayed."""
    loop = await start()
    (claim,) = (await loop.claim(1)).claims
    lost = await loop.open(claim)
    for index, parent in ((0, None), (1, 0), (2, 1), (3, 0)):
        await loop.writer.append_turn(make_turn(lost, index, parent=parent))
    await loop.close(lost, None, failure_kind="infrastructure", outcome="failed")
    loop.reader.client.lset(loop.reader.key(f"episode:{lost}:turns"), 1, b"rubbish")
    (claim,) = (await loop.claim(1)).claims
    resumed = await loop.open(claim, "again")
    recorded = (await loop.writer.load_episode(resumed)).recorded
    assert [turn.turn_id for turn in recorded] == [f"{lost}.0", f"{lost}.3"]
    await loop.writer.append_turn(replace(recorded[0], episode_id=resumed))
    assert (await loop.close(resumed)).counted


async def test_a_task_that_cannot_be_read_is_named(start: Callable[..., Any]) -> None:
    """Whoever claims it is told which one it is, by both schema numbers."""
    loop = await start()
    tasks = loop.reader.key("tasks")
    for field, record in loop.reader.client.hgetall(tasks).items():
        loop.reader.client.hset(tasks, field, of_another_release(record))
    with pytest.raises(SchemaMismatch, match=rf"^tasks \d+: task {OTHER_SCHEMA}"):
        await loop.claim(1)


async def test_a_letter_s_bytes_are_written_to_files(
    server: EmbeddedRedis,
    loop_on: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`dead list` and `dead inspect` say which schema was found and which is allowed; with --save
    every record is in a file of its own."""
    loop = await loop_on(server.url, buffer__max_staleness=1, buffer__redis_url=server.url)
    await loop.play_all()
    stored = damage(loop.reader, "g0-1-0", "turn", of_another_release)
    loop.take(2)
    monkeypatch.setenv("COLUMNS", "300")

    def dead(*words: str) -> str:
        answer = CliRunner().invoke(
            cli, ["buffer", "dead", *words, "--run", str(tmp_path / "t")], catch_exceptions=False
        )
        assert answer.exit_code == 0
        return answer.output

    assert OTHER_SCHEMA in dead("list")
    shown = dead("inspect", "g0-1", "--save", str(tmp_path / "saved"))
    assert f"g0-1-0, turns[0]: turn {OTHER_SCHEMA}" in shown
    assert (tmp_path / "saved" / "g0-1-0" / "turn-0").read_bytes() == stored
    names = {path.name for path in (tmp_path / "saved" / "g0-1-1").iterdir()}
    assert names == {"opening", "closure", "reward", "turn-0"}
    with pytest.raises(NotFound):
        dead("inspect", "g9")
