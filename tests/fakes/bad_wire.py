"""A wire to Redis that can be cut, held up and slowed down.

Owns: a listener on a Unix socket whose bytes go to and come from another one. Does not own: what
passes. Invariant: what happens to the wire happens when the test says so; a cut loses the bytes
that are on their way, and the server does not learn of it before its own side is closed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any


class BadWire:
    """Runs in a thread of its own."""

    def __init__(self, folder: Path, socket: str) -> None:
        self._path = str(folder / "wire")
        self._socket = socket
        self.url = f"unix://{self._path}"
        self.delay_s = 0.0
        """Every piece of data, either way, comes this much later."""
        self.loses_answers = False
        """Commands arrive, their answers do not, and the connection breaks instead."""
        self._writers: set[asyncio.StreamWriter] = set()
        """Of all connections that there were: one that was closed may have bytes left to send."""
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> BadWire:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)

    def lead_to(self, socket: str) -> None:
        """From the next connection on."""
        self._socket = socket

    def cut(self) -> None:
        """Break every connection now; new ones are welcome."""
        self._call(self._cut)

    def _call(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        asyncio.run_coroutine_threadsafe(work(), self._loop).result(30)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_unix_server(self._forward, self._path)
        self._ready.set()
        await self._stop.wait()
        server.close()
        await self._cut()

    async def _cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()
        self._writers.clear()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            answers, commands = await asyncio.open_unix_connection(self._socket)
        except OSError:
            # Nobody is at the other end, which is what the caller sees.
            writer.close()
            return
        self._writers.add(commands)
        ways = (self._copy(reader, commands, False), self._copy(answers, writer, True))
        await asyncio.gather(*ways)

    async def _copy(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, is_answer: bool
    ) -> None:
        try:
            while data := await source.read(65536):
                if is_answer and self.loses_answers:
                    await self._cut()
                    return
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                target.write(data)
                await target.drain()
        except ConnectionError:
            pass
        finally:
            target.close()
