"""Episodes as this router process knows them.

Owns: the turn tree and running turns of each open episode, loading them from the buffer.
Does not own: what is true about an episode, which is in the buffer. Invariant: everything here can
be loaded again, so the process may die at any moment.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from outloop.buffer.records import OpenEpisode, Opening
from outloop.router.buffer_protocol import EpisodeBuffer
from outloop.router.episodes.replay import RecordedTurns
from outloop.router.episodes.turn_tree import TurnTree
from outloop.router.errors import Refusal, episode_closed
from outloop.router.rendering.renderer import PolicyRenderer
from outloop.router.servers.pool import NOBODY, Whose
from outloop.router.turns.buffer_retry import Patience

if TYPE_CHECKING:
    from outloop.router.turns.in_flight import TurnJob

_FORGET_AFTER_S = 60.0
"""It is remembered this long of an episode that it was closed, or has expired."""


class EpisodeSession:
    """One episode: its opening, turns and running turns. `opening` None: unkeyed traffic."""

    def __init__(self, opening: Opening | None, renderer: PolicyRenderer) -> None:
        self.opening = opening
        self.tree = TurnTree(renderer)
        self.recorded = RecordedTurns(())
        """What answers requests of an attempt that was lost before."""
        self.jobs: dict[str, list[TurnJob]] = {}
        """By retry key, oldest first."""
        self.undelivered: set[str] = set()
        """Retry keys of turns of other processes that nobody has the answer of."""
        self.refused_attempts: dict[str, int] = {}
        """By retry key: the last attempt at a new turn that was told to come back."""
        self.is_closed = False
        self.whose = Whose(opening.episode_id, opening.task_id) if opening is not None else NOBODY
        self.last_server: str | None = None
        self.num_recorded = 0
        """Turns that the buffer has, as far as it has said."""
        self.ended_at: float | None = None
        """Monotonic seconds; None: it is open."""
        self.num_tokens = 0
        """Ids of recorded turns: prompts after their parents', and outputs."""

    @property
    def num_running(self) -> int:
        """Turns that are not over."""
        return sum(1 for _ in self._running_ids())

    @property
    def num_turns(self) -> int:
        """Recorded turns, and those in flight here that are not known to be recorded."""
        num_new = sum(turn_id not in self.tree.nodes for turn_id in self._running_ids())
        return max(self.num_recorded, len(self.tree.nodes)) + num_new

    def _running_ids(self) -> Iterator[str]:
        for same in self.jobs.values():
            for job in same:
                if not job.is_over:
                    yield from job.turn_ids

    @property
    def episode_id(self) -> str:
        """The episode's id; empty for unkeyed traffic."""
        return self.opening.episode_id if self.opening is not None else ""

    def check_open(self) -> None:
        """Refuse turns of an episode that has ended.

        Raises:
            Refusal: 404.
        """
        if self.opening is None:
            return
        if self.is_closed:
            raise episode_closed(
                f"episode {self.episode_id} is closed; its key opens nothing any more. "
                "Open a new episode."
            )
        if time.time() > self.opening.deadline_at:
            raise Refusal(
                404,
                "episode_expired",
                f"episode {self.episode_id} passed its deadline "
                f"deadline_at={self.opening.deadline_at:.0f}; its key opens nothing any more. "
                "Finish earlier, or raise env.episode_deadline_s.",
            )

    def meets_undelivered(self, retry_key: str) -> bool:
        """True, once, for a request whose answer another process could not hand over."""
        if retry_key not in self.undelivered:
            return False
        self.undelivered.discard(retry_key)
        return True

    def is_retry_of_refused(self, retry_key: str, attempt: int) -> bool:
        """True if the attempt before this one asked for a new turn and was told to come back.

        It asks for that turn then, not for an earlier one of the same request.
        """
        is_running = any(not job.is_over for job in self.jobs.get(retry_key, ()))
        return not is_running and self.refused_attempts.get(retry_key) == attempt - 1

    def let_go(self, job: TurnJob, retry_key: str) -> None:
        """Forget a job whose answer was handed over; its turns tell a retry the same again."""
        if job.is_delivered and self.opening is not None:
            jobs = self.jobs.get(retry_key, [])
            if job in jobs:
                jobs.remove(job)
            if not jobs:
                self.jobs.pop(retry_key, None)

    def add_recorded(self, loaded: OpenEpisode) -> None:
        """Take over turns that another process recorded."""
        for turn in loaded.turns:
            if turn.turn_id not in self.tree.nodes:
                self.tree.add(turn)
                self.num_tokens += len(turn.prompt_ids) + len(turn.output_ids)
                self.recorded.discard(turn.turn_id)
                if turn.mask_reason == "undelivered" and not turn.loss_spans and turn.retry_key:
                    self.undelivered.add(turn.retry_key)
        self.num_recorded = max(self.num_recorded, len(loaded.turns))
        self.is_closed = self.is_closed or loaded.is_closed


