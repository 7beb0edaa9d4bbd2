"""Connections of clients.

Owns: what of uvicorn's protocol is done more cheaply here. Does not own: HTTP (uvicorn), requests
(web). Invariant: bytes leave in the order in which they were written, all of them before the
connection is closed.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

CONNECTION = "outloop.connection"
"""Where an ASGI scope holds its ClientConnection."""


class ClientConnection(HttpToolsProtocol):
    """Uvicorn's protocol, with one write to the socket for all that is said at once."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As uvicorn's."""
        super().connection_made(_Gathering(transport, self.loop))  # type: ignore[arg-type]

    def on_message_begin(self) -> None:
        """As uvicorn's."""
        super().on_message_begin()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope[CONNECTION] = self

    def is_gone(self) -> bool:
        """True if the client has closed the connection, as far as is known now."""
        # Only who reads notices it, and a large body stops the reading.
        self.flow.resume_reading()
        return self.transport.is_closing()


class _Gathering:
    """A transport that hands on, once in a round of the event loop, all that was written in it.

    The head of an answer and its body are written apart, and each write is a system call.
    """

    __slots__ = ("_loop", "_pieces", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> None:
        """As a transport's."""
        if not self._pieces:
            self._loop.call_soon(self._hand_on)
        self._pieces.append(data)

    def close(self) -> None:
        """As a transport's."""
        self._hand_on()
        self._transport.close()

    def is_closing(self) -> bool:
        """As a transport's."""
        return self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _hand_on(self) -> None:
        pieces, self._pieces = self._pieces, []
        if pieces and not self._transport.is_closing():
            self._transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))
