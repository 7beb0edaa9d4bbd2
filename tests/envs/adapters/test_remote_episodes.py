"""Episodes that a system behind one HTTP request plays by itself."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from outloop.buffer.errors import SettingsError

PlayWith = Callable[..., Any]
Serve = Callable[[web.Application], Awaitable[str]]

SOURCE = """
from outloop.envs.adapters import remote_episodes
from outloop.envs.adapters.remote_episodes import RemoteEpisodes

def games():
    return remote_episodes.tasks(
        "{url}/run",
        rows=[{{"question": f"{{n}}+1"}} for n in range(5)],
        request={request},
        reward="result.reward",
        components="result.parts",
        agent_failure="result.failed",
    )
"""
REQUEST = {
    "question": "{question}",
    "policy": {"base_url": "{base_url}", "api_key": "{api_key}", "model": "policy"},
}
OPTIONS = {"tasks": "user:games", "rollout_function_path": "user:RemoteEpisodes"}


class Gym:
    """Asks the policy it is given, and rewards the answer's length."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self.answer: tuple[int, str] | None = None

    def app(self) -> web.Application:
        """What serves `/run`."""
        app = web.Application()
        app.router.add_post("/run", self._run)
        return app

    async def _run(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        if self.answer is not None:
            status, text = self.answer
            return web.Response(status=status, text=text)
        policy = body["policy"]
        question = [{"role": "user", "content": body["question"]}]
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                policy["base_url"] + "/chat/completions",
                json={"model": policy["model"], "messages": question},
                headers={"Authorization": f"Bearer {policy['api_key']}"},
            ) as answer,
        ):
            text = (await answer.json())["choices"][0]["message"]["content"]
        result = {"reward": len(text), "parts": {"length": len(text), "form": 0.5}}
        return web.json_response({"result": result})


@pytest.fixture
async def gym(serve: Serve) -> Gym:
    """A started system."""
    system = Gym()
    system.url = await serve(system.app())
    return system


def source(gym: Gym, request: dict[str, Any] = REQUEST) -> str:
    """The user's module."""
    return SOURCE.format(url=gym.url, request=json.dumps(request))


def silent(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """A policy that says four letters."""
    return {"role": "assistant", "content": "four"}


async def test_the_system_gets_an_endpoint_per_episode_and_returns_the_reward(
    router: Any, play_with: PlayWith, gym: Gym
) -> None:
    """Every request has the key of its own episode; components are kept by name."""
    router.num_episodes = 3
    router.answer = silent
    await play_with(router, source(gym), **OPTIONS)
    assert [reward["value"] for reward in router.closed("reward")] == [4.0] * 3
    assert router.closed("reward")[0]["components"] == {"length": 4.0, "form": 0.5}
    assert len({request["policy"]["api_key"] for request in gym.requests}) == 3


@pytest.mark.parametrize(
    "answer",
    [
        (500, "down"),
        (200, "not JSON"),
        (200, '{"result": {}}'),
        (200, '{"result": {"reward": null, "parts": {}}}'),
        (200, '{"result": {"reward": NaN, "parts": {}}}'),
        (200, '{"result": {"reward": 1, "parts": {"form": "good"}}}'),
    ],
)
async def test_an_answer_without_a_reward_is_the_environments_failure(
    router: Any, play_with: PlayWith, gym: Gym, answer: tuple[int, str]
) -> None:
    """It never scores zero."""
    gym.answer = answer
    router.num_episodes = 1
    await play_with(router, source(gym), **OPTIONS)
    (close,) = router.closes.values()
    assert (close["outcome"], close["failure_kind"]) == ("failed", "environment")
    assert close["reward"] is None


async def test_an_agent_that_failed_there_has_the_reward_of_failing(
    router: Any, play_with: PlayWith, gym: Gym
) -> None:
    """It is a result: replacing it would make failing free."""
    gym.answer = (200, '{"result": {"failed": "the program ended with 3"}}')
    router.num_episodes = 1
    await play_with(router, source(gym), **OPTIONS)
    (close,) = router.closes.values()
    assert (close["outcome"], close["failure_kind"]) == ("failed", "agent")
    assert "the program ended with 3" in close["error"]


async def test_a_refused_request_stops_the_run(router: Any, play_with: PlayWith, gym: Gym) -> None:
    """A 4xx is the user's to correct."""
    gym.answer = (422, "no field question")
    with pytest.raises(SettingsError, match="status=422: no field question"):
        await play_with(router, source(gym), **OPTIONS)


async def test_a_name_that_nothing_fills_stops_the_run(
    router: Any, play_with: PlayWith, gym: Gym
) -> None:
    """With the names that can be filled in."""
    with pytest.raises(SettingsError, match="'{base}' names no field; allowed are .*base_url"):
        await play_with(router, source(gym, {"url": "{base}"}), **OPTIONS)
