"""Episodes as this router process knows them.

Owns: the turn tree and running turns of each open episode, loading them from the buffer.
Does not own: what is true about an episode, which is in the buffer. Invariant: everything here can
be loaded again, so the process may die at any moment.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from outloop.buffer.records import OpenEpisode, Opening, Turn
from outloop.buffer.store.refusal_notes import EpisodeUsage
from outloop.buffer.writer import BufferWriter
from outloop.router.buffer_retry import BufferRetry
from outloop.router.episodes.replay import RecordedTurns
from outloop.router.episodes.turn_tree import TurnTree
from outloop.router.errors import Refusal, episode_closed
from outloop.router.rendering.renderer import PolicyRenderer
from outloop.router.servers.pool import NO_AFFINITY, Affinity
from outloop.router.timings import DEFAULT_TIMINGS, Timings

if TYPE_CHECKING:
    from outloop.router.episodes.in_flight import InFlightTurn

_MAX_REFUSED_ATTEMPTS = 1024


def without_side_data(turn: Turn) -> Turn:
    """A turn as it is kept here: its experts and its support, which are most of its bytes, are in
    the buffer."""
    if turn.routed_experts is None and turn.support is None:
        return turn
    return replace(turn, routed_experts=None, support=None)


@dataclass(slots=True)
class UpstreamUsage:
    """What an episode has used of an upstream, through this process."""

    num_requests: int = 0
    num_tokens: int = 0


class LiveEpisode:
    """One episode: its opening, turns and running turns. `opening` None: unkeyed traffic."""

    def __init__(self, opening: Opening | None, renderer: PolicyRenderer) -> None:
        self.opening = opening
        self.tree = TurnTree(renderer)
        self.recorded = RecordedTurns(())
        """What answers requests of an attempt that was lost before."""
        self.turns: dict[str, list[InFlightTurn]] = {}
        """In flight, or not yet known to have reached their clients; by retry key, oldest first."""
        self.undelivered: set[str] = set()
        """Retry keys of turns of other processes that nobody has the answer of."""
        self._refused_attempts: dict[str, int] = {}
        """By retry key: the last attempt at a new turn that was told to come back."""
        self.large_body = asyncio.Lock()
        """Held while a large body is read and rendered."""
        self.tree_lock = asyncio.Lock()
        """Held while the tree is changed, or read by another thread."""
        self.num_too_long = 0
        """Requests that were rendered and then refused because they exceed the context."""
        self.num_refused = 0
        """Refused calls that this process counted in the episode's record."""
        self.upstreams: dict[str, UpstreamUsage] = {}
        """By the names of upstreams."""
        self.num_counted = 0
        """Requests for the number of tokens alone."""
        self.is_closed = False
        self.affinity = NO_AFFINITY
        if opening is not None:
            self.affinity = Affinity(opening.episode_id, opening.task_id)
        self.num_asked = 0
        """Model calls that were asked of this process, recorded or not."""
        self.last_server: str | None = None
        self.frozen_version: int | None = None
        """Which of the versions that servers keep it was given last, where it asks for any."""
        self.num_recorded = 0
        """Turns that the buffer has, as far as is known here."""
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
        for turns in self.turns.values():
            for turn in turns:
                if not turn.is_over:
                    yield from turn.turn_ids

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

    def is_retry(self, retry_key: str, attempt: int | None) -> bool:
        """True if a request asks for an earlier turn of the same request, or joins one in flight.

        Args:
            attempt: attempts that, by its own account, came before this one. If the last of them
                asked for a new turn and was told to come back, this one asks for that turn; None:
                an idempotency key makes every attempt the same request.
        """
        if not attempt:
            return attempt is None
        is_running = any(not turn.is_over for turn in self.turns.get(retry_key, ()))
        return is_running or self._refused_attempts.get(retry_key) != attempt - 1

    @contextmanager
    def noting_refusal(self, retry_key: str, attempt: int | None) -> Iterator[None]:
        """Remember of a new turn whether its client is told to come back.

        Args:
            attempt: attempts before this one; None: it is no new turn.
        """
        try:
            yield
        except Refusal as refusal:
            if refusal.status >= 500 and attempt is not None:
                self._refused_attempts[retry_key] = attempt
                while len(self._refused_attempts) > _MAX_REFUSED_ATTEMPTS:
                    del self._refused_attempts[next(iter(self._refused_attempts))]
            raise
        if attempt is not None and self._refused_attempts:
            self._refused_attempts.pop(retry_key, None)

    def forget_delivered(self, turn: InFlightTurn) -> None:
        """Forget a turn whose answer was handed over; its record tells a retry the same again."""
        if turn.is_delivered and self.opening is not None:
            self.remove(turn)

    def remove(self, turn: InFlightTurn) -> None:
        """Forget a turn that is no longer in flight."""
        turns = self.turns.get(turn.retry_key, [])
        if turn in turns:
            turns.remove(turn)
        if not turns:
            self.turns.pop(turn.retry_key, None)

    def note_usage(self, usage: EpisodeUsage) -> None:
        """Take over what the buffer says that the episode has used, whoever recorded it."""
        self.num_recorded = max(self.num_recorded, usage.num_turns)
        self.num_tokens = max(self.num_tokens, usage.num_tokens)

    def add_recorded(self, loaded: OpenEpisode) -> None:
        """Take over turns that another process recorded."""
        for turn in loaded.turns:
            if turn.turn_id not in self.tree.nodes:
                self.tree.add(without_side_data(turn))
                self.recorded.discard(turn.turn_id)
                if turn.mask_reason == "undelivered" and not turn.loss_spans and turn.retry_key:
                    self.undelivered.add(turn.retry_key)
        num_tokens = sum(len(turn.prompt_ids) + len(turn.output_ids) for turn in loaded.turns)
        self.note_usage(EpisodeUsage(num_turns=len(loaded.turns), num_tokens=num_tokens))
        self.is_closed = self.is_closed or loaded.is_closed


