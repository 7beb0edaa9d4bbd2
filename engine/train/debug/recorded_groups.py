"""Groups from a file in place of the buffer, and no servers: the trainer alone.

Groups are taken in the order of the file, each once. A resume continues after the groups that its
checkpoint contains.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from outloop.buffer.codec.jsonl import read_lines
from outloop.buffer.errors import RecordError, SettingsError
from outloop.buffer.records import (
    CheckpointMark,
    DropReason,
    EvalEpisode,
    EvalProgress,
    Group,
    Lease,
    ServerEntry,
    Trajectory,
)
from outloop.buffer.trajectories.folder import FOLDER
from outloop.engine.train.data.samples import oldest_trained_version

_MAX_NAMED_LINES = 5


def read_groups(path: Path) -> list[Group]:
    """The training groups of a file of `outloop buffer export`, in its order; or those that the
    run in a folder took, by slot, from its archive.

    Raises:
        RecordError: a line is no trajectory, or there is no training episode; names the lines.
        SettingsError: reading an archive needs pyarrow.
    """
    by_id = _groups_of_run(path) if path.is_dir() else _groups_of_file(path)
    if not by_id:
        raise RecordError(
            f"path={str(path)!r} holds no training episode; give a file of outloop buffer export, "
            "or a run that has kept its trajectories"
        )
    return [group_of(one, slot, by_id[one]) for slot, one in enumerate(by_id)]


def group_of(group_id: str, slot: int, trajectories: Sequence[Trajectory]) -> Group:
    """The group that consists of these."""
    return Group(
        group_id=group_id,
        slot=slot,
        task_id=trajectories[0].episode.task_id,
        group_size=len(trajectories),
        trajectories=tuple(trajectories),
    )


def _groups_of_run(path: Path) -> dict[str, list[Trajectory]]:
    try:
        from outloop.buffer.trajectories.reading import read_trajectories, taken_groups
    except ImportError as error:
        raise SettingsError(
            f"path={str(path)!r}: reading trajectories needs the package pyarrow, which is not "
            "installed; run pip install 'outloop[view]'"
        ) from error

    folder = path / FOLDER
    taken = taken_groups(folder)
    episode_ids = {one for group in taken.values() for one in group}
    by_id: dict[str, list[Trajectory]] = {group_id: [] for group_id in taken}
    for trajectory in read_trajectories(folder, episode_ids):
        by_id[trajectory.episode.group_id or ""].append(trajectory)
    for group in by_id.values():
        group.sort(key=lambda trajectory: trajectory.episode.attempt)
    return by_id


def _groups_of_file(path: Path) -> dict[str, list[Trajectory]]:
    by_id: dict[str, list[Trajectory]] = {}
    bad: list[tuple[int, Exception]] = []
    for number, item in read_lines(path):
        if not isinstance(item, Trajectory):
            bad.append((number, item))
        elif item.episode.purpose == "train" and item.episode.group_id is not None:
            by_id.setdefault(item.episode.group_id, []).append(item)
    if bad:
        named = "; ".join(f"line {number}: {error}" for number, error in bad[:_MAX_NAMED_LINES])
        raise RecordError(f"path={str(path)!r} has {len(bad)} bad lines; fix them: {named}")
    return by_id


class NoProcesses:
    """The registry of a recording: no server, and no process that reads a status."""

    def servers(self) -> tuple[ServerEntry, ...]:
        """There are none."""
        return ()

    def report_status(self, part: str, fields: dict[str, str]) -> None:
        """No other process reads it."""


class Recording:
    """The reader's calls over recorded groups; sets `stop` when none is left."""

    def __init__(self, groups: Sequence[Group], stop: threading.Event) -> None:
        self.registry = NoProcesses()
        self._groups = groups
        self._stop = stop
        self._next = 0

    def acquire_fence(self) -> int:
        """There is no other trainer."""
        return 1

    def take(
        self,
        num_groups: int,
        *,
        fence: int,
        policy_version: int,
        timeout_s: float,
        on_wait: Callable[[str], None],
        should_stop: Callable[[], bool],
    ) -> list[Lease]:
        """The next groups; fewer at the end of the file, then none and a stop."""
        groups = self._groups[self._next : self._next + num_groups]
        self._next += len(groups)
        if not groups:
            self._stop.set()
        return [Lease(group=group, fence=fence, deadline=float("inf")) for group in groups]

    def recover(self, mark: CheckpointMark | None, *, fence: int) -> int:
        """One below the version to begin with: that of the oldest recorded token, or the mark's."""
        if mark is not None:
            self._next = mark.next_slot
            return mark.policy_version
        found = (oldest_trained_version(t) for group in self._groups for t in group.trajectories)
        return min((version for version in found if version is not None), default=0) - 1

    def eval_progress(self, name: str) -> EvalProgress:
        """A recording has no runners."""
        return EvalProgress(num_done=0, num_total=0, rewards=())

    def eval_episodes(self, name: str) -> tuple[EvalEpisode, ...]:
        """A recording has no runners."""
        return ()

    def version_depths(self, versions: Collection[int]) -> dict[int, int]:
        """Unknown: every version counts as one publish."""
        return {}

    def sft_progress(self) -> tuple[int, bool]:
        """All of it is there."""
        return sum(len(group.trajectories) for group in self._groups), True

    def sft_trajectories(self) -> Iterator[Trajectory]:
        """The recorded episodes as what is to be imitated: a teacher's, or the best of many."""
        for group in self._groups:
            for one in group.trajectories:
                episode = msgspec.structs.replace(one.episode, purpose="sft")
                yield msgspec.structs.replace(one, episode=episode)

    def stats(self) -> dict[str, float]:
        """How many groups are left; nothing else is counted."""
        return {"buffer/ready_groups": float(len(self._groups) - self._next)}

    def renew(self, fence: int) -> None:
        """Nothing expires."""

    def mark_trained(self, group_ids: Sequence[str], *, fence: int, policy_version: int) -> None:
        """Nothing is admitted."""

    def drop(self, group_id: str, reason: DropReason, *, fence: int, error: str = "") -> None:
        """The file keeps what is dropped; the metrics say why."""

    def acknowledge(self, mark: CheckpointMark) -> None:
        """The checkpoint itself is the record."""

    def announce_version(self, policy_version: int, parent: int | None) -> None:
        """A recording has no servers."""

    def acknowledge_version(self, policy_version: int) -> None:
        """A recording has no servers."""

    def request_eval(
        self,
        name: str,
        *,
        policy_version: int,
        num_episodes: int,
        sampling: dict[str, float],
        suite: str = "validation",
        samples_per_task: int = 0,
        blocks_training: bool = False,
    ) -> None:
        """A recording has no runners."""

    def change_task_weights(self, weights: Mapping[str, float]) -> None:
        """What was recorded was played."""

    def set_steps_left(self, num_steps: int) -> None:
        """Nothing is admitted."""

    def set_run_state(self, state: Literal["running", "finished", "failed"]) -> None:
        """No other process reads it."""


@dataclass(frozen=True, slots=True)
class NoPublish:
    """The report of a publish without servers."""

    duration_s: float = 0.0
    num_bytes: int = 0
    pause_s: float = 0.0
    peak_extra_buckets: float = 0.0
    wrong_in_a_row: int = 0


class NoServers:
    """A publisher without servers."""

    def wait_for_servers(self, on_wait: Callable[[str], None]) -> None:
        """There are none."""

    def take_devices(self, *, keeps_weights: bool = False, on_wait: Callable[[str], None]) -> None:
        """The device is the trainer's alone."""

    def give_devices(self, source: Any) -> None:
        """Nobody waits for it."""

    def publish(
        self, source: Any, policy_version: int, *, on_wait: Callable[[str], None]
    ) -> NoPublish:
        """Weights stay where they are."""
        return NoPublish()
