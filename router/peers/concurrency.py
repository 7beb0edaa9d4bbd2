"""Turns at once of one episode, over all router processes.

Owns: this process's share of them, and asking the others before it goes beyond that. Does not own:
refusing (budgets), which turns run (sessions). Invariant: as long as messages arrive, the turns of
an episode that run in all processes together stay within the limit; within its share a process
asks nobody.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping

import msgspec
import structlog

from outloop.buffer.redis.pubsub import Channel
from outloop.router.episodes.episode import Episodes, EpisodeSession
from outloop.router.peers.publisher import Telling, understood
from outloop.router.peers.turn_locator import ANSWER_S, until

EVERYBODY = "places"
_log = structlog.get_logger()


class Count(msgspec.Struct, tag="count", frozen=True):
    """How many turns of this episode do you run?"""

    process: str
    number: int
    episode_id: str
    is_beyond: bool
    """Whether who asks goes beyond its share: then nobody may count on a share of its own."""


class Running(msgspec.Struct, tag="running", frozen=True):
    """So many, those included for which it asked earlier."""

    process: str
    number: int
    num_turns: int
    is_beyond: bool


_decode = msgspec.msgpack.Decoder(Count | Running).decode
_encode = msgspec.msgpack.Encoder().encode


class _Claim:
    """Turns that wait for the others' answers."""

    def __init__(self, number: int, num_turns: int) -> None:
        self.number = number
        self.num_turns = num_turns
        self.num_own = 0
        """Turns of its own process, these included."""
        self.asked_at = time.monotonic()
        self.is_heard = False
        """Whether its own process has heard the question: who asks later counts its turns."""
        self.answers: dict[str, Running] = {}
        self.changed = asyncio.Event()


class Places:
    """The places of every episode, as far as this process has taken or asked for them."""

    def __init__(
        self, channel: Channel, episodes: Episodes, *, limit: int, num_processes: int, turn_s: float
    ) -> None:
        self._channel = channel
        self._episodes = episodes
        self._limit = limit
        self._min_processes = self._num_processes = num_processes
        self._turn_s = turn_s
        self._process = secrets.token_hex(8)
        self._num_asked = 0
        self._claims: dict[str, list[_Claim]] = {}
        self._beyond: dict[str, dict[str, float]] = {}
        """By episode, the processes that went beyond their share, and when."""
        self._telling = Telling(channel)

    @property
    def hearing(self) -> Mapping[str, Callable[[bytes], None]]:
        """What hears the others, by the name of the channel."""
        return {EVERYBODY: self._hear, _of(self._process): self._hear}

    def close(self) -> None:
        """Tell nobody anything any more."""
        self._telling.close()

    async def keep(self) -> None:
        """Learn how many processes there are, and forget what is long over.

        Raises:
            BufferUnavailable: Redis does not say.
        """
        num_processes = await self._channel.num_listening(EVERYBODY)
        self._num_processes = max(num_processes, self._min_processes)
        horizon = time.monotonic() - self._turn_s
        for episode_id, since in list(self._beyond.items()):
            if max(since.values(), default=0.0) < horizon:
                del self._beyond[episode_id]

    def are_mine(self, episode_id: str, num_turns: int) -> bool:
        """True if this process may run so many at once without asking anybody."""
        claims = self._claims and self._claims.get(episode_id)
        beyond = self._beyond and self._beyond.get(episode_id)
        return num_turns <= self._limit // self._num_processes and not claims and not beyond

    async def take(self, session: EpisodeSession, num_turns: int) -> bool:
        """Ask whether so many more turns stay within the limit; True: they may begin, now.

        Raises:
            BufferUnavailable: the others cannot be asked.
        """
        episode_id = session.episode_id
        self._num_asked += 1
        claim = _Claim(self._num_asked, num_turns)
        claim.num_own = self._taken(session) + num_turns
        is_beyond = claim.num_own > self._limit // self._num_processes
        self._claims.setdefault(episode_id, []).append(claim)
        try:
            ask = Count(self._process, claim.number, episode_id, is_beyond)
            if not await self._channel.is_listening(ANSWER_S):
                _log.warning("places_not_counted", episode_id=episode_id)
                return True
            num_asked = await self._channel.publish(EVERYBODY, _encode(ask))
            await until(lambda: len(claim.answers) >= num_asked, claim.changed, ANSWER_S)
        finally:
            claims = self._claims[episode_id]
            claims.remove(claim)
            if not claims:
                del self._claims[episode_id]
        self._note_beyond(episode_id, claim)
        num_others = sum(
            answer.num_turns
            for process, answer in claim.answers.items()
            if process != self._process
        )
        return claim.num_own + num_others <= self._limit

    def _note_beyond(self, episode_id: str, claim: _Claim) -> None:
        """Who is within its share again, or gone, since it was asked, need not be asked again."""
        since = self._beyond.get(episode_id, {})
        since = {process: at for process, at in since.items() if at > claim.asked_at}
        for process, answer in claim.answers.items():
            if answer.is_beyond and process != self._process:
                since.setdefault(process, time.monotonic())
        self._beyond.pop(episode_id, None)
        if since:
            self._beyond[episode_id] = since

    def _taken(self, session: EpisodeSession) -> int:
        claims = self._claims.get(session.episode_id, ())
        return session.num_running + sum(claim.num_turns for claim in claims)

    def _hear(self, message: bytes) -> None:
        said = understood(_decode, message)
        if said is None:
            return
        if isinstance(said, Running):
            waiting = (claim for same in self._claims.values() for claim in same)
            claim = next((claim for claim in waiting if claim.number == said.number), None)
            if claim is not None:
                claim.answers[said.process] = said
                claim.changed.set()
            return
        claims = self._claims.get(said.episode_id, [])
        if said.process == self._process:
            for claim in claims:
                claim.is_heard = claim.is_heard or claim.number == said.number
        elif said.is_beyond:
            self._beyond.setdefault(said.episode_id, {})[said.process] = time.monotonic()
        session = self._episodes.known(said.episode_id)
        num_turns = session.num_running if session is not None else 0
        num_turns += sum(claim.num_turns for claim in claims if claim.is_heard)
        is_beyond = num_turns > self._limit // self._num_processes
        answer = Running(self._process, said.number, num_turns, is_beyond)
        self._telling.tell(_of(said.process), _encode(answer))


def _of(process: str) -> str:
    return f"places:{process}"
