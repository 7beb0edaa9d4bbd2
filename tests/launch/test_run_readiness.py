"""What `outloop doctor --config` finds before a run is started."""

import io
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import redis
from rich.console import Console

from fakes import user_folder
from fakes.ports import free_ports
from outloop.buffer.errors import SettingsError
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.settings import load_settings
from outloop.engine.launch.doctor import examine
from outloop.engine.launch.launcher import running
from outloop.engine.models.random_init import write_policy

RIGHTS = (
    *("resetkeys", "~{*", "resetchannels", "&{*", "-@all", "+@read", "+@write", "+@connection"),
    *("+@scripting", "+@blocking", "+@pubsub", "+time", "+multi", "+exec", "-@dangerous"),
)
"""As docs/buffer-keys.md gives them."""
Report = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_policy(folder, 0)
    return folder


@pytest.fixture
def report(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    """The exit code and the text for a user's folder with these overrides."""
    user_folder.write(tmp_path, model, {})
    monkeypatch.chdir(tmp_path)

    def examined(*overrides: str) -> tuple[int, str]:
        out = io.StringIO()
        settings = load_settings(tmp_path / "run.toml", overrides)
        code = examine(Console(file=out, width=400), settings)
        return code, out.getvalue()

    return examined


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, redis.Redis]]:
    """A Redis of somebody else's: its URL, and a client to change it."""
    with EmbeddedRedis(tmp_path / "redis") as running:
        client = redis.Redis.from_url(running.url)
        yield running.url, client
        client.close()


def row(text: str, name: str) -> str:
    """The line of the table that begins with `name`."""
    return next(line for line in text.splitlines() if line.startswith(f"│ {name}"))


@pytest.mark.medium
def test_a_run_that_can_start_is_reported_and_nothing_is_made(
    report: Report, tmp_path: Path
) -> None:
    code, text = report()
    assert code == 0, text
    assert "this run can start here" in text
    assert " ok " in row(text, "settings")
    assert " ok " in row(text, "packages")
    assert not (tmp_path / "runs").exists()


@pytest.mark.medium
def test_settings_that_a_part_would_refuse_are_named(report: Report) -> None:
    code, text = report("env.rollout_function_path=rollouts:gone")
    assert code == 1
    assert "gone" in row(text, "settings")


@pytest.mark.medium
def test_a_redis_that_would_throw_records_away_is_refused(
    report: Report, server: tuple[str, redis.Redis]
) -> None:
    url, client = server
    assert report(f"buffer.redis_url={url}")[0] == 0
    client.config_set("maxmemory-policy", "allkeys-lru")
    client.config_set("appendonly", "no")
    code, text = report(f"buffer.redis_url={url}")
    assert code == 1
    assert "maxmemory-policy=allkeys-lru" in text
    assert "appendonly=no" in text
    settings = load_settings(Path("run.toml"), (f"buffer.redis_url={url}",))
    started = running(settings, threading.Event())
    with pytest.raises(SettingsError, match="allkeys-lru would throw records away"), started:
        pass


@pytest.mark.medium
def test_a_redis_whose_user_may_not_ask_is_to_be_checked_by_hand(
    report: Report, server: tuple[str, redis.Redis], tmp_path: Path
) -> None:
    code, text = report(*as_user(server, tmp_path, RIGHTS))
    assert code == 0, text
    assert "appendonly yes" in text
    assert "has the rights that a run needs" in text


@pytest.mark.medium
def test_a_redis_whose_user_may_not_do_what_a_run_does_is_refused(
    report: Report, server: tuple[str, redis.Redis], tmp_path: Path
) -> None:
    """By the doctor and at the start, with the commands; nothing is written to find out."""
    rights = [right for right in RIGHTS if right != "+@pubsub"] + ["-zadd"]
    overrides = as_user(server, tmp_path, rights)
    code, text = report(*overrides)
    assert code == 1
    assert "its user may not ZADD, PUBLISH, SUBSCRIBE keys and channels" in text
    settings = load_settings(Path("run.toml"), overrides)
    started = running(settings, threading.Event())
    with pytest.raises(SettingsError, match="may not ZADD, PUBLISH, SUBSCRIBE"), started:
        pass
    assert report(*as_user(server, tmp_path, [*rights, "-multi"]))[0] == 1
    assert server[1].dbsize() == 0


def as_user(
    server: tuple[str, redis.Redis], tmp_path: Path, rights: Sequence[str]
) -> tuple[str, str]:
    """Overrides for a run whose user of this Redis has these rights alone."""
    url, client = server
    client.execute_command("ACL", "SETUSER", "few", "reset", "on", ">word", *rights)
    (tmp_path / "password").write_text("word")
    return (
        f"buffer.redis_url={url.replace('unix://', 'unix://few@')}",
        f"buffer.redis_password_file={tmp_path}/password",
    )


@pytest.mark.medium
def test_a_redis_that_does_not_answer_is_named(report: Report, tmp_path: Path) -> None:
    code, text = report(f"buffer.redis_url=unix://{tmp_path}/none")
    assert code == 1
    assert "check that it runs" in row(text, "buffer.redis_url")


@pytest.mark.medium
def test_a_port_that_is_taken_is_named(report: Report) -> None:
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", port)):
        code, text = report(f"router.port={port}")
        assert code == 1
        assert "stop what listens there" in row(text, f"port {port}")
    assert report(f"router.port={port}")[0] == 0


@pytest.mark.medium
def test_servers_that_are_not_there_are_named(report: Report) -> None:
    code, text = report("server.num_servers=0", 'server.urls=["http://127.0.0.1:1"]')
    assert code == 1
    assert "correct server.urls" in row(text, "http://127.0.0.1:1")


@pytest.mark.medium
def test_a_key_that_is_not_exported_is_named(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = 'router.upstreams.judge={base_url="https://judge.example/v1", api_key_env="JUDGE_KEY"}'
    code, text = report(judge)
    assert code == 1
    assert "export JUDGE_KEY" in row(text, "router.upstreams.judge")
    monkeypatch.setenv("JUDGE_KEY", "secret-value")
    code, text = report(judge)
    assert code == 0
    assert "secret-value" not in text


@pytest.mark.medium
def test_a_disk_too_small_for_the_checkpoints_is_named(report: Report) -> None:
    code, text = report("trainer.keep_checkpoints=100000000")
    assert code == 1
    assert "lower trainer.keep_checkpoints" in row(text, "disk")
