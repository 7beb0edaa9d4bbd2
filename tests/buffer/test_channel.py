"""Messages between processes, which are not stored."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from outloop.buffer.errors import BufferUnavailable
from outloop.buffer.redis.client import connect_async
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.redis.pubsub import Channel

PREFIX = "{channels:0}:"
TIMEOUT_S = 30.0


async def until(is_so: Callable[[], bool]) -> None:
    """Return when it is so."""
    async with asyncio.timeout(TIMEOUT_S):
        while not is_so():
            await asyncio.sleep(0.005)


@pytest.fixture
async def connect(url: str, clients: Any) -> AsyncIterator[Callable[..., Any]]:
    """A channel on Redis or on the twin, and what it receives as a listener to `names`."""
    opened, listening = [], []

    async def make(*names: str, **options: float) -> tuple[Channel, list[bytes]]:
        opened.append(clients.asynchronous(url))
        channel, received = Channel(opened[-1], PREFIX, **options), list[bytes]()
        if names:
            listening.append(
                asyncio.create_task(channel.listen(dict.fromkeys(names, received.append)))
            )
            assert await channel.is_listening(TIMEOUT_S)
        return channel, received

    yield make
    for task in listening:
        task.cancel()
    await asyncio.gather(*listening, return_exceptions=True)
    for client in opened:
        await client.aclose()


async def test_all_listeners_receive_the_same_in_one_order(connect: Callable[..., Any]) -> None:
    """Whoever publishes, also at once; a listener receives only the names that it listens to."""
    one, first = await connect("all", "one")
    two, second = await connect("all", "two")
    messages = [b"%d" % number for number in range(40)]
    publishing = [one.publish("all", message) for message in messages[::2]]
    publishing += [two.publish("all", message) for message in messages[1::2]]
    assert await asyncio.gather(*publishing) == [2] * len(messages)
    assert [await one.publish("two", b"to two"), await one.publish("other", b"")] == [1, 0]
    await until(lambda: len(second) == len(messages) + 1)
    await until(lambda: len(first) == len(messages))
    assert sorted(first) == sorted(messages)
    assert second == [*first, b"to two"]


@pytest.mark.medium
async def test_a_listener_that_lost_its_connection_receives_again(server: EmbeddedRedis) -> None:
    """It says that it receives nothing until it is back."""
    client = connect_async(server.url)
    channel, received = Channel(client, PREFIX), list[bytes]()
    listening = asyncio.create_task(channel.listen({"all": received.append}))
    assert await channel.is_listening(TIMEOUT_S)
    assert await client.execute_command("CLIENT", "KILL", "TYPE", "pubsub") >= 1
    async with asyncio.timeout(TIMEOUT_S):
        while await channel.is_listening(0.0):
            await asyncio.sleep(0.005)
    assert await channel.is_listening(TIMEOUT_S)
    await channel.publish("all", b"again")
    await until(lambda: received == [b"again"])
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    await client.aclose()


async def test_a_silent_connection_is_checked(connect: Callable[..., Any]) -> None:
    """A connection on which nothing comes is tried, and goes on receiving."""
    channel, received = await connect("all", silence_s=0.02)
    await asyncio.sleep(0.1)
    assert await channel.is_listening(0.0)
    await channel.publish("all", b"message")
    await until(lambda: received == [b"message"])


async def test_a_user_without_the_right_to_publish_is_refused_by_its_name(
    server: EmbeddedRedis,
) -> None:
    """Rights that a deployment gave before channels were used are named in the error."""
    admin = connect_async(server.url)
    rights = ("resetkeys", "~{*", "-@all", "+@read", "+@write", "+@connection")
    await admin.execute_command("ACL", "SETUSER", "deaf", "reset", "on", ">word", *rights)
    await admin.aclose()
    client = connect_async(f"unix://deaf:word@{server.url.removeprefix('unix://')}")
    with pytest.raises(BufferUnavailable, match="rights that docs/buffer-keys"):
        await Channel(client, PREFIX).publish("all", b"")
    await client.aclose()
