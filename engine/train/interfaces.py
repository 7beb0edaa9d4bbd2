"""What the trainer needs from the buffer and from publishing.

`outloop.buffer.reader` and `outloop.engine.publish` satisfy these protocols structurally. The loops
use nothing else of either, so that a small in-memory program can replace both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Literal, Protocol

from outloop.buffer.records import (
    CheckpointMark,
    DropReason,
    EvalEpisode,
    EvalProgress,
    Lease,
    ServerEntry,
    Trajectory,
)
from outloop.engine.publish.tensor_source import TensorSource


class Registry(Protocol):
    """The run's processes, as far as the trainer uses them."""

    def servers(self) -> tuple[ServerEntry, ...]: ...

    def report_status(self, part: str, fields: dict[str, str]) -> None: ...


class Reader(Protocol):
    """The buffer's sync face, as far as the trainer uses it; see docs/hand-offs.md."""

    @property
    def registry(self) -> Registry: ...

    def acquire_fence(self) -> int: ...

    def take(
        self,
        num_groups: int,
        *,
        fence: int,
        policy_version: int,
        timeout_s: float,
        on_wait: Callable[[str], None],
        should_stop: Callable[[], bool],
    ) -> list[Lease]: ...

    def mark_trained(
        self, group_ids: Sequence[str], *, fence: int, policy_version: int
    ) -> None: ...

    def drop(self, group_id: str, reason: DropReason, *, fence: int, error: str = "") -> None: ...

    def acknowledge(self, mark: CheckpointMark) -> None: ...

    def recover(self, mark: CheckpointMark | None, *, fence: int) -> int: ...

    def announce_version(self, policy_version: int, parent: int | None) -> None: ...

    def acknowledge_version(self, policy_version: int) -> None: ...

    def version_depths(self, versions: Collection[int]) -> dict[int, int]: ...

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
    ) -> None: ...

    def eval_progress(self, name: str) -> EvalProgress: ...

    def eval_episodes(self, name: str) -> tuple[EvalEpisode, ...]: ...

    def change_task_weights(self, weights: Mapping[str, float]) -> None: ...

    def sft_progress(self) -> tuple[int, bool]: ...

    def sft_trajectories(self) -> Iterator[Trajectory]: ...

    def set_steps_left(self, num_steps: int) -> None: ...

    def set_run_state(self, state: Literal["running", "finished", "failed"]) -> None: ...

    def stats(self) -> dict[str, float]: ...


class LeaseRenewer(Protocol):
    """A connection of its own to the buffer, for the thread that renews leases."""

    def renew(self, fence: int) -> None: ...


class PublishReport(Protocol):
    """What a publish cost."""

    @property
    def duration_s(self) -> float: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def pause_s(self) -> float: ...

    @property
    def peak_extra_buckets(self) -> float: ...

    @property
    def wrong_in_a_row(self) -> int: ...


class Publisher(Protocol):
    """Makes weights available to every server, as one transaction.

    Where servers share the trainer's devices (trainer.is_colocated), it also has them give their
    memory and take it again; elsewhere these calls do nothing.
    """

    def wait_for_servers(self, on_wait: Callable[[str], None]) -> None: ...

    def take_devices(
        self, *, keeps_weights: bool = False, on_wait: Callable[[str], None]
    ) -> None: ...

    def give_devices(self, source: TensorSource) -> None: ...

    def publish(
        self, source: TensorSource, policy_version: int, *, on_wait: Callable[[str], None]
    ) -> PublishReport: ...
