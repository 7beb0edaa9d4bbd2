"""`make test-levels`: servers and runners come and go in the middle, at every level of asynchrony.

Each level is a run of real parts with a tiny policy, forked from a process that has imported them:
Redis, router, archiver, trainer, two servers and two runners to begin with. At each step of CHANGES
servers and runners are killed, told to stop, and added. The auditor then walks over every token
that an update trained, by the archive alone: the version that sampled it against the version that
was trained by it. It compares the groups that each version was trained on with what a witness saw,
with the checkpoint and with what Redis holds. Exit code 0 if all levels pass.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import nursery
from audit import account_of, is_sound, lineage_of
from taps import MOMENTS, watch, witness_steps
from tiny import make_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fakes import long_conversation
from outloop.buffer.records import Trajectory, Turn
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.redis.run_meta import init_run
from outloop.buffer.run import create_run
from outloop.buffer.settings import Settings, build_settings
from outloop.buffer.telemetry import read_metrics
from outloop.buffer.trajectories.folder import FOLDER
from outloop.buffer.trajectories.reading import read_trajectories
from outloop.buffer.trajectories.trained import read_trained

GROUPS_PER_STEP, GROUP_SIZE = 3, 3
NUM_TURNS = 3
MAX_NEW_TOKENS = 16
STALENESSES = (0, 1, 2, 4, 8)
OVER_PROVISION = 1.5
AT_FIRST = ("router", "archiver", "trainer", "server 0", "server 1", "runner 0", "runner 1")
CHANGES: Mapping[int, tuple[tuple[str, str], ...]] = {
    1: (("add", "server 2"), ("kill", "server 0")),
    2: (("add", "runner 2"), ("kill", "runner 0")),
    3: (("add", "server 0"), ("kill", "server 1")),
    4: (("stop", "runner 1"), ("add", "runner 3")),
    5: (("stop", "server 2"), ("add", "server 3")),
    6: (("kill", "runner 2"), ("kill", "server 0"), ("add", "runner 4")),
}
"""After so many steps, in the middle of the next one's episodes. Somebody of each kind is always
left."""
NUM_TURNS_BEFORE = 12
"""Turns after a step until its changes."""
STOP_S = 20.0
ROLLOUTS = f'''
import asyncio

from long_conversation import converse


def tasks():
    return [{{"question": f"say {{i}}", "wait_s": 0.6 if i % 7 == 0 else 0.1}} for i in range(64)]


async def play(task, episode):
    """A conversation whose tools take long for one task in seven."""

    async def use_tools(number, answer):
        with open("turns", "a") as log:
            log.write(".")
        await asyncio.sleep(task.payload["wait_s"])

    return await converse(task, episode, {NUM_TURNS}, use_tools)
'''


@dataclass(frozen=True)
class Level:
    """How far a run goes ahead of its trainer."""

    max_staleness: int
    is_partial: bool

    def __str__(self) -> str:
        return f"{self.max_staleness}{' partial' if self.is_partial else ''}"

    @property
    def max_age(self) -> int:
        """How old a trained token may be; carried groups are one publish old at level 0."""
        return max(self.max_staleness, int(self.is_partial))

    @property
    def places(self) -> int:
        """Of a runner: two of them hold everything that may be in flight, and so does neither."""
        return -(-(self.max_age + 1) * GROUPS_PER_STEP * GROUP_SIZE // 2)

    @property
    def num_steps(self) -> int:
        """The last ones play nothing new: their groups started before."""
        return max(CHANGES) + 2 + self.max_age


LEVELS = tuple(Level(age, partial) for age in STALENESSES for partial in (False, True))


def settings_of(level: Level, folder: Path, model: Path) -> Settings:
    """Of one level."""
    return build_settings(
        {
            "run": {"name": "level", "dir": str(folder / "runs"), "seed": 1},
            "model": {
                "path": str(model),
                "renderer": "qwen3",
                "renderer_options": {"enable_thinking": False},
                "max_context_tokens": 256,
            },
            "env": {
                "rollout_function_path": "rollouts:play",
                "tasks": "rollouts:tasks",
                "import_dir": str(folder),
                "num_workers": 0,
                "max_concurrent_episodes": level.places,
                "episode_deadline_s": 60.0,
                "max_runner_silence_s": 3.0,
                "max_replaced_share": 1.0,
            },
            "sampling": {"max_new_tokens": MAX_NEW_TOKENS},
            "buffer": {
                "redis_url": f"unix://{folder / 'redis.sock'}",
                "group_size": GROUP_SIZE,
                "max_staleness": level.max_staleness,
                "over_provision": OVER_PROVISION if level.is_partial else 1.0,
                "drop_zero_signal": False,
            },
            "trainer": {
                "num_steps": level.num_steps,
                "groups_per_step": GROUPS_PER_STEP,
                "learning_rate": 1e-3,
                "checkpoint_every": 2,
                "keep_checkpoints": 1000,
                "take_timeout_s": 90.0,
            },
            "server": {"num_servers": 2},
            "trajectories": {"flush_s": 0.5},
        },
        source="level",
    )


class Playing:
    """One level: its parts, who of them comes and goes, and what is left of it."""

    def __init__(self, level: Level, folder: Path, model: Path) -> None:
        self.level = level
        self.folder = folder
        (folder / "rollouts.py").write_text(ROLLOUTS)
        long_conversation.install(folder)
        settings = settings_of(level, folder, model)
        self.run_dir = folder / "runs" / "level"
        self.redis = EmbeddedRedis(self.run_dir / "redis", fsync="everysec")
        url = self.redis.start()
        (folder / "redis.sock").symlink_to(url.removeprefix("unix://"))
        assert settings.buffer.redis_url is not None
        self.run = create_run(settings, self.run_dir, settings.buffer.redis_url)
        init_run(self.run)
        self.pids: dict[str, int] = {}
        self.ending: dict[int, tuple[str, float]] = {}
        """Process id -> who was told to end, and by when: the run goes on meanwhile."""
        self.changes = dict(CHANGES)
        self.num_turns_at: dict[int, int] = {}
        """Turns of all runners when a step was seen to be made."""
        self.num_changes: Counter[str] = Counter()

    def _add(self, name: str) -> None:
        part, _, number = name.partition(" ")
        words = [part, "--run", str(self.run_dir)]
        if part == "server":
            words += ["--index", number]

        def work() -> int:
            os.chdir(self.folder)
            if part == "trainer":
                watch({MOMENTS["trainer"]["mark_trained"]: [witness_steps(self.folder)]})
            return nursery.outloop(words)

        self.pids[name] = nursery.fork(work, self.folder / f"{name}.log")

    def _end(self, name: str, number: signal.Signals) -> None:
        """Send the signal; whoever has ended already is no test of anything."""
        code = nursery.exit_code(self.pids[name])
        if code is not None:
            del self.pids[name]
            raise AssertionError(f"{name} ended by itself with exit code {code}: {self.log()}")
        os.kill(self.pids[name], number)
        self.ending[self.pids.pop(name)] = name, time.monotonic() + STOP_S

    def _reap(self) -> None:
        for pid, (name, deadline) in list(self.ending.items()):
            if nursery.exit_code(pid) is not None:
                del self.ending[pid]
            else:
                assert time.monotonic() < deadline, f"{name} does not end: {self.log()}"

    def play(self, timeout_s: float) -> None:
        """Until the trainer has finished, and the archive has everything.

        Raises:
            AssertionError: it did not finish in time, or somebody ended who was not told to.
        """
        deadline = time.monotonic() + timeout_s
        for name in AT_FIRST:
            self._add(name)
        while (code := nursery.exit_code(self.pids["trainer"])) is None:
            assert time.monotonic() < deadline, f"stuck: {self.log()}"
            self._reap()
            self._change()
            nursery.wait_for_child(0.05)
        del self.pids["trainer"]  # It was waited for.
        assert code == 0, f"the trainer ended with exit code {code}: {self.log()}"
        assert not self.changes, f"the run ended before the changes of {sorted(self.changes)}"
        self._end("archiver", signal.SIGTERM)
        while self.ending:
            self._reap()
            nursery.wait_for_child(0.05)

    def _change(self) -> None:
        made, num_turns = self._num_steps(), self._num_turns()
        for step in sorted(self.changes):
            if step > made:
                return
            if num_turns < self.num_turns_at.setdefault(step, num_turns) + NUM_TURNS_BEFORE:
                return
            for how, name in self.changes.pop(step):
                self.num_changes[f"{name.partition(' ')[0]} {how}"] += 1
                if how == "add":
                    self._add(name)
                else:
                    self._end(name, signal.SIGKILL if how == "kill" else signal.SIGTERM)

    def _num_steps(self) -> int:
        with suppress(FileNotFoundError):
            return max((int(row["step"]) for row in read_metrics(self.run_dir)), default=0)
        return 0

    def _num_turns(self) -> int:
        path = self.folder / "turns"
        return path.stat().st_size if path.exists() else 0

    def suffered(self) -> str:
        """Who came and went."""
        return str(dict(self.num_changes))

    def audit(self) -> str:
        """What archive, checkpoints, witness and Redis prove; one line.

        Raises:
            AssertionError: a token was older than allowed, a slot was trained twice or lost, or an
                attempt is in no column of the ledger.
        """
        account = account_of(self.run, self.folder / "witness")
        held, groups = account.held, account.groups
        assert account.num_dropped == 0, f"{sorted(held.dropped)} were dropped: {held.attempts}"
        num_groups = self.level.num_steps * GROUPS_PER_STEP
        assert len(groups) == num_groups, f"{len(groups)} of {num_groups} groups were trained"
        ages = self._ages(set(groups), held.parents)
        assert max(ages) <= self.level.max_age, f"ages of trained tokens: {sorted(ages.items())}"
        trained = held.attempts["trained"]
        assert trained == len(groups) * GROUP_SIZE, f"{trained} attempts count as trained"
        stats = held.stats
        assert stats["buffer/resumed_attempts"] > 0, "nobody was killed in the middle of an episode"
        return (
            f"{sum(ages.values())} tokens by age {dict(sorted(ages.items()))}, at most "
            f"{self.level.max_age}; {len(groups)} slots trained once; attempts "
            f"{held.attempts}; "
            f"{stats['buffer/resumed_attempts']:.0f} resumed, "
            f"{stats['buffer/replayed_turns']:.0f} turns replayed; {dict(self.num_changes)}"
        )

    def _ages(self, groups: set[str], parents: Mapping[int, int]) -> Counter[int]:
        """Number of trained tokens by the publishes between the version that sampled them and the
        version that the update began with."""
        folder = self.run_dir / FOLDER
        updates = {int(path.stem) for path in (folder / "trained").glob("*.parquet")}
        ages: Counter[int] = Counter()
        trained_in: dict[str, int] = {}
        for trajectory in read_trajectories(folder):
            name = trajectory.episode.episode_id
            for version in updates:
                rows = read_trained(folder, version, name)
                if not rows:
                    continue
                assert trained_in.setdefault(name, version) == version, f"{name} trained twice"
                assert trajectory.episode.group_id in groups, f"{name} is in no trained group"
                ages += _ages_of(trajectory, rows, version, parents)
        assert len(trained_in) == len(groups) * GROUP_SIZE, f"{len(trained_in)} have trained tokens"
        return ages

    def stop(self) -> None:
        """End what is left."""
        for pid in (*self.pids.values(), *self.ending):
            nursery.end(pid)
        self.redis.stop()

    def log(self) -> str:
        """The end of what each part said."""
        return nursery.ends_of_logs(self.folder)


def _ages_of(
    trajectory: Trajectory,
    rows: list[dict[str, Any]],
    version: int,
    parents: Mapping[int, int],
) -> Counter[int]:
    """Of one episode, whose update was published as `version`; a turn that several rows share is
    trained in one of them."""
    began_with = parents[version]
    lineage = sorted(lineage_of(began_with, parents), reverse=True)
    branches = trajectory.branches()
    ages: Counter[int] = Counter()
    num_sampled = sum(len(turn.output_ids) for turn in trajectory.turns)
    for row in rows:
        versions: list[int | None] = []
        for turn in branches[row["branch"]]:
            versions += [None] * len(turn.prompt_ids) + _versions_of(turn)
        assert len(versions) == len(row["trained"]), f"{row['episode_id']}: rows of other lengths"
        for token_version, is_trained in zip(versions, row["trained"], strict=True):
            if is_trained:
                assert token_version is not None, f"{row['episode_id']}: trained what was rendered"
                assert token_version in lineage, f"version {token_version} is of no ancestor"
                ages[lineage.index(token_version)] += 1
    assert sum(ages.values()) == num_sampled, f"{sum(ages.values())} of {num_sampled} were trained"
    return ages


def _versions_of(turn: Turn) -> list[int | None]:
    """The version of each sampled token."""
    versions: list[int | None] = [None] * len(turn.output_ids)
    for span in turn.version_spans:
        versions[span.start : span.end] = [span.policy_version] * (span.end - span.start)
    assert None not in versions, f"{turn.turn_id} has tokens of no version"
    return versions


def play_level(level: Level, model: Path, timeout_s: float) -> int:
    """One level in a process of its own; 0 if it passed."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        playing = Playing(level, Path(folder), model)
        is_good = is_sound(f"level {level}", playing, partial(playing.play, timeout_s))
    return 0 if is_good else 1


def main() -> int:
    """Play the levels, some at a time; a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--levels", default=",".join(map(str, LEVELS)), help="such as 0,4 partial")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=180.0)
    words = parser.parse_args()
    named = {str(level): level for level in LEVELS}
    chosen = [named[name] for name in words.levels.split(",")]
    with tempfile.TemporaryDirectory() as model:
        make_model(Path(model))
        nursery.grow()
        works = [partial(play_level, one, Path(model), words.timeout_s) for one in chosen]
        return 1 if nursery.run_all(works, words.jobs) else 0


if __name__ == "__main__":
    sys.exit(main())
