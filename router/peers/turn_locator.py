"""Asks the run's other router processes which of them generates a turn, and waits for it.

A turn is recorded rightly without any of this. A process that does not answer in time generates
nothing, as far as the others are concerned.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec
import structlog

from outloop.buffer.errors import BufferUnavailable, DeadlineExceeded
from outloop.buffer.redis.pubsub import Channel
from outloop.router.episodes.episode import Episodes, LiveEpisode
from outloop.router.episodes.in_flight import InFlightTurn
from outloop.router.timings import DEFAULT_TIMINGS, Timings

EVERYBODY = "routers"
_MAX_QUESTIONS = 16384
_log = structlog.get_logger()


class Ask(msgspec.Struct, tag="ask", frozen=True):
    """Who has this turn in flight?"""

    process: str
    number: int
    """Of the question; a question that is put again keeps it."""
    round: int
    episode_id: str
    retry_key: str
    has_client: bool
    """Whether somebody waits for the answer."""


class Answer(msgspec.Struct, tag="answer", frozen=True):
    """A process has it in flight, or not."""

    process: str
    number: int
    round: int
    generates: bool
    started_at: float = 0.0
    """Of the turn, by which its record is known; 0: it may be one that is recorded already."""


class Over(msgspec.Struct, tag="over", frozen=True):
    """The turn that was asked for is recorded, or will not be."""

    number: int


class Left(msgspec.Struct, tag="left", frozen=True):
    """A turn is generated and its client has gone: the same request again is this client."""

    process: str
    episode_id: str
    retry_key: str


decode = msgspec.msgpack.Decoder(Ask | Answer | Over | Left).decode
encode = msgspec.msgpack.Encoder().encode


class _Asking:
    """A question of this process."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.round = 0
        self.has_peers = False
        self.answers: dict[str, bool] = {}
        self.started_at = 0.0
        self.is_over = False
        self.changed = asyncio.Event()

    def is_answered(self, num_asked: int) -> bool:
        """True if one generates it, or all have answered that they do not."""
        return self.is_held or len(self.answers) >= num_asked

    @property
    def is_held(self) -> bool:
        """True if some process generates the turn."""
        return any(self.answers.values())


class _Remote:
    """A client of another process, which waits there for a turn of this one."""

    def __init__(self, ask: Ask, turn: InFlightTurn, lapses_after_s: float) -> None:
        self.turn = turn
        self._lapses_after_s = lapses_after_s
        self.renew(ask)

    def renew(self, ask: Ask) -> None:
        """It has asked again."""
        self._is_waiting = ask.has_client
        self._lapses_at = time.monotonic() + self._lapses_after_s

    @property
    def is_gone(self) -> bool:
        """True if it has left, or its process has."""
        return not self._is_waiting or time.monotonic() > self._lapses_at