class Episodes:
    """Every episode this process serves."""

    def __init__(
        self,
        buffer: BufferWriter,
        renderer: PolicyRenderer,
        buffer_retry: BufferRetry,
        timings: Timings = DEFAULT_TIMINGS,
    ) -> None:
        self._buffer = buffer
        self._renderer = renderer
        self._buffer_retry = buffer_retry
        self._forget_after_s = timings.forget_after_s
        self._episodes: dict[str, LiveEpisode] = {}
        self._loading: dict[str, asyncio.Task[LiveEpisode]] = {}

    def __len__(self) -> int:
        return sum(not episode.is_closed for episode in self._episodes.values())

    def add(self, opening: Opening) -> LiveEpisode:
        """An episode that has just been opened; the known episode when it is known."""
        episode = self._episodes.get(opening.episode_id)
        if episode is None:
            episode = LiveEpisode(opening, self._renderer)
            self._episodes[opening.episode_id] = episode
        return episode

    def unkeyed(self) -> LiveEpisode:
        """What stands for the episode of a request without a key: nothing of it is kept."""
        return LiveEpisode(None, self._renderer)

    def known(self, episode_id: str) -> LiveEpisode | None:
        """The episode in memory, without asking the buffer."""
        return self._episodes.get(episode_id)

    async def get(self, episode_id: str) -> LiveEpisode:
        """The episode of an episode, loaded from the buffer when it is not in memory.

        Raises:
            Refusal: 404, there is no such episode.
        """
        episode = self._episodes.get(episode_id)
        if episode is not None:
            return episode
        task = self._loading.get(episode_id)
        if task is None:
            task = asyncio.create_task(self._load(episode_id))
            self._loading[episode_id] = task
            task.add_done_callback(lambda _: self._loading.pop(episode_id, None))
        return await asyncio.shield(task)

    async def refresh(self, episode: LiveEpisode) -> bool:
        """Add turns that other processes recorded; True if there were any.

        They are counted first: an episode whose turns are all known is not read again.
        """
        if episode.opening is None:
            return False
        num_turns = await self._buffer_retry.call(self._buffer.count_turns, episode.episode_id)
        if num_turns <= len(episode.tree.nodes):
            return False
        loaded = await self._buffer_retry.call(self._buffer.load_episode, episode.episode_id)
        before = len(episode.tree.nodes)
        if loaded is not None:
            async with episode.tree_lock:
                episode.add_recorded(loaded)
        return len(episode.tree.nodes) > before

    def forget_ended(self) -> None:
        """Drop episodes that ended a while ago from memory."""
        after_s = self._forget_after_s
        horizon, closed_before = time.time() - after_s, time.monotonic() - after_s
        for episode_id, episode in list(self._episodes.items()):
            assert episode.opening is not None
            if episode.is_closed and episode.ended_at is None:
                self.forget(episode)
            is_long_closed = episode.ended_at is not None and episode.ended_at < closed_before
            if is_long_closed or episode.opening.deadline_at < horizon:
                del self._episodes[episode_id]

    def forget(self, episode: LiveEpisode) -> None:
        """Drop what a closed episode keeps in memory; only that it is closed stays."""
        episode.is_closed = True
        episode.ended_at = time.monotonic()
        episode.turns = {}
        episode.undelivered = set()
        episode.recorded = RecordedTurns(())
        episode.tree = TurnTree(self._renderer)

    async def _load(self, episode_id: str) -> LiveEpisode:
        loaded = await self._buffer_retry.call(self._buffer.load_episode, episode_id)
        if loaded is None:
            raise Refusal(
                404, "episode_not_found", f"there is no episode episode_id={episode_id!r}"
            )
        episode = self.add(loaded.opening)
        if loaded.is_closed:
            # Its key is asked with after its end: nothing but that is to be remembered.
            self.forget(episode)
            return episode
        episode.add_recorded(loaded)
        episode.recorded = RecordedTurns(loaded.recorded, before=loaded.turns)
        return episode
