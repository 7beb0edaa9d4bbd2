"""The port that a server is to use, held until it listens there."""

import asyncio
import socket

import pytest

from outloop.engine.machine.port_reservation import hold_port


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(await reader.readline())
    writer.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_a_server_listens_on_its_held_port(host: str) -> None:
    """By its number, as uvicorn binds; who comes is answered by it."""
    with hold_port(host) as held:
        port = held.getsockname()[1]
        async with await asyncio.start_server(_echo, host, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"hello\n")
            assert await reader.readline() == b"hello\n"
            writer.close()


def test_a_held_port_is_given_to_no_other_process() -> None:
    """Neither to a plain socket nor, held again, to another server."""
    with hold_port("127.0.0.1") as held, socket.socket() as other:
        port = held.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with hold_port("127.0.0.1") as another:
            assert another.getsockname()[1] != port
