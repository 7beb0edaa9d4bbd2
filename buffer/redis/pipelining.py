"""Script calls that share round trips.

Owns: gathering calls while an earlier group is under way, handing each its own answer, and the
connection for that. Does not own: what scripts do, errors of one call (scripts). Invariant: a call
returns only after Redis answered it; a call that fails does not fail its neighbours; a connection
with answers that nobody read is not used again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hiredis
import redis.asyncio

from outloop.buffer.redis.client import SOCKET_TIMEOUT_S
from outloop.buffer.redis.scripts import Argument, AsyncScripts, load_script

_MAX_GROUP = 256
_NUM_LONE = 8
"""After so many groups of one call it is not awaited whether the same round makes another."""


@dataclass(eq=False, slots=True)
class _Call:
    """One call that waits for its answer."""

    command: bytes
    answer: asyncio.Future[Any]

    def settle(self, answer: Any) -> None:
        """Hand the answer, or the error that it is, to whoever still waits."""
        if not self.answer.done():
            self.answer.set_result(answer)


class GroupedScripts(AsyncScripts):
    """AsyncScripts whose concurrent calls go out together, in the order in which they were made.

    Most of what a small command costs is its round trip: a connection taken, deadlines, a write, a
    read. Under load a group pays for them once; on an idle client a call goes out at the end of the
    round of the event loop in which it was made, or at once if it seems to be the only one. One
    connection is kept for them, on which answers are read as they come: streams, a pool's
    bookkeeping and a deadline for each read cost more than the commands.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._waiting: deque[_Call] = deque()
        self._line: _Line | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._is_due = False
        self._num_lone = 0
        """How many of the last groups were one call, up to the last that was more."""

    async def close(self) -> None:
        """Close the connection."""
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        if self._line is not None:
            self._line.close()

    async def execute(self, name: str, words: tuple[Argument, ...]) -> Any:
        """As AsyncScripts.execute."""
        loop = asyncio.get_running_loop()
        packed: Any = ("EVALSHA", load_script(name).sha1, 1, *words)
        call = _Call(hiredis.pack_command(packed), loop.create_future())
        self._waiting.append(call)
        if not self._is_due and (self._line is None or not self._line.is_busy):
            if self._num_lone >= _NUM_LONE:
                self._send()
            else:
                self._is_due = True
                loop.call_soon(self._send)
        answer = await call.answer
        if isinstance(answer, redis.ResponseError) and str(answer).startswith("NOSCRIPT"):
            return await super().execute(name, words)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _send(self) -> None:
        """Send what waits, once all that was sent is answered and there is a connection."""
        self._is_due = False
        line = self._line
        if not self._waiting or (line is not None and line.is_busy):
            return
        if line is not None and line.is_usable:
            number = min(len(self._waiting), _MAX_GROUP)
            self._num_lone = self._num_lone + 1 if number == 1 else 0
            line.send([self._waiting.popleft() for _ in range(number)])
        elif self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect())

    async def _connect(self) -> None:
        try:
            self._line = await _Line.open(self._client.connection_pool, self._send)
        except redis.RedisError as error:
            # Each call says what it was for.
            self._fail(error)
        except BaseException:
            self._fail(redis.ConnectionError("the connection was given up"))
            raise
        self._send()

    def _fail(self, error: Exception) -> None:
        while self._waiting:
            self._waiting.popleft().settle(error)


class _Line(asyncio.Protocol):
    """A connection on which commands are answered in the order in which they were sent."""

    def __init__(self, writer: asyncio.StreamWriter, on_idle: Callable[[], None]) -> None:
        self._writer = writer
        """Kept: without it the socket is closed."""
        self._on_idle = on_idle
        self._transport: Any = writer.transport
        self._reader = hiredis.Reader(
            protocolError=redis.InvalidResponse, replyError=redis.ResponseError
        )
        self._unanswered: deque[_Call] = deque()
        self._loop = asyncio.get_running_loop()
        self._sent_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.is_usable = True

    @classmethod
    async def open(cls, pool: Any, on_idle: Callable[[], None]) -> _Line:
        """A new connection; `on_idle` is called whenever every call on it has its answer.

        Raises:
            redis.RedisError: none could be made.
        """
        # redis-py knows addresses, TLS and credentials. When they are settled its socket is ours,
        # which it has no public way of saying.
        connection = pool.make_connection()
        await connection.connect()
        writer, connection._writer, connection._reader = connection._writer, None, None
        line = cls(writer, on_idle)
        line._transport.set_protocol(line)
        return line

    @property
    def is_busy(self) -> bool:
        """True while answers are awaited."""
        return bool(self._unanswered)

    def send(self, group: list[_Call]) -> None:
        """Send a group of calls; each will be settled, also if the connection breaks."""
        self._unanswered.extend(group)
        self._sent_at = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(SOCKET_TIMEOUT_S, self._check)
        self._transport.write(b"".join([call.command for call in group]))

    def close(self) -> None:
        """End the connection."""
        self._break(redis.ConnectionError("the connection was closed"))

    def data_received(self, data: bytes) -> None:
        """Answers, in pieces."""
        try:
            self._reader.feed(data)
            while self._unanswered and (answer := self._reader.gets()) is not False:
                self._unanswered.popleft().settle(answer)
            is_lost = not self._unanswered and self._reader.has_data()
        except redis.InvalidResponse as error:
            self._break(error)
            return
        if is_lost:
            self._break(redis.ConnectionError("an answer came that nobody asked for"))
        elif not self._unanswered:
            self._on_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        """The server, or its machine, is gone."""
        self._break(redis.ConnectionError(f"the connection was lost ({exc})"))

    def _check(self) -> None:
        """Give up what has not been answered in time; look again later."""
        self._timer = None
        if not self._unanswered:
            return
        left_s = self._sent_at + SOCKET_TIMEOUT_S - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._check)
        else:
            self._break(redis.TimeoutError(f"no answer within {SOCKET_TIMEOUT_S:.0f} s"))

    def _break(self, error: Exception) -> None:
        if not self.is_usable:
            return
        self.is_usable = False
        if self._timer is not None:
            self._timer.cancel()
        self._writer.close()
        while self._unanswered:
            self._unanswered.popleft().settle(error)
        self._on_idle()
