"""Load for `make bench-router` and `make bench-fleet`: bare connections, growing conversations.

Owns: episodes, requests on the wire and what is checked of their answers. Does not own: the
programs that are measured. Invariant: a conversation hands its answers back as an agent would, and
an answer that is not its own is counted.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from router_mock import NUM_GENERATED

from outloop.buffer.run import Run

_LENGTH = re.compile(rb"content-length:\s*(\d+)", re.IGNORECASE)
_CONTENT = re.compile(rb'"content":"((?:[^"\\]|\\.)*)"')
TEXT = (
    "The survey of {name} lists rivers, bridges, markets and the roads between them; note that the "
    "figures of entry {name} were taken in {name}, before the new road was opened to traffic. "
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Looks up {name} in the register and returns what is found there.",
            "parameters": {
                "type": "object",
                "properties": {
                    "key": {"type": "string", "description": "what to look for"},
                    "limit": {"type": "integer", "description": "how many rows at most"},
                },
                "required": ["key"],
            },
        },
    }
    for name in ("rivers", "bridges", "markets", "roads")
]
SYSTEM = "You answer questions about an old survey. " + "Be brief, cite entries, add nothing. " * 14


class Connection(asyncio.Protocol):
    """One keep-alive connection; one request at a time."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._pieces: list[bytes] = []
        self._size = 0
        self._needed = -1
        self._is_chunked = False
        self._status = 0
        self._done: asyncio.Future[tuple[int, bytes]] | None = None

    @classmethod
    async def open(cls, port: int) -> Connection:
        """Connect."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(cls, "127.0.0.1", port)
        return connection

    async def post(self, path: str, body: bytes, key: str) -> tuple[int, bytes]:
        """Status and body of an answer; a chunked one as it came."""
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self._done = asyncio.get_running_loop().create_future()
        self._pieces, self._size, self._needed = [], 0, -1
        self._transport.write(head.encode() + body)
        return await self._done

    def close(self) -> None:
        """Close it."""
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError(f"closed: {exc}"))

    def data_received(self, data: bytes) -> None:
        self._pieces.append(data)
        self._size += len(data)
        if self._needed < 0:
            joined = b"".join(self._pieces)
            self._pieces = [joined]
            end = joined.find(b"\r\n\r\n")
            if end < 0:
                return
            head = joined[:end]
            self._status = int(head[9:12])
            found = _LENGTH.search(head)
            self._is_chunked = found is None
            self._needed = end + 4 + (int(found.group(1)) if found else 0)
            self._start = end + 4
        if self._is_chunked:
            is_over = (self._pieces[-1] if len(self._pieces[-1]) > 4 else self.tail()).endswith(
                b"0\r\n\r\n"
            )
        else:
            is_over = self._size >= self._needed
        if is_over and self._done is not None and not self._done.done():
            body = b"".join(self._pieces)[self._start :]
            self._done.set_result((self._status, body))

    def tail(self) -> bytes:
        """The end of what has come."""
        return b"".join(self._pieces[-4:])


@dataclass
class Conversation:
    """One episode's messages; `name` is in every message of its own."""

    name: str
    key: str = "none"
    is_streamed: bool = False
    body_bytes: int = 4096
    max_tokens: int = NUM_GENERATED
    messages: list[dict[str, str]] = field(default_factory=list)
    episode_id: str = ""
    num_mixed: int = 0
    num_lost: int = 0

    def __post_init__(self) -> None:
        self.messages.append({"role": "system", "content": SYSTEM})
        self.ask()
        first = self.messages[-1]
        # What turns add comes on top: the bodies of turns 1 to 8 have 4 KiB in the middle.
        room = self.body_bytes - len(self.body()) - 4 * 380
        first["content"] = TEXT.format(name=self.name) * max(0, room // 190) + first["content"]

    def ask(self) -> None:
        """The user's next message; it ends with the name and the turn."""
        turn = len(self.messages) // 2
        text = f"{TEXT.format(name=self.name)}What of {self.name}:{turn}"
        self.messages.append({"role": "user", "content": text})

    def body(self) -> bytes:
        """The next request."""
        body: dict[str, Any] = {"model": "policy", "max_tokens": self.max_tokens}
        body |= {"messages": self.messages, "tools": TOOLS}
        if self.is_streamed:
            body["stream"] = True
        return msgspec.json.encode(body)

    def hear(self, status: int, answer: bytes, *, is_checked: bool) -> None:
        """Take an answer in and ask on."""
        if status != 200:
            self.num_lost += 1
            raise ConnectionError(f"status={status}: {answer[:300]!r}")
        pieces = _CONTENT.findall(answer)
        text = str(msgspec.json.decode(b'"' + b"".join(pieces) + b'"'))
        turn = len(self.messages) // 2
        if is_checked and not text.endswith(f"{self.name}:{turn - 1}"):
            self.num_mixed += 1
        self.messages.append({"role": "assistant", "content": text})
        self.ask()

    async def turn(self, connection: Connection, *, is_checked: bool = True) -> None:
        """Ask and hear."""
        body = self.body()
        status, answer = await connection.post("/v1/chat/completions", body, self.key)
        self.hear(status, answer, is_checked=is_checked)


class Episodes:
    """Opens and closes episodes at the router under measurement."""

    def __init__(self, run: Run, port: int, names: Iterator[str], *, first_claim: int = 0) -> None:
        self._headers = {"Authorization": f"Bearer {run.keys.runner_key}"}
        self._url = f"http://127.0.0.1:{port}"
        self._num_claims = first_claim
        self._names = names

    async def register(self) -> None:
        """The run's tasks."""
        tasks = [{"task_id": f"t{i}", "payload": {}} for i in range(64)]
        await self._post("/tasks", {"tasks": tasks, "eval_tasks": []})

    async def open(self, number: int, **fields: Any) -> list[Conversation]:
        """Conversations of new episodes."""
        conversations: list[Conversation] = []
        while len(conversations) < number:
            self._num_claims += 1
            count = min(1024, number - len(conversations))
            body = {"key": f"claim-{self._num_claims}", "count": count, "open": True}
            claims = (await self._post("/tasks/claim", body))["claims"]
            for claim in claims:
                key = claim["episode"]["api_key"]
                conversations.append(Conversation(next(self._names), key, **fields))
                conversations[-1].episode_id = claim["episode"]["episode_id"]
        return conversations

    async def close(self, conversations: Sequence[Conversation]) -> None:
        """End them, scored."""
        for one in conversations:
            body = {"outcome": "completed", "reward": {"value": 1.0}, "key": "end"}
            await self._post(f"/episodes/{one.episode_id}/close", body)

    async def _post(self, path: str, body: Any) -> Any:
        async with (
            aiohttp.ClientSession(headers=self._headers) as session,
            session.post(self._url + path, json=body) as answer,
        ):
            assert answer.status == 200, await answer.text()
            return await answer.json()


async def play(
    port: int, conversations: list[Conversation], num_turns: int, *, concurrency: int, checked: bool
) -> None:
    """Every conversation `num_turns` further, `concurrency` at once, turn by turn in step."""
    connections = [await Connection.open(port) for _ in range(min(concurrency, len(conversations)))]
    try:
        for _ in range(num_turns):
            waiting = iter(conversations)

            async def work(connection: Connection, waiting: Any) -> None:
                for conversation in waiting:
                    await conversation.turn(connection, is_checked=checked)

            await asyncio.gather(*(work(connection, waiting) for connection in connections))
    finally:
        for connection in connections:
            connection.close()
