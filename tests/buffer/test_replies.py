"""Answers that are read while later ones are on their way."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest
import redis

from outloop.buffer.redis.client import connect_sync, replies
from outloop.buffer.redis.embedded import EmbeddedRedis


@pytest.fixture
def client(server: EmbeddedRedis) -> Iterator[redis.Redis]:
    """Of the session's server, with one connection."""
    client = connect_sync(f"{server.url}?max_connections=1&timeout=1")
    yield client
    client.close()


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that does this once it was asked something; its URL, with a short timeout."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def serve() -> None:
            with closing(listener.accept()[0]) as peer:
                while b"LRANGE" not in (asked := peer.recv(4096)):
                    peer.sendall(b"+OK\r\n" * asked.count(b"*"))
                answer(peer)

        thread = threading.Thread(target=serve)
        thread.start()
        port = listener.getsockname()[1]
        yield f"redis://127.0.0.1:{port}?socket_timeout=0.3"
        thread.join()


def test_every_answer_comes_in_its_place(client: redis.Redis) -> None:
    """Answers of none to a million bytes, asked for in pairs, are those of single commands."""
    sizes = [(index * 7919) % 5 for index in range(300)]
    sizes[40] = 200_000
    for index, size in enumerate(sizes):
        client.hset("replies:hash", f"f{index}", b"v" * size)
        if size:
            client.rpush(f"replies:{index}", *(b"%d" % index * size for _ in range(size % 7 + 1)))
    requests = [
        (("HMGET", "replies:hash", f"f{index}", "no"), ("LRANGE", f"replies:{index}", "0", "-1"))
        for index in range(len(sizes))
    ]
    found = list(replies(client, requests))
    assert found == [[client.execute_command(*one) for one in request] for request in requests]
    assert client.ping()


def test_an_error_is_raised_at_its_place_and_the_connection_is_clean(client: redis.Redis) -> None:
    """Those before it are read; whoever uses the connection next gets his own answer."""
    client.set("replies:text", "x")
    good = (("LRANGE", "replies:none", "0", "-1"),)
    answers = replies(client, [good, (("LRANGE", "replies:text", "0", "-1"),), good])
    assert next(answers) == [[]]
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        next(answers)
    assert client.get("replies:text") == b"x"


def test_who_stops_early_leaves_nothing_behind(client: redis.Redis) -> None:
    """What was asked for and not read is never the answer to another command."""
    client.set("replies:text", "x")
    answers = replies(client, [(("LRANGE", "replies:none", "0", "-1"),)] * 50)
    next(answers)
    answers.close()
    assert client.get("replies:text") == b"x"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"*2\r\n$1\r\nx\r\n", redis.ConnectionError),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", redis.InvalidResponse),
    ],
)
def test_what_is_no_answer_is_an_error(answer: bytes, error: type[Exception]) -> None:
    """Half an answer and then the end is a lost connection, not a shorter answer; what is not the
    protocol is refused by name."""
    with answering(lambda peer: peer.sendall(answer)) as url:
        client = connect_sync(url)
        with pytest.raises(error):
            list(replies(client, [(("LRANGE", "a", "0", "-1"),)]))
        client.close()


def test_a_server_that_falls_silent_is_an_error() -> None:
    """Nothing within the socket's timeout is said so."""
    is_over = threading.Event()
    with answering(lambda peer: is_over.wait(30) and None) as url:
        client = connect_sync(url)
        with pytest.raises(redis.TimeoutError):
            list(replies(client, [(("LRANGE", "a", "0", "-1"),)]))
        is_over.set()
        client.close()
