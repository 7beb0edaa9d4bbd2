"""The in-process twin of Redis: no server, no socket, the buffer's own scripts.

Owns: running the Lua scripts over a keyspace, and connections for redis-py that end in this
process. Does not own: commands (twin_keyspace), what scripts do. Invariant: the scripts are the
buffer's files, run by an embedded Lua 5.1, so the twin cannot drift from them; what the buffer's
tests hold on Redis they hold on the twin.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import hiredis
import lupa.lua51
import msgspec
import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from fakes.twin_keyspace import CommandError, Keyspace

_CALL = b"""
return function(call)
  return function(...)
    local words = {...}
    for i, word in ipairs(words) do
      -- As Redis before 7 does; on the way to Python the sign is lost.
      if word == 0 and 1 / word < 0 then words[i] = '-0' end
    end
    return call(unpack(words))
  end
end
"""
"""Makes `redis.call`."""


class Twin(Keyspace):
    """A keyspace that runs scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.is_away = False
        """True: commands of asyncio clients fail as on a lost connection; a client that listens
        goes on listening, and blocking clients are not affected."""
        self.may_listen = True
        """False: SUBSCRIBE is refused, as to a user without the right."""
        self.num_refused = 0
        """Commands that failed because it was away."""
        self.published: list[tuple[str, bytes]] = []
        """Every message with its channel."""
        self._listening: dict[bytes, list[_Session]] = {}
        self._lua = lupa.lua51.LuaRuntime(encoding=None, unpack_returned_tuples=False)
        self._table: Any = lupa.lua51.lua_type
        self._scripts: dict[bytes, Any] = {}
        names = self._lua.globals()
        call = self._lua.execute(_CALL)(self._call)
        names[b"redis"] = self._lua.table_from({b"call": call})
        names[b"cmsgpack"] = self._lua.table_from({b"pack": self._pack, b"unpack": self._unpack})

    def subscribe(self, session: _Session, names: Sequence[bytes]) -> list[list[Any]]:
        """Deliver messages of these channels to a connection; the answers to its command."""
        for name in names:
            self._listening.setdefault(name, []).append(session)
        return [[b"subscribe", name, number] for number, name in enumerate(names, 1)]

    def unsubscribe(self, session: _Session) -> None:
        """Deliver nothing more to a connection."""
        for sessions in self._listening.values():
            if session in sessions:
                sessions.remove(session)

    def client(self) -> redis.Redis:
        """A blocking client whose commands are run here."""
        return redis.Redis(
            connection_pool=redis.ConnectionPool(
                connection_class=TwinConnection,
                twin=self,
                protocol=2,
                retry=Retry(NoBackoff(), 0),
                legacy_responses=False,
            )
        )

    def async_client(self) -> redis.asyncio.Redis:
        """The same for asyncio."""
        return redis.asyncio.Redis(
            connection_pool=redis.asyncio.ConnectionPool(
                connection_class=AsyncTwinConnection,
                twin=self,
                protocol=2,
                retry=AsyncRetry(NoBackoff(), 0),
                legacy_responses=False,
            )
        )

    def _eval(self, text: bytes, num_keys: bytes, *words: bytes) -> Any:
        number = int(num_keys)
        keys, args = words[:number], words[number:]
        compiled = self._load(text)
        answer = compiled(self._lua.table_from(keys), self._lua.table_from(args))
        return self._to_reply(answer)

    def _evalsha(self, sha1: bytes, num_keys: bytes, *words: bytes) -> Any:
        if sha1 not in self._scripts:
            raise CommandError("NOSCRIPT No matching script.")
        number = int(num_keys)
        keys, args = words[:number], words[number:]
        answer = self._scripts[sha1](self._lua.table_from(keys), self._lua.table_from(args))
        return self._to_reply(answer)

    def _script(self, action: bytes, *words: bytes) -> Any:
        if action.upper() == b"FLUSH":
            self._scripts.clear()
            return True
        self._load(words[0])
        return hashlib.sha1(words[0], usedforsecurity=False).hexdigest().encode()

    def _publish(self, name: bytes, message: bytes) -> int:
        self.published.append((name.decode(), message))
        sessions = self._listening.get(name, [])
        for session in sessions:
            session.deliver([b"message", name, message])
        return len(sessions)

    def _config(self, *words: bytes) -> Any:
        raise CommandError("ERR the twin has no settings")

    def _load(self, text: bytes) -> Any:
        sha1 = hashlib.sha1(text, usedforsecurity=False).hexdigest().encode()
        if sha1 not in self._scripts:
            body = b"return function(KEYS, ARGV)\n" + text + b"\nend"
            self._scripts[sha1] = self._lua.execute(body)
        return self._scripts[sha1]

    def _call(self, *words: Any) -> Any:
        answer = self.run([_as_word(word) for word in words])
        if answer is None:
            return False
        if answer is True:
            return self._lua.table_from({b"ok": b"OK"})
        if isinstance(answer, list):
            return self._lua.table_from([False if item is None else item for item in answer])
        return answer

    def _pack(self, value: Any) -> bytes:
        return msgspec.msgpack.encode(_as_text(self._to_reply(value)))

    def _unpack(self, packed: bytes) -> Any:
        return self._to_table(msgspec.msgpack.decode(packed))

    def _to_table(self, value: Any) -> Any:
        if isinstance(value, list):
            return self._lua.table_from([self._to_table(item) for item in value])
        return value.encode() if isinstance(value, str) else value

    def _to_reply(self, value: Any) -> Any:
        """As Redis turns what a script returns into an answer."""
        if self._table(value) == "table":
            items: list[Any] = []
            while (item := value[len(items) + 1]) is not None:
                items.append(self._to_reply(item))
            return items
        if value is False:
            return None
        return int(value) if isinstance(value, int | float) else value


