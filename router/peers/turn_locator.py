"""The other router processes of the run, for what one alone cannot know.

Owns: asking which of them draws a turn, answering them, waiting until they have. Does not own: what
is recorded (buffer), drawing (service). Invariant: nothing here is needed for a turn to be recorded
rightly; a process that does not answer in time draws nothing, as far as the others are concerned.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping

import msgspec
import structlog

from outloop.buffer.errors import DeadlineExceeded
from outloop.buffer.redis.pubsub import Channel
from outloop.router.episodes.episode import Episodes, EpisodeSession
from outloop.router.peers.publisher import Telling, understood
from outloop.router.turns.in_flight import TurnJob

EVERYBODY = "routers"
ROUND_S = 2.0
"""Who waits for another process's turn asks so often whether it is still there."""
ANSWER_S = 5.0
"""A process that says nothing for so long counts as gone; so does one that no longer asks."""
_log = structlog.get_logger()


class Ask(msgspec.Struct, tag="ask", frozen=True):
    """Who draws this turn?"""

    process: str
    number: int
    """Of the question; a question that is put again keeps it."""
    round: int
    episode_id: str
    retry_key: str
    has_client: bool
    """Whether somebody waits for the answer."""


class Answer(msgspec.Struct, tag="answer", frozen=True):
    """A process draws it, or does not."""

    process: str
    number: int
    round: int
    draws: bool
    started_at: float = 0.0
    """Of the turn, by which its record is known; 0: it may be one that is recorded already."""


class Over(msgspec.Struct, tag="over", frozen=True):
    """The turn that was asked for is recorded, or will not be."""

    number: int


class Left(msgspec.Struct, tag="left", frozen=True):
    """A turn is drawn and its client has gone: who asks the same again is this client."""

    process: str
    episode_id: str
    retry_key: str


_decode = msgspec.msgpack.Decoder(Ask | Answer | Over | Left).decode
_encode = msgspec.msgpack.Encoder().encode


