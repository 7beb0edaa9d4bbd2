"""A Redis with a password on TCP, and a user's folder, for parts that are started one by one."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from outloop.buffer.embedded import find_server
from outloop.engine.new_policy import write_policy

PASSWORD = "p@ss/word:%41"
ROLLOUTS = '''
"""Digits score: a random policy differs within a group, so there is signal."""


def tasks():
    return [{"question": f"say {i}"} for i in range(64)]


async def play(task, episode):
    answer = await episode.client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": task.payload["question"]}]
    )
    text = answer.choices[0].message.content or ""
    return float(sum(character.isdigit() for character in text))
'''
CONFIG = """
[run]
name = "apart"
keys_file = "keys/run.json"

[model]
path = "model"
renderer = "qwen3"
renderer_options = {{ enable_thinking = false }}
max_context_tokens = 256

[env]
rollout_function_path = "rollouts:play"
tasks = "rollouts:tasks"
max_concurrent_episodes = 16
episode_deadline_s = 20

[sampling]
max_new_tokens = 12

[buffer]
redis_url = "redis://127.0.0.1:{port}"
redis_password_file = "keys/redis_password"
group_size = 4

[publish]
transport = "disk"

[router]
host = "0.0.0.0"

[server]
host = "0.0.0.0"

[trainer]
num_steps = 2
groups_per_step = 4
learning_rate = 5e-3
checkpoint_every = 1
take_timeout_s = 90
"""


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


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
    (tmp_path / "rollouts.py").write_text(ROLLOUTS)
    (tmp_path / "run.toml").write_text(CONFIG.format(port=redis_port))
    (tmp_path / "model").symlink_to(model_folder)
    return tmp_path


@pytest.fixture
def outloop(workspace: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start the command line in the user's folder; its output is one text."""

    def start(*arguments: str, cwd: Path = workspace) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "outloop.cli", *arguments],
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    return start
