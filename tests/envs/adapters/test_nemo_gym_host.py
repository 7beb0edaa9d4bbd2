"""NeMo-Gym's protocol: an agent behind `/run` that asks one model server, by the rollout's id."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import httpx
import pytest
from aiohttp import web

from outloop.envs.adapters import nemo_gym_host
from outloop.envs.adapters.nemo_gym_host import Host

PlayWith = Callable[..., Any]
Serve = Callable[[web.Application], Awaitable[str]]
ROW = {"responses_create_params": {"input": "Say 7."}, "expected_answer": "7"}
TASK = {
    "task_id": {"taskset": "digits", "task_id": "7"},
    "task_input": {"responses_create_params": {"input": "Say 7."}, "expected_answer": "7"},
}

OWN = {"host": "127.0.0.1", "port": 0, "agent": "digits", "max_silence_s": 30}


class Agent:
    """An agent server and an environment server: both ask `/v1/responses` of the model server."""

    def __init__(self) -> None:
        self.model_url = ""
        self.names_rollout = True
        self.answer: tuple[int, Any] | None = None
        """Instead of playing."""
        self.extra: dict[str, Any] = {}
        self.hangs = False
        self.was_left = asyncio.Event()

    def app(self) -> web.Application:
        """What serves `/run`."""
        app = web.Application()
        app.router.add_post("/run", self._run)
        return app

    async def _run(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.answer is not None:
            status, found = self.answer
            return web.json_response(found, status=status)
        if self.hangs:
            try:
                await asyncio.Event().wait()
            finally:
                self.was_left.set()
        episode = body.get("episode_id")
        rollout = episode["rollout_id"] if episode else body["_ng_rollout_id"]
        row = body["task"]["task_input"] if episode else body
        path = f"/ng-rollout/{rollout}/v1/responses" if self.names_rollout else "/v1/responses"
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.model_url + path, json=row["responses_create_params"]) as answer,
        ):
            said = await answer.json()
            if answer.status != 200:
                sentence = f"calling an inner server: {said}"
                if not episode:
                    return web.json_response(sentence, status=500)
                failure = {"failure_reason": sentence, "terminal": False, "stage": "agent"}
                return web.json_response({**episode, "task_id": {}, "failure": failure})
        text = said["output"][0]["content"][0]["text"]
        result = {"reward": float(text == row["expected_answer"]), "response": said} | self.extra
        return web.json_response({**body, "result": result} if episode else {**row, **result})


class Policy:
    """Answers `/v1/responses` of whoever has the episode's key."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.refusal: tuple[int, str] | None = None

    def app(self) -> web.Application:
        """What serves it."""
        app = web.Application()
        app.router.add_post("/v1/responses", self._say)
        return app

    async def _say(self, request: web.Request) -> web.Response:
        self.requests.append(
            {**await request.json(), "key": request.headers["Authorization"].split()[1]}
        )
        if self.refusal is not None:
            status, code = self.refusal
            return web.json_response({"error": {"code": code}}, status=status)
        content = [{"type": "output_text", "text": "7"}]
        return web.json_response({"output": [{"type": "message", "content": content}]})


class Gym:
    """Host, agent and policy, and a client of the host's `/run`."""

    def __init__(self, urls: tuple[str, str], agent: Agent, policy: Policy) -> None:
        self.url, self.policy_url = urls
        self.agent, self.policy = agent, policy

    async def run(self, **body: Any) -> tuple[int, dict[str, Any]]:
        """Play one episode."""
        asked = {"row": ROW, "base_url": f"{self.policy_url}/v1", "api_key": "key-1"} | body
        async with httpx.AsyncClient(timeout=20) as http:
            answer = await http.post(f"{self.url}/run", json=asked)
        return answer.status_code, answer.json()


@pytest.fixture
async def gym(serve: Serve) -> Gym:
    """Everything started."""
    return await start(serve, max_silence_s=60)


async def start(serve: Serve, max_silence_s: float) -> Gym:
    """Agent, policy and the host between them."""
    agent, policy = Agent(), Policy()
    agent.model_url = await serve(Host(await serve(agent.app()), max_silence_s).app())
    return Gym((agent.model_url, await serve(policy.app())), agent, policy)


@pytest.mark.parametrize("row", [ROW, TASK])
async def test_each_episode_asks_its_own_endpoint(gym: Gym, row: dict[str, Any]) -> None:
    """Although the agent has one model server; as an agent's row and as an environment's task."""
    gym.agent.extra = {"reward_components": {"exact": 1.0}}
    keys = ["key-1", "key-2", "key-3"]
    answers = await asyncio.gather(*(gym.run(row=row, api_key=key) for key in keys))
    assert answers == [(200, {"reward": 1.0, "components": {"exact": 1.0}})] * 3
    assert sorted(request["key"] for request in gym.policy.requests) == keys
    assert {request["model"] for request in gym.policy.requests} == {"policy"}


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        ((500, "Hit an exception"), 502, "status=500"),
        ((200, [1]), 502, "no JSON object"),
        ((200, {"reward": None}), 502, "reward=None"),
        ((200, {"reward": float("nan")}), 502, "reward=nan"),
        ((200, {"reward": 0.0, "_ng_failure_class": "judge_failed"}), 502, "judge_failed"),
        ((200, {"reward": 0.0, "mask_sample": True}), 502, "masked"),
        ((200, {"reward": 0.0, "instance_config": {"mask_sample": True}}), 502, "masked"),
        ((200, {"reward": 0.0, "_ng_no_persist": True}), 502, "no result"),
        ((200, {"failure": {"failure_reason": "seed", "terminal": True}}), 502, "failed: seed"),
        ((422, {"detail": "responses_create_params is missing"}), 400, "refused the row"),
        ((200, {"reward": 0.0, "verification_skipped": True}), 400, "skip verification"),
    ],
)
async def test_what_is_no_result_is_no_reward(
    gym: Gym, answer: tuple[int, Any], status: int, words: str
) -> None:
    """Failures carry a reward of zero there."""
    gym.agent.answer = answer
    found = await gym.run()
    assert found[0] == status
    assert words in found[1]["error"]