class _Asking:
    """A question of this process."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.round = 0
        self.is_heard = False
        """Whether its own process has heard it: who asks the same later waits for who asked it."""
        self.earlier: set[tuple[str, int]] = set()
        """Questions for the same turn that were heard before it."""
        self.has_peers = False
        self.answers: dict[str, bool] = {}
        self.started_at = 0.0
        self.is_over = False
        self.changed = asyncio.Event()

    def is_answered(self, num_asked: int) -> bool:
        """True if one draws it, or all have said that they do not."""
        return self.is_held or len(self.answers) >= num_asked

    @property
    def is_held(self) -> bool:
        """True if some process draws the turn."""
        return any(self.answers.values())


class _Remote:
    """A client of another process, which waits there for a turn of this one."""

    def __init__(self, ask: Ask, job: TurnJob) -> None:
        self.job = job
        self.renew(ask)

    def renew(self, ask: Ask) -> None:
        """It has asked again."""
        self._is_waiting = ask.has_client
        self._lapses_at = time.monotonic() + ANSWER_S

    def is_gone(self) -> bool:
        """True if it has left, or its process has."""
        return not self._is_waiting or time.monotonic() > self._lapses_at


class Peers:
    """This process among the routers of the run."""

    def __init__(self, channel: Channel, episodes: Episodes, *, timeout_s: float) -> None:
        self._channel = channel
        self._episodes = episodes
        self._timeout_s = timeout_s
        self._process = secrets.token_hex(8)
        self._num_asked = 0
        self._asking: dict[tuple[str, str], _Asking] = {}
        self._remotes: dict[tuple[str, int], _Remote] = {}
        self._telling = Telling(channel)

    @property
    def hearing(self) -> Mapping[str, Callable[[bytes], None]]:
        """What hears the others, by the name of the channel."""
        return {EVERYBODY: self._hear, _of(self._process): self._hear}

    def close(self) -> None:
        """Tell nobody anything any more."""
        self._telling.close()

    async def wait_for_turn(
        self, session: EpisodeSession, retry_key: str, has_client: Callable[[], bool]
    ) -> float | None:
        """Return when no other process draws the turn; None: this one is alone.

        The record of the turn that was drawn meanwhile, if it came to one, has at least the time
        that is returned as its `started_at`. At most one call per episode and key at once.
        `has_client` says whether somebody still waits for the turn here: a turn that is drawn for
        nobody is recorded without loss.

        Raises:
            DeadlineExceeded: another process draws it for longer than a turn may take.
            BufferUnavailable: they cannot be asked.
        """
        if not await self._channel.is_listening(ANSWER_S):
            _log.warning("peers_not_asked", episode_id=session.episode_id)
            return 0.0
        self._num_asked += 1
        asking = _Asking(self._num_asked)
        turn = (session.episode_id, retry_key)
        self._asking[turn] = asking
        deadline = time.monotonic() + self._timeout_s
        try:
            while await self._is_drawn_elsewhere(asking, turn, has_client()):
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        who="router",
                        phase="wait for a turn",
                        peer="another router process that draws it",
                        after_s=self._timeout_s,
                    )
                await until(lambda: asking.is_over, asking.changed, ROUND_S)
            return asking.started_at if asking.has_peers else None
        finally:
            del self._asking[turn]

    async def _is_drawn_elsewhere(
        self, asking: _Asking, turn: tuple[str, str], has_client: bool
    ) -> bool:
        asking.round += 1
        asking.answers, asking.is_over = {}, False
        episode_id, retry_key = turn
        ask = Ask(self._process, asking.number, asking.round, episode_id, retry_key, has_client)
        num_asked = await self._channel.publish(EVERYBODY, _encode(ask))
        if num_asked > 1:
            asking.has_peers = True
            await until(lambda: asking.is_answered(num_asked), asking.changed, ANSWER_S)
        return asking.is_held

    def _hear(self, message: bytes) -> None:
        said = understood(_decode, message)
        if said is None:
            return
        if isinstance(said, Ask):
            self._answer(said)
            return
        if isinstance(said, Left):
            session = self._episodes.known(said.episode_id)
            if session is not None and said.process != self._process:
                session.undelivered.add(said.retry_key)
            return
        asking = next((one for one in self._asking.values() if one.number == said.number), None)
        if asking is None:
            return
        if isinstance(said, Over):
            asking.is_over = True
        elif said.round == asking.round:
            asking.answers[said.process] = said.draws
            asking.started_at = max(asking.started_at, said.started_at)
        asking.changed.set()

    def _answer(self, ask: Ask) -> None:
        turn = (ask.episode_id, ask.retry_key)
        asking = self._asking.get(turn)
        if ask.process == self._process:
            if asking is not None and asking.number == ask.number:
                asking.is_heard = True
                asking.answers[self._process] = False
                asking.changed.set()
            return
        who = (ask.process, ask.number)
        if asking is not None and not asking.is_heard:
            asking.earlier.add(who)
        session = self._episodes.known(ask.episode_id)
        jobs = session.jobs.get(ask.retry_key, ()) if session is not None else ()
        job = next((job for job in jobs if not job.is_over), None)
        draws = job is not None and (asking is None or who not in asking.earlier)
        if draws and job is not None and session is not None:
            self._wait_along(job, session, ask)
        # A retry that has no ids yet may find its turn recorded.
        started_at = job.started_at if draws and job is not None and job.turn_ids else 0.0
        answer = Answer(self._process, ask.number, ask.round, draws, started_at)
        self._telling.tell(_of(ask.process), _encode(answer))

    def _wait_along(self, job: TurnJob, session: EpisodeSession, ask: Ask) -> None:
        """Let the client of another process be one of this turn's."""
        who = (ask.process, ask.number)
        remote = self._remotes.get(who)
        if remote is not None and remote.job is job:
            remote.renew(ask)
            job.detach(remote)
            job.attach(remote)
            return
        # Where it waited for an equal turn that is over by now, that one is done with it too.
        self._remotes[who] = remote = _Remote(ask, job)
        job.attach(remote)
        self._telling.start(self._tell_when_over(job, session, ask, remote))

    async def _tell_when_over(
        self, job: TurnJob, session: EpisodeSession, ask: Ask, remote: _Remote
    ) -> None:
        try:
            await job.over()
            # Where it failed, who waits finds nothing recorded and draws the turn itself.
            job.is_delivered = job.is_delivered or not (job.has_failed or remote.is_gone())
        finally:
            if self._remotes.get((ask.process, ask.number)) is remote:
                del self._remotes[ask.process, ask.number]
            job.detach(remote)
            session.let_go(job, ask.retry_key)
            is_last = (ask.process, ask.number) not in self._remotes
        if is_last:
            await self._telling.send(_of(ask.process), _encode(Over(ask.number)))

    def tell_left(self, session: EpisodeSession, retry_key: str) -> None:
        """Say that a turn's client has gone: its next request may reach any process."""
        left = Left(self._process, session.episode_id, retry_key)
        self._telling.tell(EVERYBODY, _encode(left))


def _of(process: str) -> str:
    return f"router:{process}"


async def until(is_so: Callable[[], bool], changed: asyncio.Event, timeout_s: float) -> None:
    """Return when it is so, or after `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            while not is_so():
                changed.clear()
                await changed.wait()
    except TimeoutError:
        pass
