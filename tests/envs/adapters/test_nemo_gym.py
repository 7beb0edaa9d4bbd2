"""Real servers of NeMo-Gym, in their own virtual environment, played as whole episodes."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from fakes.ports import free_ports
from outloop.engine.models.random_init import Sizes, write_policy
from outloop.envs.adapters import nemo_gym_host

PYTHON = os.environ.get("OUTLOOP_NEMO_GYM_PYTHON", "")
pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(not os.path.exists(PYTHON), reason="no Python 3.13 for NeMo-Gym"),
]
Serve = Callable[[web.Application], Awaitable[str]]

# Name in the configuration, kind, and folder of what is started of the package.
SERVERS = {
    "digits": ("resources_servers", "string_match"),
    "digits_agent": ("responses_api_agents", "simple_agent"),
    "weather": ("resources_servers", "example_single_tool_call"),
    "weather_agent": ("responses_api_agents", "simple_agent"),
    "weather_environment": ("environment_servers", "single_agent_turn"),
}
REFERENCES: dict[str, dict[str, Any]] = {
    "digits_agent": {
        "resources_server": {"type": "resources_servers", "name": "digits"},
        "model_server": {"type": "responses_api_models", "name": "policy_model"},
    },
    "weather_agent": {
        "resources_server": {"type": "resources_servers", "name": "weather"},
        "model_server": {"type": "responses_api_models", "name": "policy_model_2"},
    },
    "weather_environment": {
        "resources_server": {"type": "resources_servers", "name": "weather"},
        "agent_server": {"type": "responses_api_agents", "name": "weather_agent"},
        "resources_tool_transports": ["direct_http"],
        "max_concurrent_episodes": None,
        "queue_timeout_seconds": None,
        "default_episode_timeout_seconds": 300,
        "cleanup_timeout_seconds": 30,
    },
}


def digit_row(digit: int) -> dict[str, Any]:
    """A row of the resources server that compares strings."""
    ask = [{"role": "user", "content": f"Say {digit}."}]
    return {
        "responses_create_params": {"input": ask},
        "expected_answer": str(digit),
        "extraction_mode": "full_response",
    }


def weather_params() -> dict[str, Any]:
    """A request with the tool of the resources server that pays for a call of it."""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"type": "function", "name": "get_weather", "parameters": parameters, "strict": False}
    return {"input": [{"role": "user", "content": "How is Oslo?"}], "tools": [tool]}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """URLs of `/run` by the server that plays; each with a host of its own."""
    folder = tmp_path_factory.mktemp("nemo_gym")
    find = "import nemo_gym, pathlib; print(pathlib.Path(nemo_gym.__file__).parent.parent)"
    package = subprocess.check_output([PYTHON, "-c", find], text=True).split()[-1]
    hosts_of = {"digits_agent": "policy_model", "weather_environment": "policy_model_2"}
    ports = dict(zip([*SERVERS, *hosts_of.values(), "head"], free_ports(8), strict=True))

    def at(name: str) -> dict[str, Any]:
        return {"host": "127.0.0.1", "port": ports[name]}

    config: dict[str, Any] = {
        "head_server": at("head"),
        "dry_run": False,
        "observability_enabled": True,
    }
    for name in hosts_of.values():
        config[name] = {"responses_api_models": {"outloop": at(name)}}
    for name, (kind, program) in SERVERS.items():
        options = {"entrypoint": "app.py", "domain": "other", **at(name)}
        config[name] = {kind: {program: options | REFERENCES.get(name, {})}}
    processes, logs = [], []
    try:
        for name, (kind, program) in SERVERS.items():
            # As `gym env start` starts them.
            names = {"NEMO_GYM_CONFIG_DICT": json.dumps(config), "NEMO_GYM_CONFIG_PATH": name}
            command, at_folder = [PYTHON, "app.py"], f"{package}/{kind}/{program}"
            logs.append(folder / f"{name}.log")
            processes.append(started(command, at_folder, logs[-1], names))
        for agent, name in hosts_of.items():
            to_agent = f"http://127.0.0.1:{ports[agent]}"
            command = [PYTHON, nemo_gym_host.__file__, "--agent", to_agent]
            logs.append(folder / f"{name}.log")
            port = f"--port={ports[name]}"
            processes.append(started([*command, port], str(folder), logs[-1], {}))
        for name in [*SERVERS, *hosts_of.values()]:
            wait_for(f"http://127.0.0.1:{ports[name]}/", processes, logs)
        yield {agent: f"http://127.0.0.1:{ports[name]}" for agent, name in hosts_of.items()}
    finally:
        for process in processes:
            process.kill()
            process.wait()


def started(
    command: list[str], folder: str, log: Path, names: dict[str, str]
) -> "subprocess.Popen[bytes]":
    """A program of the far side."""
    with log.open("wb") as sink:
        return subprocess.Popen(
            command, cwd=folder, stdout=sink, stderr=sink, env={**os.environ, **names}
        )


def wait_for(url: str, processes: "list[subprocess.Popen[bytes]]", logs: list[Path]) -> None:
    """Until it answers."""
    deadline = time.monotonic() + 400
    while True:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            late = time.monotonic() > deadline
            if late or any(process.poll() is not None for process in processes):
                pytest.fail("\n".join(log.read_text()[-2000:] for log in logs), pytrace=False)
            time.sleep(0.1)


@pytest.fixture
async def policy(serve: Serve) -> str:
    """A base URL of a policy that calls the tool that is offered, and else says 7."""

    async def say(request: web.Request) -> web.Response:
        if request.headers["Authorization"] != "Bearer episode-key":
            return web.json_response({"error": {"message": "another key"}}, status=401)
        body = await request.json()
        is_answered = any(item.get("type") == "function_call_output" for item in body["input"])
        if body.get("tools") and not is_answered:
            call = {"call_id": "c1", "name": "get_weather", "arguments": '{"city": "Oslo"}'}
            item = {"type": "function_call", "id": "f1", "status": "completed", **call}
        else:
            content = [{"type": "output_text", "text": "7", "annotations": []}]
            item = {"type": "message", "id": "m1", "role": "assistant", "content": content}
            item["status"] = "completed"
        head = {"id": "r1", "object": "response", "created_at": 1, "model": "policy"}
        rest = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "usage": None}
        return web.json_response({**head, **rest, "output": [item]})

    app = web.Application()
    app.router.add_post("/v1/responses", say)
    return f"{await serve(app)}/v1"


@pytest.mark.timeout(600)
async def test_an_episode_is_a_reward_a_failure_of_the_agent_or_no_result(
    hosts: dict[str, str], policy: str
) -> None:
    """An agent server, and an environment server whose agent calls a tool."""

    async def run(host: str, row: dict[str, Any], **body: Any) -> httpx.Response:
        asked = {"row": row, "base_url": policy, "api_key": "episode-key"} | body
        return await http.post(f"{hosts[host]}/run", json=asked)

    task = {
        "task_id": {"taskset": "weather", "task_id": "0"},
        "task_input": {"responses_create_params": weather_params()},
    }
    async with httpx.AsyncClient(timeout=60) as http:
        for host, row, reward in (
            ("digits_agent", digit_row(7), 1.0),
            ("digits_agent", digit_row(3), 0.0),
            ("weather_environment", task, 1.0),
        ):
            answer = await run(host, row)
            assert answer.json() == {"reward": reward, "components": {}}, answer.text
        # Each episode has its own key.
        for host, row in (("digits_agent", digit_row(7)), ("weather_environment", task)):
            answer = await run(host, row, api_key="other")
            assert "another key" in answer.json()["agent_failure"], answer.text
            answer = await run(host, row, base_url="http://127.0.0.1:9/v1")
            assert answer.status_code == 502, answer.text
        # The verifier fails: there is nothing to compare with.
        row = {"responses_create_params": digit_row(7)["responses_create_params"]}
        answer = await run("digits_agent", row)
        assert answer.status_code == 502, answer.text
        answer = await run("digits_agent", {"expected_answer": "7"})
        assert (answer.status_code, "status=422" in answer.text) == (400, True), answer.text


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
max_new_tokens = 2
[buffer]
group_size = 8
[trainer]
num_steps = 2
groups_per_step = 2
checkpoint_every = 0
take_timeout_s = 250
"""
USER = """
import json
from outloop.envs.adapters import remote_episodes

def train_tasks():
    return remote_episodes.tasks(
        "{host}/run",
        rows=[{{"row": row}} for row in json.load(open("rows.json"))],
        request={{"row": "{{row}}", "base_url": "{{base_url}}", "api_key": "{{api_key}}"}},
        components="components",
        agent_failure="agent_failure",
    )
"""


@pytest.mark.timeout(800)
def test_it_trains(hosts: dict[str, str], tmp_path: Path) -> None:
    """Two steps through the router, on what the policy said to the real agent server."""
    says = [{"messages": [{"role": "user", "content": "Say 12."},
                          {"role": "assistant", "content": "0123456789"}]}]  # fmt: skip
    write_policy(tmp_path / "policy", 0, says, Sizes(max_context_tokens=256))
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "rows.json").write_text(json.dumps([digit_row(digit) for digit in range(10)]))
    (tmp_path / "user.py").write_text(USER.format(host=hosts["digits_agent"]))
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
    assert [row["train/episodes"] for row in rows] == [16, 16]
    assert all(row["train/failed_share"] == 0 for row in rows)
