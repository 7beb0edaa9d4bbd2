"""What the router needs from the buffer.

Owns: the list of calls. Does not own: how they are kept. Invariant: `BufferWriter` has them; the
router uses nothing else of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outloop.buffer.errors import OutloopError
from outloop.buffer.records import (
    ClaimResult,
    CloseResult,
    FailureKind,
    OpenEpisode,
    Opening,
    Outcome,
    PolicyState,
    Reward,
    Task,
    Trajectory,
    Turn,
)
from outloop.buffer.redis.pubsub import Channel
from outloop.buffer.registry import Runners
from outloop.buffer.store.budget_notes import BudgetNotes, EpisodeUsage
from outloop.buffer.tasks.mixture import TaskSource


class EpisodeBuffer(Protocol):
    """The async face of the buffer, as docs/hand-offs.md fixes it."""

    @property
    def budget_notes(self) -> BudgetNotes: ...

    @property
    def channel(self) -> Channel: ...

    async def close(self) -> None: ...

    async def register_tasks(
        self,
        tasks: Sequence[Task],
        eval_tasks: Sequence[Task],
        sources: Sequence[TaskSource] = (),
        *,
        num_test_tasks: int = 0,
    ) -> None: ...

    @property
    def runners(self) -> Runners: ...

    async def claim(self, *, key: str, count: int, runner_id: str = "") -> ClaimResult: ...

    async def open_episode(self, opening: Opening) -> None: ...

    async def open_episodes(
        self, openings: Sequence[Opening]
    ) -> tuple[OutloopError | None, ...]: ...

    async def load_episode(self, episode_id: str) -> OpenEpisode | None: ...

    async def count_turns(self, episode_id: str) -> int: ...

    async def append_turn(self, turn: Turn) -> EpisodeUsage: ...

    async def put_reward(self, episode_id: str, reward: Reward, *, key: str) -> None: ...

    async def close_episode(
        self,
        episode_id: str,
        *,
        outcome: Outcome,
        failure_kind: FailureKind | None,
        reward: Reward | None,
        error: str,
        key: str,
        output: str = "",
    ) -> CloseResult: ...

    async def put_trajectories(
        self, trajectories: Sequence[Trajectory], *, key: str, final: bool
    ) -> None: ...

    async def policy_state(self) -> PolicyState: ...

    async def set_paused(self, paused: bool) -> None: ...

    async def register_part(self, name: str, facts: dict[str, str]) -> None: ...

    async def report_status(self, part: str, fields: dict[str, str]) -> None: ...
