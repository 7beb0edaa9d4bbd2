"""A Redis with a password on TCP, and a user's folder, for parts that are started one by one."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from fakes import user_folder
from fakes.ports import free_ports
from outloop.buffer.redis.embedded import find_server
from outloop.engine.models.random_init import write_policy

PASSWORD = "p@ss/word:%41"
SETTINGS = {
    "run": {"name": "apart", "keys_file": "keys/run.json"},
    "env": {"max_concurrent_episodes": 16, "episode_deadline_s": 20},
    "publish": {"transport": "disk"},
    "router": {"host": "0.0.0.0"},
    "server": {"host": "0.0.0.0"},
    "trainer": {
        "num_steps": 2,
        "groups_per_step": 4,
        "checkpoint_every": 1,
        "take_timeout_s": 90,
    },
}


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens on."""
    return free_ports(1)[0]


@pytest.fixture
def redis_port(tmp_path: Path, free_port: int) -> Iterator[int]:
    """A server that asks for PASSWORD; the embedded one has neither port nor password."""
    port = free_port
    options = {"port": str(port), "requirepass": PASSWORD, "dir": str(tmp_path), "save": ""}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    with subprocess.Popen([str(find_server()), *words], stdout=subprocess.DEVNULL) as process:
        client = redis.Redis(port=port, password=PASSWORD)
        while True:
            assert process.poll() is None, "the server ended"
            try:
                client.ping()
                break
            except redis.ConnectionError:
                continue
        client.close()
        yield port
        process.terminate()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of random weights."""
    folder = tmp_path_factory.mktemp("model")
    write_policy(folder, 0)
    return folder


@pytest.fixture
def workspace(tmp_path: Path, redis_port: int, model_folder: Path) -> Path:
    """A folder with settings, a rollout function, a model and the password in a file."""
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "redis_password").write_text(PASSWORD + "\n")
    at = {
        "redis_url": f"redis://127.0.0.1:{redis_port}",
        "redis_password_file": "keys/redis_password",
    }
    user_folder.write(tmp_path, model_folder, SETTINGS | {"buffer": at})
    return tmp_path


@pytest.fixture
def outloop(workspace: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start the command line in the user's folder; its output is one text."""

    def start(*arguments: str, cwd: Path = workspace) -> subprocess.Popen[str]:
        return user_folder.start(cwd, *arguments)

    return start
