"""A run whose parts are started one by one, as containers and other machines do."""

import json
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from outloop.buffer.errors import SettingsError
from outloop.buffer.reader import BufferReader
from outloop.buffer.records import ServerEntry
from outloop.buffer.redis.client import connect_sync
from outloop.buffer.redis.keys import key
from outloop.buffer.registry import advertised_url
from outloop.buffer.run import load_run, load_run_settings
from outloop.buffer.settings import load_settings
from outloop.buffer.trajectories.reading import read_trajectories
from outloop.engine.launch.run_entry import make_run

Outloop = Callable[..., subprocess.Popen[str]]


def finish(process: subprocess.Popen[str], timeout_s: float = 90.0) -> str:
    """What it said; it must have ended well."""
    output, _ = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, output
    return output


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(240)
def test_parts_started_one_by_one_train(workspace: Path, outloop: Outloop) -> None:
    """Redis on TCP with a password, weights by files, an archiver, a monitor, and a runner that has
    its own key only and waits when the run is finished.

    The paths of the other secrets are relative, so that they lead nowhere in the runner's folder.
    """
    run_dir = Path(finish(outloop("init", "run.toml")).strip())
    keys = json.loads((workspace / "keys/run.json").read_text())
    apart = workspace / "apart"
    apart.mkdir()
    for name in ("settings.json", "run.json"):
        (apart / name).write_text((run_dir / name).read_text())
    (apart / "runner_key").write_text(keys["runner_key"])
    run = load_run_at(workspace, run_dir)
    with ExitStack() as stack:

        def start(*arguments: str, cwd: Path = workspace) -> subprocess.Popen[str]:
            part = stack.enter_context(outloop(*arguments, cwd=cwd))
            stack.callback(part.kill)
            return part

        archiver = start("archiver", "--run", str(run_dir))
        monitor = start("monitor", "--run", str(run_dir))
        joins = ("--run", str(run_dir), "--advertise", "localhost")
        start("server", *joins)
        start("router", *joins)
        trainer = start("trainer", "--run", str(run_dir))
        reader = BufferReader.connect(run)
        while "router" not in reader.registry.parts():
            assert trainer.poll() is None, trainer.communicate()
        router_url = reader.registry.parts()["router"]["url"]
        runner = start(
            *("runner", "--run", ".", "--router-url", router_url),
            *("--runner-key-file", "runner_key", "--wait-when-finished"),
            cwd=apart,
        )
        finish(trainer)
        for part in (runner, archiver, monitor):
            assert part.poll() is None, part.communicate()
            part.terminate()
            finish(part)
        (server,) = reader.registry.servers()
        reader.close()
    assert router_url.startswith("http://localhost:")
    assert server.url.startswith("http://localhost:")
    assert server.policy_version == 2
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/policy_version"] for row in rows if "train/loss" in row] == [1, 2]
    # Two steps of four groups at least.
    assert len(list(read_trajectories(run_dir / "trajectories"))) >= 16


def load_run_at(workspace: Path, run_dir: Path):
    """The run as a process in the workspace sees it: its paths are relative."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace)
        return load_run(run_dir)


def test_no_secret_is_written_into_the_run_folder(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Password and keys stay in their files, which their owner alone can read."""
    monkeypatch.chdir(workspace)
    run = make_run(load_settings(workspace / "run.toml"))
    BufferReader.connect(load_run(run.dir)).close()
    secrets = ["p@ss", "p%40ss", run.keys.runner_key, run.keys.admin_key, run.keys.episode_secret]
    written = [path.read_text() for path in run.dir.rglob("*") if path.is_file()]
    assert len(written) >= 2
    assert not [secret for secret in secrets for text in written if secret in text]
    assert (workspace / "keys/run.json").stat().st_mode & 0o777 == 0o600


