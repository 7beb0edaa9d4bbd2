"""The adapter against the server of the real openenv-core, in an environment of its own."""

import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.ports import free_ports

PlayWith = Callable[..., Any]
pytestmark = pytest.mark.clients

SERVER = Path(__file__).with_name("openenv_server.py")
SOURCE = """
from outloop.envs.adapters import openenv
from outloop.envs.adapters.openenv import OpenEnv

def games():
    return openenv.tasks(["{url}"], seeds=range(8), action={action!r}, observation="shown")
"""
NUM_SESSIONS = 2


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A started server's base URL."""
    (port,) = free_ports(1)
    command = [os.environ["OUTLOOP_OPENENV_PYTHON"], str(SERVER), str(port), str(NUM_SESSIONS)]
    log = tmp_path_factory.mktemp("openenv") / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                    break
            except (urllib.error.URLError, OSError):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def obeys(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """A policy that says hello when it is asked for, and otherwise nothing that helps."""
    wanted = messages[-1]["content"].removeprefix("say ")
    return {"role": "assistant", "content": wanted if wanted == "hello" else "no"}


async def test_more_episodes_than_sessions_are_played(
    router: Any, play_with: PlayWith, url: str
) -> None:
    """Eight at once on a server of two sessions: all are scored by the server."""
    router.num_episodes = 8
    router.answer = obeys
    options = {"tasks": "user:games", "rollout_function_path": "user:OpenEnv"}
    await play_with(router, SOURCE.format(url=url, action="word"), **options)
    assert sorted(reward["value"] for reward in router.closed("reward")) == [0.0] * 4 + [1.0] * 4


async def test_an_action_that_the_server_refuses_is_the_policys(
    router: Any, play_with: PlayWith, url: str
) -> None:
    """Its own validation says what is wrong, and the policy may write another action."""
    texts = ['{"wrong": 1}', '{"word": "hello"}']

    def answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
        return {"role": "assistant", "content": texts[(len(messages) - 1) // 2]}

    router.num_episodes = 1
    router.answer = answer
    options = {"tasks": "user:games", "rollout_function_path": "user:OpenEnv"}
    await play_with(router, SOURCE.format(url=url, action=""), **options)
    assert [reward["value"] for reward in router.closed("reward")] == [1.0]