class _Session:
    """What one connection has sent and not read."""

    def __init__(self, twin: Twin) -> None:
        self._twin = twin
        self._parser = hiredis.Reader()
        self._queued: list[list[bytes]] | None = None
        self._is_listening = False
        self.answers: deque[Any] = deque()
        self.arrived = asyncio.Event()

    def deliver(self, answer: Any) -> None:
        """Add what is to be read next."""
        self.answers.append(answer)
        self.arrived.set()

    def close(self) -> None:
        """Forget what was not read."""
        self._twin.unsubscribe(self)
        self.answers.clear()
        self._is_listening = False

    def send(self, command: Any) -> None:
        """Run what the packed command holds."""
        for chunk in [command] if isinstance(command, bytes) else command:
            self._parser.feed(bytes(chunk))
        while (words := self._parser.gets()) is not False:
            if words[0].upper() == b"SUBSCRIBE":
                if not self._twin.may_listen:
                    self.deliver(redis.ResponseError("NOPERM this user has no permissions"))
                    continue
                self._is_listening = True
                for answer in self._twin.subscribe(self, words[1:]):
                    self.deliver(answer)
            else:
                self.deliver([b"pong", b""] if self._is_listening else self._answer(words))

    def _answer(self, words: list[bytes]) -> Any:
        name = words[0].upper()
        if name == b"MULTI":
            self._queued = []
            return b"OK"
        if name == b"EXEC":
            queued, self._queued = self._queued or [], None
            with self._twin.changed:
                return [self._run(command) for command in queued]
        if self._queued is not None:
            self._queued.append(words)
            return b"QUEUED"
        return self._run(words)

    def _run(self, words: list[bytes]) -> Any:
        try:
            answer = self._twin.run(words)
        except CommandError as error:
            if str(error).startswith("NOSCRIPT"):
                return redis.exceptions.NoScriptError(str(error))
            return redis.ResponseError(str(error))
        return b"OK" if answer is True else answer


class TwinConnection(redis.connection.Connection):
    """A connection to a twin."""

    def __init__(self, *, twin: Twin, **options: Any) -> None:
        super().__init__(**options)
        self._session = _Session(twin)

    def connect(self) -> None:
        """There is nothing to connect to."""

    def disconnect(self, *args: Any) -> None:
        """Forget what was not read."""
        self._session.close()

    def can_read(self, timeout: float | None = 0, **options: Any) -> bool:
        """Whether an answer waits."""
        return bool(self._session.answers)

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        """Run it now."""
        self._session.send(command)

    def read_response(self, *args: Any, **options: Any) -> Any:
        """The next answer."""
        answer = self._session.answers.popleft()
        if isinstance(answer, redis.ResponseError):
            raise answer
        return answer


class AsyncTwinConnection(redis.asyncio.Connection):
    """The same for asyncio."""

    def __init__(self, *, twin: Twin, **options: Any) -> None:
        super().__init__(**options)
        self._twin = twin
        self._session = _Session(twin)

    def __del__(self) -> None:
        """There is nothing to close."""

    @property
    def is_connected(self) -> bool:
        """Always."""
        return True

    async def connect(self) -> None:
        """There is nothing to connect to."""

    async def disconnect(self, *args: Any, **options: Any) -> None:
        """Forget what was not read."""
        self._session.close()

    async def can_read(self, *args: Any, **options: Any) -> bool:
        """Whether an answer waits."""
        return bool(self._session.answers)

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        """Run it now, and let others go on meanwhile, as a socket would."""
        await asyncio.sleep(0)
        if self._twin.is_away:
            self._twin.num_refused += 1
            raise redis.ConnectionError("the twin is away")
        self._session.send(command)

    async def read_response(self, *args: Any, timeout: float | None = None, **options: Any) -> Any:
        """The next answer; None if a connection that listens got none in `timeout` seconds."""
        while not self._session.answers:
            self._session.arrived.clear()
            try:
                async with asyncio.timeout(timeout):
                    await self._session.arrived.wait()
            except TimeoutError:
                return None
        answer = self._session.answers.popleft()
        if isinstance(answer, redis.ResponseError):
            raise answer
        return answer


def _as_word(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    return b"%d" % value if value == int(value) else repr(float(value)).encode()


def _as_text(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_text(item) for item in value]
    return value.decode() if isinstance(value, bytes) else value
