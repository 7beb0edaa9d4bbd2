"""A real verifiers environment, in its own virtual environment, played as whole episodes."""

import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from outloop.engine.models.random_init import Sizes, write_policy
from outloop.envs.adapters import verifiers_host

pytestmark = pytest.mark.clients
Serve = Callable[[web.Application], Awaitable[str]]

CONFIG = """
[env.taskset]
id = "digits_environment"
[env.agent.harness]
id = "digits_environment"
[env.agent.runtime]
type = "subprocess"
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of the served environment."""
    folder = tmp_path_factory.mktemp("verifiers")
    (folder / "env.toml").write_text(CONFIG)
    command = [os.environ["OUTLOOP_VERIFIERS_PYTHON"], verifiers_host.__file__]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--config", "env.toml"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "HOME": str(folder)},
        )
    assert process.stdout is not None
    with process.stdout:
        line = process.stdout.readline()
        assert line, (folder / "log").read_text()
        yield json.loads(line)["url"]
        process.kill()
        process.wait()


@pytest.fixture
async def policy(serve: Serve) -> str:
    """A base URL of a policy that says `a1b2`, to whoever has its key."""

    async def say(request: web.Request) -> web.Response:
        if request.headers["Authorization"] != "Bearer episode-key":
            return web.json_response({"error": {"message": "another key"}}, status=401)
        message = {"role": "assistant", "content": "a1b2"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        head = {"id": "x", "object": "chat.completion", "created": 1, "model": "policy"}
        return web.json_response({**head, "choices": [choice], "usage": usage})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", say)
    return f"{await serve(app)}/v1"


@pytest.mark.timeout(120)
async def test_an_episode_is_a_reward_a_failure_of_the_agent_or_no_result(
    host: str, policy: str
) -> None:
    """A verifier that raises and a policy that is gone are failures of the environment."""

    async def run(**body: Any) -> httpx.Response:
        asked = {"index": 0, "base_url": policy, "api_key": "episode-key"} | body
        return await http.post(f"{host}/run", json=asked)

    async with httpx.AsyncClient(timeout=60) as http:
        assert (await http.get(f"{host}/tasks")).json() == {"num_tasks": 23}
        answer = await run()
        assert answer.json() == {"reward": 0.5, "components": {"digits": 0.5}}, answer.text
        assert "exited 3" in (await run(index=2)).json()["agent_failure"]
        for body, status, words in (
            ({"index": 1}, 502, "the score is not there"),
            ({"base_url": "http://127.0.0.1:9/v1"}, 502, "ProviderError"),
            ({"index": 23}, 400, "0 to 22"),
            ({"api_key": ""}, 400, "api_key is missing"),
        ):
            answer = await run(**body)
            assert answer.status_code == status, answer.text
            assert words in answer.json()["error"]
        # Each episode has its own key.
        assert "ProviderError" in (await run(api_key="other")).json()["agent_failure"]


RUN = """
[run]
name = "digits"
[model]
path = "policy"
max_context_tokens = 128
[env]
rollout_function_path = "outloop.envs.adapters.remote_episodes:RemoteEpisodes"
tasks = "user:train_tasks"
max_concurrent_episodes = 6
episode_deadline_s = 120
[sampling]
max_new_tokens = 8
[buffer]
group_size = 3
[trainer]
num_steps = 2
groups_per_step = 2
checkpoint_every = 0
take_timeout_s = 250
"""
USER = """
from outloop.envs.adapters import remote_episodes

def train_tasks():
    return remote_episodes.tasks(
        "{host}/run",
        rows=[{{"index": index}} for index in range(3, 23)],
        request={{"index": "{{index}}", "base_url": "{{base_url}}", "api_key": "{{api_key}}"}},
        components="components",
        agent_failure="agent_failure",
    )
"""


@pytest.mark.timeout(400)
def test_it_trains(host: str, tmp_path: Path) -> None:
    """Two steps through the router, on what the policy said to the environment's program."""
    says = [{"messages": [{"role": "user", "content": "Say 12."},
                          {"role": "assistant", "content": "0123456789"}]}]  # fmt: skip
    write_policy(tmp_path / "policy", 0, says, Sizes(max_context_tokens=256))
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "user.py").write_text(USER.format(host=host))
    answer = subprocess.run(
        [sys.executable, "-m", "outloop.cli", "train", "run.toml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=350,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    text = (tmp_path / "runs/digits/metrics.jsonl").read_text()
    rows = [row for row in map(json.loads, text.splitlines()) if "train/loss" in row]
    assert [row["train/episodes"] for row in rows] == [6, 6]
    assert all(row["train/failed_share"] == 0 for row in rows)
    assert all(0 <= row["reward/digits"] <= 1 for row in rows)
