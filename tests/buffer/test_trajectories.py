"""The trajectory archive: every ended episode once, whoever is killed; no turns left in Redis."""

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from outloop.buffer.codec.jsonl import format_line
from outloop.buffer.errors import Conflict, RecordError
from outloop.buffer.records import Reward, TokenReward
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.settings.trajectories import TrajectorySettings
from outloop.buffer.trajectories.archiver import Archiver
from outloop.buffer.trajectories.folder import FOLDER, Folder, part_paths, read_manifest, writing
from outloop.buffer.trajectories.reading import read_trajectories
from outloop.buffer.trajectories.tables import Decoder, merge_files
from outloop.engine.train.debug.recorded_groups import read_groups

NO_TEXT = Decoder(None)


class Killed(BaseException):
    """The process ends here: nothing that it would have done is done."""


class DyingFolder(Folder):
    """Ends at one of the points at which an archiver may be killed."""

    def __init__(self, folder: Path, dies: str) -> None:
        super().__init__(folder)
        self._dies = dies

    def write_files(self, name: str, write: Callable[[Path, Path], None]) -> int:
        if self._dies == "before files":
            raise Killed
        if self._dies == "between files":

            def write_one(episodes: Path, turns: Path) -> None:
                write(episodes, turns)
                episodes.unlink()
                raise Killed

            return super().write_files(name, write_one)
        return super().write_files(name, write)

    def commit(self, parts: Any, *, num_removed: int = 0) -> None:
        if self._dies == "before manifest":
            raise Killed
        super().commit(parts, num_removed=num_removed)
        if self._dies == "before acknowledgement":
            raise Killed


def rows(folder: Path) -> list[dict[str, Any]]:
    """Every row of the episodes table."""
    found: list[dict[str, Any]] = []
    for part in read_manifest(folder).parts:
        found += pq.read_table(part_paths(folder, part)[0]).to_pylist()
    return found


def archive(loop: Any, folder: Path, **words: Any) -> int:
    """One archiver from its start to its end."""
    with writing(folder) as opened:
        archiver = Archiver(loop.reader.trajectories, opened, TrajectorySettings(**words), NO_TEXT)
        archiver.open()
        return archiver.flush()


async def play_a_mixture(loop: Any) -> dict[str, tuple[str, str]]:
    """A trained, a dropped, an evaluated and two lost episodes; episode -> (fate, reason)."""
    loop.reader.request_eval(
        "0:m", policy_version=0, num_episodes=1, sampling={"temperature": 0.0}, blocks_training=True
    )
    (evaluated,) = (await loop.claim(1)).claims
    await loop.play(evaluated)
    claims = (await loop.claim(4)).claims
    lost = await loop.open(claims[0], "lost")
    await loop.close(lost, None, failure_kind="environment", outcome="failed")
    for claim in (*claims[1:], *(await loop.claim(1)).claims):
        await loop.play(claim)
    first, second = loop.take(2)
    loop.reader.drop(first.group.group_id, "no_signal", fence=loop.fence)
    loop.reader.acknowledge(loop.train([second], 1))
    expected = {f"{evaluated.eval_name}-{evaluated.attempt}": ("evaluated", "")}
    expected["lost"] = ("lost", "environment")
    for lease, fate in ((first, ("dropped", "no_signal")), (second, ("trained", ""))):
        for trajectory in lease.group.trajectories:
            expected[trajectory.episode.episode_id] = fate
    return expected