class Episodes:
    """Every episode this process serves."""

    def __init__(self, buffer: EpisodeBuffer, renderer: PolicyRenderer, patience: Patience) -> None:
        self._buffer = buffer
        self._renderer = renderer
        self._patience = patience
        self._sessions: dict[str, EpisodeSession] = {}
        self._loading: dict[str, asyncio.Task[EpisodeSession]] = {}

    def __len__(self) -> int:
        return sum(not session.is_closed for session in self._sessions.values())

    def add(self, opening: Opening) -> EpisodeSession:
        """An episode that has just been opened; the known session when it is known."""
        session = self._sessions.get(opening.episode_id)
        if session is None:
            session = EpisodeSession(opening, self._renderer)
            self._sessions[opening.episode_id] = session
        return session

    def known(self, episode_id: str) -> EpisodeSession | None:
        """The session in memory, without asking the buffer."""
        return self._sessions.get(episode_id)

    async def get(self, episode_id: str) -> EpisodeSession:
        """The session of an episode, loaded from the buffer when it is not in memory.

        Raises:
            Refusal: 404, there is no such episode.
        """
        session = self._sessions.get(episode_id)
        if session is not None:
            return session
        task = self._loading.get(episode_id)
        if task is None:
            task = asyncio.create_task(self._load(episode_id))
            self._loading[episode_id] = task
            task.add_done_callback(lambda _: self._loading.pop(episode_id, None))
        return await asyncio.shield(task)

    async def refresh(self, session: EpisodeSession) -> bool:
        """Add turns that other processes recorded; True if there were any.

        They are counted first: an episode whose turns are all known is not read again.
        """
        if session.opening is None:
            return False
        num_turns = await self._patience.ask(self._buffer.count_turns, session.episode_id)
        if num_turns <= len(session.tree.nodes):
            return False
        loaded = await self._patience.ask(self._buffer.load_episode, session.episode_id)
        before = len(session.tree.nodes)
        if loaded is not None:
            session.add_recorded(loaded)
        return len(session.tree.nodes) > before

    def forget_ended(self) -> None:
        """Drop episodes that ended a while ago from memory."""
        horizon, closed_before = time.time() - _FORGET_AFTER_S, time.monotonic() - _FORGET_AFTER_S
        for episode_id, session in list(self._sessions.items()):
            assert session.opening is not None
            if session.is_closed and session.ended_at is None:
                self.forget(session)
            is_long_closed = session.ended_at is not None and session.ended_at < closed_before
            if is_long_closed or session.opening.deadline_at < horizon:
                del self._sessions[episode_id]

    def forget(self, session: EpisodeSession) -> None:
        """Drop what a closed episode keeps in memory; only that it is closed stays."""
        session.is_closed = True
        session.ended_at = time.monotonic()
        session.jobs = {}
        session.undelivered = set()
        session.recorded = RecordedTurns(())
        session.tree = TurnTree(self._renderer)

    async def _load(self, episode_id: str) -> EpisodeSession:
        loaded = await self._patience.ask(self._buffer.load_episode, episode_id)
        if loaded is None:
            raise Refusal(
                404, "episode_not_found", f"there is no episode episode_id={episode_id!r}"
            )
        session = self.add(loaded.opening)
        if loaded.is_closed:
            # Its key is asked with after its end: nothing but that is to be remembered.
            self.forget(session)
            return session
        session.add_recorded(loaded)
        session.recorded = RecordedTurns(loaded.recorded, before=loaded.turns)
        return session