class TurnLocator:
    """Finds out which of the run's router processes has a turn in flight."""

    def __init__(
        self,
        channel: Channel,
        episodes: Episodes,
        tasks: asyncio.TaskGroup,
        *,
        timeout_s: float,
        timings: Timings = DEFAULT_TIMINGS,
    ) -> None:
        """`tasks`: messages are sent in it."""
        self._channel = channel
        self._episodes = episodes
        self._timeout_s = timeout_s
        self._timings = timings
        self._process = secrets.token_hex(8)
        self._num_asked = 0
        self._asking: dict[tuple[str, str], _Asking] = {}
        self._num_received = 0
        self._order: dict[tuple[str, int], int] = {}
        """Of each question in the order in which all processes have received them, by asker and
        number. A question that is put again keeps its place."""
        self._remotes: dict[tuple[str, int], _Remote] = {}
        self._tasks = tasks
        self._sending: set[asyncio.Task[None]] = set()

    @property
    def handlers(self) -> Mapping[str, Callable[[bytes], None]]:
        """What takes the others' messages, by the name of the channel."""
        return {EVERYBODY: self._handle, _of(self._process): self._handle}

    def close(self) -> None:
        """Send nothing any more."""
        for task in self._sending:
            task.cancel()

    async def wait_for_turn(self, waiting: InFlightTurn) -> float | None:
        """Return when no other process has the turn in flight; None: this one is alone.

        The record of the turn that was generated meanwhile, if it came to one, has at least the
        time that is returned as its `started_at`. At most one call per episode and key at once.

        Raises:
            DeadlineExceeded: another process generates it for longer than a turn may take.
            BufferUnavailable: they cannot be asked.
        """
        if not await self._channel.is_listening(self._timings.peer_answer_s):
            _log.warning("peers_not_asked", episode_id=waiting.episode.episode_id)
            return 0.0
        self._num_asked += 1
        asking = _Asking(self._num_asked)
        turn = (waiting.episode.episode_id, waiting.retry_key)
        self._asking[turn] = asking
        deadline = time.monotonic() + self._timeout_s
        try:
            while await self._is_in_flight_elsewhere(asking, turn, waiting.has_client):
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        who="router",
                        phase="wait for a turn",
                        peer="another router process that has it in flight",
                        after_s=self._timeout_s,
                    )
                await _until(lambda: asking.is_over, asking.changed, self._timings.peer_round_s)
            return asking.started_at if asking.has_peers else None
        finally:
            del self._asking[turn]

    async def _is_in_flight_elsewhere(
        self, asking: _Asking, turn: tuple[str, str], has_client: bool
    ) -> bool:
        asking.round += 1
        asking.answers, asking.is_over = {}, False
        episode_id, retry_key = turn
        ask = Ask(self._process, asking.number, asking.round, episode_id, retry_key, has_client)
        num_asked = await self._channel.publish(EVERYBODY, encode(ask))
        if num_asked > 1:
            asking.has_peers = True
            answer_s = self._timings.peer_answer_s
            await _until(lambda: asking.is_answered(num_asked), asking.changed, answer_s)
        return asking.is_held

    def _handle(self, message: bytes) -> None:
        try:
            notice = decode(message)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            _log.warning("peer_not_understood", error=str(error))
            return
        if isinstance(notice, Ask):
            self._answer(notice)
            return
        if isinstance(notice, Left):
            episode = self._episodes.known(notice.episode_id)
            if episode is not None and notice.process != self._process:
                episode.undelivered.add(notice.retry_key)
            return
        asking = next((one for one in self._asking.values() if one.number == notice.number), None)
        if asking is None:
            return
        if isinstance(notice, Over):
            asking.is_over = True
        elif notice.round == asking.round:
            asking.answers[notice.process] = notice.generates
            asking.started_at = max(asking.started_at, notice.started_at)
        asking.changed.set()

    def _answer(self, ask: Ask) -> None:
        who = (ask.process, ask.number)
        place = self._order.setdefault(who, self._num_received)
        self._num_received += 1
        if len(self._order) > _MAX_QUESTIONS:
            del self._order[next(iter(self._order))]
        asking = self._asking.get((ask.episode_id, ask.retry_key))
        if ask.process == self._process:
            if asking is not None and asking.number == ask.number:
                asking.answers[self._process] = False
                asking.changed.set()
            return
        episode = self._episodes.known(ask.episode_id)
        here = episode.turns.get(ask.retry_key, ()) if episode is not None else ()
        in_flight = next((one for one in here if not one.is_over), None)
        if asking is not None:
            own = self._order.get((self._process, asking.number))
            if own is None or place < own:
                # It asked first, and has the turn before this process may.
                in_flight = None
        started_at = 0.0
        if in_flight is not None:
            self._attach(in_flight, ask)
            # A retry that has no ids yet may find its turn recorded.
            started_at = in_flight.started_at if in_flight.turn_ids else 0.0
        answer = Answer(self._process, ask.number, ask.round, in_flight is not None, started_at)
        self._start(self._send(_of(ask.process), answer))

    def _attach(self, turn: InFlightTurn, ask: Ask) -> None:
        """Let the client of another process be one of this turn's."""
        who = (ask.process, ask.number)
        remote = self._remotes.get(who)
        if remote is not None and remote.turn is turn:
            remote.renew(ask)
            turn.detach(remote)
            turn.attach(remote)
            return
        # Where it waited for an equal turn that is over by now, that one is done with it too.
        self._remotes[who] = remote = _Remote(ask, turn, self._timings.peer_answer_s)
        turn.attach(remote)
        self._start(self._tell_when_over(ask, remote))

    async def _tell_when_over(self, ask: Ask, remote: _Remote) -> None:
        turn, who = remote.turn, (ask.process, ask.number)
        try:
            await turn.over()
            # Where it failed, who waits finds nothing recorded and generates the turn itself.
            turn.is_delivered = turn.is_delivered or not (turn.has_failed or remote.is_gone)
        finally:
            is_last = self._remotes.get(who) is remote
            if is_last:
                del self._remotes[who]
            turn.detach(remote)
            turn.episode.forget_delivered(turn)
        if is_last:
            await self._send(_of(ask.process), Over(ask.number))

    def announce_left(self, episode: LiveEpisode, retry_key: str) -> None:
        """Say that a turn's client has gone: its next request may reach any process."""
        left = Left(self._process, episode.episode_id, retry_key)
        self._start(self._send(EVERYBODY, left))

    async def _send(self, name: str, message: Answer | Over | Left) -> None:
        """Send a message to all who listen to `name`; one that is lost is logged."""
        try:
            await self._channel.publish(name, encode(message))
        except BufferUnavailable as error:
            _log.warning("peer_not_notified", name=name, error=str(error))

    def _start(self, sending: Coroutine[Any, Any, None]) -> None:
        task = self._tasks.create_task(sending)
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)


def _of(process: str) -> str:
    return f"router:{process}"


async def _until(is_so: Callable[[], bool], changed: asyncio.Event, timeout_s: float) -> None:
    """Return when it is so, or after `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            while not is_so():
                changed.clear()
                await changed.wait()
    except TimeoutError:
        pass
