"""Messages that nobody keeps, on a real Redis."""

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
async def connect(server: EmbeddedRedis) -> AsyncIterator[Callable[..., Any]]:
    """A channel, and what it hears when it listens to `names`."""
    clients, listening = [], []

    async def make(*names: str) -> tuple[Channel, list[bytes]]:
        clients.append(connect_async(server.url))
        channel, heard = Channel(clients[-1], PREFIX), list[bytes]()
        if names:
            listening.append(
                asyncio.create_task(channel.listen(dict.fromkeys(names, heard.append)))
            )
            assert await channel.is_listening(TIMEOUT_S)
        return channel, heard

    yield make
    for task in listening:
        task.cancel()
    await asyncio.gather(*listening, return_exceptions=True)
    for client in clients:
        await client.aclose()


async def test_all_who_listen_hear_the_same_in_one_order(connect: Callable[..., Any]) -> None:
    """Whoever speaks, also at once; only names that one listens to are heard."""
    one, first = await connect("all", "one")
    two, second = await connect("all", "two")
    words = [b"%d" % number for number in range(40)]
    told = [one.publish("all", word) for word in words[::2]]
    told += [two.publish("all", word) for word in words[1::2]]
    assert await asyncio.gather(*told) == [2] * len(words)
    assert [await one.publish("two", b"to two"), await one.publish("nobody", b"")] == [1, 0]
    await until(lambda: len(second) == len(words) + 1)
    await until(lambda: len(first) == len(words))
    assert sorted(first) == sorted(words)
    assert second == [*first, b"to two"]


async def test_who_lost_its_connection_hears_again(connect: Callable[..., Any]) -> None:
    """The listener says that it hears nothing until it is back."""
    channel, heard = await connect("all")
    killer = channel._client
    assert await killer.execute_command("CLIENT", "KILL", "TYPE", "pubsub") >= 1
    await until(lambda: not channel._is_listening.is_set())
    assert not await channel.is_listening(0.0)
    assert await channel.is_listening(TIMEOUT_S)
    await channel.publish("all", b"again")
    await until(lambda: heard == [b"again"])


async def test_silence_is_asked_about(
    connect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection on which nothing comes is tried, and goes on being heard."""
    monkeypatch.setattr("outloop.buffer.redis.pubsub._SILENCE_S", 0.02)
    channel, heard = await connect("all")
    await asyncio.sleep(0.1)
    assert channel._is_listening.is_set()
    await channel.publish("all", b"word")
    await until(lambda: heard == [b"word"])


async def test_a_user_who_may_not_is_told_what_it_lacks(server: EmbeddedRedis) -> None:
    """Rights that a deployment gave before channels were used are named in the error."""
    admin = connect_async(server.url)
    rights = ("resetkeys", "~{*", "-@all", "+@read", "+@write", "+@connection")
    await admin.execute_command("ACL", "SETUSER", "deaf", "reset", "on", ">word", *rights)
    await admin.aclose()
    client = connect_async(f"unix://deaf:word@{server.url.removeprefix('unix://')}")
    with pytest.raises(BufferUnavailable, match="rights that docs/buffer-keys"):
        await Channel(client, PREFIX).publish("all", b"")
    await client.aclose()