def test_making_a_run_again_leaves_its_parts_alone(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same settings change nothing; others are entered, and who had joined is forgotten."""
    monkeypatch.chdir(workspace)
    settings = load_settings(workspace / "run.toml")
    first = make_run(settings)
    reader = BufferReader.connect(first)
    entry = ServerEntry(
        server_id="s", url="http://s", kind="torch", policy_version=None, is_quarantined=False
    )
    reader.registry.register_server(entry)
    again = make_run(settings)
    assert (again.run_id, again.keys, reader.registry.servers()) == (
        first.run_id,
        first.keys,
        (entry,),
    )
    other = make_run(load_settings(workspace / "run.toml", ("trainer.num_steps=3",)))
    assert other.run_id == first.run_id
    assert BufferReader.connect(other).registry.servers() == ()


def test_ended_episodes_wait_where_trajectories_are_kept(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the run's making on, before an archiver is there; made again, by the new settings."""
    monkeypatch.chdir(workspace)

    def limit_after(*overrides: str) -> int:
        run = make_run(load_settings(workspace / "run.toml", overrides))
        with closing(connect_sync(run.redis_url)) as client:
            found = client.hget(key(run.run_id, "state"), "archive_limit")
        assert isinstance(found, bytes)
        return int(found)

    kept = ("trajectories.max_waiting_tokens=1000",)
    assert [limit_after(*kept), limit_after(*kept)] == [1000, 1000]
    assert limit_after("trajectories.max_waiting_tokens=2000") == 2000
    off = ("trajectories.enabled=false",)
    assert [limit_after(*off), limit_after(*off)] == [0, 0]
    assert limit_after(*kept) == 1000


def test_a_run_of_separate_parts_needs_a_redis_of_its_own(workspace: Path) -> None:
    """The embedded server belongs to a launcher, and there is none."""
    text = (workspace / "run.toml").read_text().replace("redis_url", "# redis_url")
    (workspace / "run.toml").write_text(text)
    with pytest.raises(SettingsError, match="buffer.redis_url is missing"):
        make_run(load_settings(workspace / "run.toml"))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda file: file.unlink(), "cannot be read"),
        (lambda file: file.write_text(" \n"), "is empty"),
        (lambda file: file.write_bytes(b"\xff\xfe"), "cannot be read"),
    ],
)
def test_a_secret_that_is_not_there_is_a_sentence(
    workspace: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], object],
    sentence: str,
) -> None:
    """The setting and the file are named."""
    monkeypatch.chdir(workspace)
    run = make_run(load_settings(workspace / "run.toml"))
    damage(workspace / "keys/redis_password")
    with pytest.raises(
        SettingsError, match=f"redis_password_file='.*keys/redis_password'.*{sentence}"
    ):
        load_run(run.dir)
    # A process that needs no secret, a runner, is not in its way.
    assert load_run_settings(run.dir).run.name == "apart"


def test_two_passwords_are_refused(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in the URL and one in the file contradict each other."""
    monkeypatch.chdir(workspace)
    url = 'buffer.redis_url="redis://:other@127.0.0.1:1"'
    with pytest.raises(SettingsError, match="holds a password"):
        make_run(load_settings(workspace / "run.toml", (url,)))


@pytest.mark.parametrize(
    ("host", "advertise", "url"),
    [
        ("127.0.0.1", None, "http://127.0.0.1:80"),
        ("0.0.0.0", None, "http://127.0.0.1:80"),
        ("::", None, "http://[::1]:80"),
        ("0.0.0.0", "sgl-router", "http://sgl-router:80"),
        ("10.0.0.1", "fd00::2", "http://[fd00::2]:80"),
    ],
)
def test_parts_are_registered_where_others_reach_them(
    host: str, advertise: str | None, url: str
) -> None:
    """No part is ever registered at an address that means every interface."""
    assert advertised_url(host, 80, advertise) == url


@pytest.mark.medium
def test_a_port_that_is_taken_is_a_sentence(workspace: Path, outloop: Outloop) -> None:
    """A server that cannot have its port says so, with the exit code of settings."""
    run_dir = finish(outloop("init", "run.toml")).strip()
    port = load_run_settings(Path(run_dir)).buffer.redis_url.rpartition(":")[2]
    server = outloop("server", "--run", run_dir, "--port", port)
    output, _ = server.communicate(timeout=60)
    assert server.returncode == 2
    assert "cannot listen there" in output
