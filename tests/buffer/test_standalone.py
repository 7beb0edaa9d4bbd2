"""`outloop redis`: a server on TCP for parts on several machines."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from fakes.ports import free_ports
from fakes.redis_log import wait_until_written
from outloop.buffer.errors import BufferUnavailable, DeadlineExceeded
from outloop.buffer.redis.client import wait_for_redis

PASSWORD = 'with "quotes" and \\ in it'
QUOTED = "with%20%22quotes%22%20and%20%5C%20in%20it"
"""The password, as a URL has it."""
Serve = Callable[[], tuple[subprocess.Popen[bytes], int]]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start one on the test's folder; the process and its port."""
    (tmp_path / "password").write_text(PASSWORD)
    with ExitStack() as stack:

        def start() -> tuple[subprocess.Popen[bytes], int]:
            (port,) = free_ports(1)
            command = [
                *(sys.executable, "-m", "outloop.cli", "redis", "--dir", str(tmp_path / "data")),
                *("--port", str(port), "--password-file", str(tmp_path / "password")),
                *("--max-memory-mb", "64"),
            ]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL))
            stack.callback(process.kill)
            return process, port

        yield start


@pytest.mark.medium
def test_what_it_acknowledged_is_there_after_a_kill(serve: Serve) -> None:
    """Durable, without eviction, and closed to those without the password."""
    process, port = serve()
    wait_for_redis(f"redis://:{QUOTED}@127.0.0.1:{port}", 30)
    with redis.Redis(port=port, password=PASSWORD) as client:
        wanted = {"appendonly": "yes", "maxmemory-policy": "noeviction", "save": ""}
        assert {name: client.config_get(name)[name] for name in wanted} == wanted
        client.set("kept", 1)
        wait_until_written(client)
    with redis.Redis(port=port) as stranger, pytest.raises(redis.AuthenticationError):
        stranger.get("kept")
    process.kill()
    process.wait()
    _, port = serve()
    wait_for_redis(f"redis://:{QUOTED}@127.0.0.1:{port}", 30)
    with redis.Redis(port=port, password=PASSWORD) as client:
        assert client.get("kept") == b"1"


@pytest.mark.medium
def test_waiting_ends_with_a_reason(serve: Serve) -> None:
    """Nobody there, by a deadline; a wrong password at once."""
    (free,) = free_ports(1)
    with pytest.raises(DeadlineExceeded, match="Redis"):
        wait_for_redis(f"redis://127.0.0.1:{free}", 0.2)
    _, port = serve()
    with pytest.raises(BufferUnavailable, match="refuses the password"):
        wait_for_redis(f"redis://:wrong@127.0.0.1:{port}", 30)