@pytest.mark.parametrize("row", [ROW, TASK])
async def test_a_request_that_is_refused_for_good_is_the_agents_failure(
    gym: Gym, row: dict[str, Any]
) -> None:
    """A spent budget; a server that is away is not."""
    gym.policy.refusal = (400, "turn_budget_spent")
    status, found = await gym.run(row=row)
    assert (status, "turn_budget_spent" in found["agent_failure"]) == (200, True)
    gym.policy.refusal = (503, "no_server")
    status, found = await gym.run(row=row)
    assert (status, "no_server" in found["error"]) == (502, True)


async def test_a_time_limit_over_there_is_the_agents_failure(gym: Gym) -> None:
    """It is a result: playing it again would make dawdling free."""
    gym.agent.answer = (200, {"reward": 0.0, "_ng_failure_class": "timeout_exceeded"})
    assert await gym.run() == (200, {"agent_failure": "timeout_exceeded: "})


async def test_requests_without_a_rollout_are_refused(gym: Gym) -> None:
    """They could be any episode's; the sentence says which setting is missing."""
    gym.agent.names_rollout = False
    status, found = await gym.run()
    assert status == 400
    assert "observability_enabled=true" in found["error"]


@pytest.mark.medium
async def test_an_agent_that_hangs_is_no_result_and_is_left(serve: Serve) -> None:
    """The model was asked nothing for too long."""
    gym = await start(serve, max_silence_s=0.5)
    gym.agent.hangs = True
    status, found = await gym.run()
    assert (status, "asked nothing of the model" in found["error"]) == (504, True)
    async with asyncio.timeout(10):
        await gym.agent.was_left.wait()


async def test_a_host_without_its_agent_and_a_rollout_that_ended(serve: Serve, gym: Gym) -> None:
    """A dead socket is no result; a late request of the agent gets an answer, and no endpoint."""
    url = await serve(Host("http://127.0.0.1:9", max_silence_s=5).app())
    async with httpx.AsyncClient(timeout=20) as http:
        asked = {"row": ROW, "base_url": "http://127.0.0.1:9/v1", "api_key": "key"}
        answer = await http.post(f"{url}/run", json=asked)
        assert answer.status_code == 502, answer.text
        answer = await http.post(f"{url}/run", json={**asked, "api_key": ""})
        assert (answer.status_code, answer.json()) == (400, {"error": "api_key is missing"})
        answer = await http.post(f"{url}/ng-rollout/another/v1/responses", json={})
        assert answer.status_code == 404, answer.text


@pytest.mark.medium
async def test_as_a_server_of_nemo_gyms_configuration(serve: Serve) -> None:
    """Started as `gym env start` does: its options are in two variables."""
    agent, policy = Agent(), Policy()
    host, port = (await serve(agent.app())).removeprefix("http://").split(":")
    config = {
        "policy_model": {"responses_api_models": {"outloop": OWN}},
        "digits": {"responses_api_agents": {"simple_agent": {"host": host, "port": int(port)}}},
        "observability_enabled": True,
    }
    names = {"NEMO_GYM_CONFIG_DICT": json.dumps(config), "NEMO_GYM_CONFIG_PATH": "policy_model"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, nemo_gym_host.__file__, env={**os.environ, **names}, stdout=PIPE
    )
    try:
        assert process.stdout is not None
        agent.model_url = json.loads(await process.stdout.readline())["url"]
        async with httpx.AsyncClient(timeout=20) as http:
            assert (await http.get(agent.model_url)).status_code == 200
        gym = Gym((agent.model_url, await serve(policy.app())), agent, policy)
        assert await gym.run() == (200, {"reward": 1.0, "components": {}})
    finally:
        process.kill()
        await process.wait()


SOURCE = """
from outloop.envs.adapters import remote_episodes
from outloop.envs.adapters.remote_episodes import RemoteEpisodes

def games():
    return remote_episodes.tasks(
        "{url}/run",
        rows=[{{"row": {row}}}],
        request={{"row": "{{row}}", "base_url": "{policy}/v1", "api_key": "{{api_key}}"}},
        components="components",
        agent_failure="agent_failure",
    )
"""


@pytest.mark.parametrize(
    ("answer", "reward", "kind"),
    [
        (None, 1.0, None),
        ((500, "the sandbox is gone"), None, "environment"),
        ((200, {"reward": 0.0, "_ng_failure_class": "judge_failed"}), None, "environment"),
        ((200, {"reward": 0.0, "_ng_failure_class": "timeout_exceeded"}), -1.0, "agent"),
    ],
)
async def test_through_the_adapter(
    router: Any, play_with: PlayWith, gym: Gym, answer: Any, reward: float | None, kind: str | None
) -> None:
    """The rewards and failure kinds that a run records."""
    gym.agent.answer = answer
    router.num_episodes = 1
    source = SOURCE.format(url=gym.url, row=json.dumps(ROW), policy=gym.policy_url)
    options = {"tasks": "user:games", "rollout_function_path": "user:RemoteEpisodes"}
    await play_with(router, source, failure_reward=-1.0, **options)
    (close,) = router.closes.values()
    assert (close["reward"] and close["reward"]["value"], close["failure_kind"]) == (reward, kind)