async def test_what_parts_of_an_episode_earned_is_archived(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    """Components, turns, branches and spans of tokens come back as they were."""
    loop = await start()
    loop.reader.trajectories.open(10**6)
    loop.reader.request_eval(
        "0:m", policy_version=0, num_episodes=1, sampling={"temperature": 0.0}, blocks_training=True
    )
    (claim,) = (await loop.claim(1)).claims
    reward = Reward(
        value=0.5,
        components={"form": 1.0},
        turns={"t0": 0.25},
        branches={"t1": -1.0},
        tokens=(TokenReward("t0", 0, 2, -0.125),),
    )
    await loop.close(await loop.open(claim, "scored"), reward=reward)
    archive(loop, tmp_path / "kept")
    (found,) = read_trajectories(tmp_path / "kept")
    assert found.episode.reward == reward


async def test_every_ended_episode_is_archived_once_with_its_fate(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    """Trained, dropped with its reason, evaluated and lost; then Redis has none of their turns."""
    loop = await start()
    loop.reader.trajectories.open(10**6)
    expected = await play_a_mixture(loop)
    assert archive(loop, tmp_path / "kept") == len(expected)
    found = {row["episode_id"]: (row["fate"], row["reason"]) for row in rows(tmp_path / "kept")}
    assert found == expected
    trained = [row for row in rows(tmp_path / "kept") if row["fate"] == "trained"]
    assert {(row["trained_version"], row["group_size"]) for row in trained} == {(1, 2)}
    for row in trained:
        assert loop.reader.load_episode(row["episode_id"]).turns == ()
    assert archive(loop, tmp_path / "kept") == 0


@pytest.mark.parametrize(
    "dies", ["before files", "between files", "before manifest", "before acknowledgement"]
)
async def test_a_killed_archiver_loses_and_doubles_nothing(
    start: Callable[..., Any], tmp_path: Path, dies: str
) -> None:
    """Killed at each point; the next one ends with every episode once and no stray files."""
    loop = await start()
    loop.reader.trajectories.open(10**6)
    expected = await play_a_mixture(loop)
    (tmp_path / "kept").mkdir()
    dying = Archiver(
        loop.reader.trajectories,
        DyingFolder(tmp_path / "kept", dies),
        TrajectorySettings(),
        NO_TEXT,
    )
    with pytest.raises(Killed):
        dying.flush()
    assert archive(loop, tmp_path / "kept") == len(expected)
    assert Counter(row["episode_id"] for row in rows(tmp_path / "kept")) == Counter(list(expected))
    named = {
        path
        for part in read_manifest(tmp_path / "kept").parts
        for path in part_paths(tmp_path / "kept", part)
    }
    assert set((tmp_path / "kept").glob("*.parquet")) == named


async def test_a_queue_that_redis_gave_back_is_archived_once(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    """As when Redis loses its last second: entries that were acknowledged wait again."""
    loop = await start()
    loop.reader.trajectories.open(10**6)
    expected = await play_a_mixture(loop)
    queue = loop.reader.trajectories

    class Forgetful:
        """Acknowledges nothing at first."""

        forgets = True

        def __getattr__(self, name: str) -> Any:
            return getattr(queue, name)

        def acknowledge(self, next_entry: int) -> int:
            if self.forgets:
                self.forgets = False
                return 0
            return int(queue.acknowledge(next_entry))

    with writing(tmp_path / "kept") as opened:
        archiver = Archiver(Forgetful(), opened, TrajectorySettings(), NO_TEXT)
        archiver.open()
        archiver.flush()
    assert Counter(row["episode_id"] for row in rows(tmp_path / "kept")) == Counter(list(expected))


async def test_a_full_disk_is_waited_out(start: Callable[..., Any], tmp_path: Path) -> None:
    """Nothing is left of what could not be written, and everything is written afterwards."""
    loop = await start()
    loop.reader.trajectories.open(10**6)
    expected = await play_a_mixture(loop)

    class Full(Folder):
        is_full = True

        def write_files(self, name: str, write: Callable[[Path, Path], None]) -> int:
            def fill(episodes: Path, turns: Path) -> None:
                write(episodes, turns)
                raise OSError("no space left on device")

            return super().write_files(name, fill if self.is_full else write)

    (tmp_path / "kept").mkdir()
    folder = Full(tmp_path / "kept")
    archiver = Archiver(loop.reader.trajectories, folder, TrajectorySettings(), NO_TEXT)
    archiver.try_flush()
    assert list((tmp_path / "kept").iterdir()) == []
    folder.is_full = False
    archiver.try_flush()
    assert Counter(row["episode_id"] for row in rows(tmp_path / "kept")) == Counter(list(expected))


async def test_turns_stay_until_they_are_archived_or_too_many_wait(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    """The oldest entries are given up, are counted, and their turns are freed."""
    loop = await start()
    loop.reader.trajectories.open(20)
    await loop.play_all()
    leases = loop.take(2)
    ids = [t.episode.episode_id for lease in leases for t in lease.group.trajectories]
    loop.reader.acknowledge(loop.train(leases, 1))
    kept = [episode_id for episode_id in ids if loop.reader.load_episode(episode_id).turns]
    assert kept == ids[2:], "each has seven ids, so two are twenty at most"
    assert loop.reader.stats()["buffer/archive_overflow"] == 2
    assert archive(loop, tmp_path / "kept") == 2
    assert {row["episode_id"] for row in rows(tmp_path / "kept")} == set(ids[2:])


async def test_without_an_archiver_nothing_waits(start: Callable[..., Any]) -> None:
    """A checkpoint frees what it contains; so does an archive that is given up."""
    loop = await start()
    await loop.play_all()
    leases = loop.take(2)
    loop.reader.acknowledge(loop.train(leases, 1))
    episode_id = leases[0].group.trajectories[0].episode.episode_id
    assert loop.reader.load_episode(episode_id).turns == ()
    loop.reader.trajectories.open(10**6)
    await loop.play_all(version=1)
    leases = loop.take(2, version=1)
    loop.reader.acknowledge(loop.train(leases, 2))
    episode_id = leases[0].group.trajectories[0].episode.episode_id
    assert loop.reader.load_episode(episode_id).turns
    loop.reader.trajectories.abandon()
    assert loop.reader.load_episode(episode_id).turns == ()


async def test_what_is_archived_is_what_was_recorded(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    """Whole trajectories come back line for line as the trainer took them."""
    loop = await start()
    loop.reader.trajectories.open(10**6)
    await loop.play_all()
    leases = loop.take(2)
    taken = {t.episode.episode_id: format_line(t) for x in leases for t in x.group.trajectories}
    loop.reader.acknowledge(loop.train(leases, 1))
    archive(loop, tmp_path / "kept")
    found = {t.episode.episode_id: format_line(t) for t in read_trajectories(tmp_path / "kept")}
    assert found == taken


async def test_the_groups_of_a_run_are_read_as_they_were_taken(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    """By slot, whole; those without signal too, but nothing that was lost or evaluated."""
    loop = await start()
    loop.reader.trajectories.open(10**6)
    await play_a_mixture(loop)
    archive(loop, tmp_path / "run" / FOLDER)
    groups = read_groups(tmp_path / "run")
    assert [group.group_id for group in groups] == ["g0-1", "g1-2"]
    assert [[t.episode.attempt for t in group.trajectories] for group in groups] == [[1, 2], [0, 1]]
    with pytest.raises(RecordError, match="kept its trajectories"):
        read_groups(tmp_path)


@pytest.mark.medium
async def test_parts_are_merged_and_the_oldest_removed(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    """Many flushes leave few files; retention counts what it removed."""
    loop = await start(num_tasks=40, trainer__groups_per_step=1)
    queue = loop.reader.trajectories
    queue.open(10**6)
    num_archived, version = 0, 0
    with writing(tmp_path / "kept") as opened:
        archiver = Archiver(queue, opened, TrajectorySettings(max_episodes=30), NO_TEXT)
        archiver.open()
        for _ in range(20):
            await loop.play_all(version=version)
            leases = loop.take(1, version=version)
            version += 1
            loop.reader.acknowledge(loop.train(leases, version))
            num_archived += archiver.flush()
        manifest = opened.manifest
    assert num_archived == 40
    assert max(part.level for part in manifest.parts) == 1
    assert len(manifest.parts) <= 9
    kept = [row["slot"] for row in rows(tmp_path / "kept")]
    assert len(kept) <= 30
    assert kept == sorted(kept)
    assert kept[-1] == 19
    assert manifest.num_removed == 40 - len(kept)


def test_merged_files_have_every_row_in_order_in_whole_row_groups(tmp_path: Path) -> None:
    """Whatever the sizes of the parts, so that one row group at a time is in memory."""
    sizes, first, parts = (100, 300, 1, 700), 0, list[tuple[Path, Path]]()
    for size in sizes:
        table = pa.table({"row": range(first, first + size), "ids": [[first]] * size})
        paths = (tmp_path / f"episodes-{first}", tmp_path / f"turns-{first}")
        for path in paths:
            pq.write_table(table, path, row_group_size=200)
        parts.append(paths)
        first += size
    episodes, turns = tmp_path / "episodes", tmp_path / "turns"
    merge_files(parts, episodes, turns)
    for number, merged in enumerate((episodes, turns)):
        before = pa.concat_tables(pq.read_table(pair[number]) for pair in parts)
        assert pq.read_table(merged).equals(before)
    metadata = pq.read_metadata(turns)
    groups = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
    assert groups == [256, 256, 256, 256, 77]


@pytest.mark.medium
def test_a_row_group_of_long_texts_has_fewer_rows(tmp_path: Path) -> None:
    """So that what is in memory is bounded by bytes too."""
    table = pa.table({"text": [letter * 100_000 for letter in "abcdefgh" * 5]})
    parts = [(tmp_path / f"episodes-{number}", tmp_path / f"turns-{number}") for number in range(8)]
    for pair in parts:
        for path in pair:
            pq.write_table(table, path)
    episodes, turns = tmp_path / "episodes", tmp_path / "turns"
    merge_files(parts, episodes, turns)
    for path in (episodes, turns):
        metadata = pq.read_metadata(path)
        groups = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
        assert groups == [120, 120, 80]
        assert pq.read_table(path).equals(pa.concat_tables([table] * 8))


async def test_a_share_keeps_whole_groups(start: Callable[..., Any], tmp_path: Path) -> None:
    """Groups are kept or left out whole; everything is acknowledged."""
    loop = await start(num_tasks=40, trainer__groups_per_step=16)
    loop.reader.trajectories.open(10**6)
    await loop.play_all()
    leases = loop.take(16)
    loop.reader.acknowledge(loop.train(leases, 1))
    assert archive(loop, tmp_path / "kept", share=0.5) == 32
    sizes = Counter(row["group_id"] for row in rows(tmp_path / "kept"))
    assert 0 < len(sizes) < 16
    assert set(sizes.values()) == {2}


def test_one_archiver_writes_a_folder(tmp_path: Path) -> None:
    """The second one is refused, and may write when the first has ended."""
    with writing(tmp_path), pytest.raises(Conflict, match="another archiver"), writing(tmp_path):
        pass
    with writing(tmp_path):
        pass


# Four processes are started, each of which may take its minute.
@pytest.mark.medium
@pytest.mark.timeout(300)
async def test_a_process_that_is_killed_again_and_again(
    server: EmbeddedRedis, loop_on: Callable[..., Any], tmp_path: Path
) -> None:
    """`outloop archiver` under kill -9 while episodes end: every one is there once, none waits."""
    loop = await loop_on(server.url, trajectories__flush_s=0.01, trainer__groups_per_step=8)
    loop.reader.trajectories.open(10**6)
    command = [sys.executable, "-m", "outloop.cli", "archiver", "--run", str(tmp_path / "t")]
    folder, expected, version = tmp_path / "t" / "trajectories", set[str](), 0

    def wait_for(is_true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not is_true():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.001)

    for is_last in (False, False, False, True):
        process = subprocess.Popen(command)
        known = len(read_manifest(folder).parts)
        for _ in range(4):
            await loop.play_all(version=version)
            leases = loop.take(8, version=version)
            version += 1
            loop.reader.acknowledge(loop.train(leases, version))
            expected |= {t.episode.episode_id for x in leases for t in x.group.trajectories}
        if is_last:
            wait_for(lambda: loop.reader.stats()["buffer/waiting_for_archive"] == 0)
            process.terminate()
        else:
            wait_for(lambda before=known: len(read_manifest(folder).parts) > before)  # type: ignore[misc]
            process.kill()
        process.wait(30)
    assert Counter(row["episode_id"] for row in rows(folder)) == Counter(expected)
    for episode_id in expected:
        assert loop.reader.load_episode(episode_id).turns == ()
