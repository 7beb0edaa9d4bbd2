"""What an environment gives in place of a reward, for each adapter that reads one."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import WSMsgType, web

PlayWith = Callable[..., Any]
Serve = Callable[[web.Application], Any]

NO_REWARDS = {
    "missing": None,
    "not a number": math.nan,
    "infinite": -math.inf,
    "too large": 1e300,
    "text": "1.0",
    "bool": True,
    "list": [1.0],
}
GYMNASIUM = """
import gymnasium
from math import inf, nan
from outloop.envs.adapters import gymnasium_games
from outloop.envs.adapters.gymnasium_games import play

class Game(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None): return 0, {{}}
    def step(self, action): return 1, {reward!r}, True, False, {{}}

gymnasium.registry.pop("Game-v0", None)
gymnasium.register("Game-v0", Game, disable_env_checker=True)

def games():
    return gymnasium_games.tasks("Game-v0", seeds=[1], actions=["no", "yes"])
"""
TEXTARENA = """
import textarena
from math import inf, nan
from outloop.envs.adapters import textarena_games
from outloop.envs.adapters.textarena_games import play

class Game(textarena.Env):
    def __init__(self): self.state = None
    def reset(self, num_players, seed=None): pass
    def get_observation(self): return 0, "Say yes."
    def step(self, action): return True, {{}}
    def close(self): return {{0: {reward!r}}}, {{}}

textarena.envs.registration.ENV_REGISTRY.pop("Game-v0", None)
textarena.envs.registration.register("Game-v0", Game)

def games():
    return textarena_games.tasks("Game-v0", seeds=[1])
"""
OPENENV = """
from outloop.envs.adapters import openenv
from outloop.envs.adapters.openenv import OpenEnv

def games():
    return openenv.tasks([{url!r}], seeds=[1], observation="shown", action="word")
"""
REMOTE = """
from outloop.envs.adapters import remote_episodes
from outloop.envs.adapters.remote_episodes import RemoteEpisodes

def games():
    return remote_episodes.tasks({url!r}, rows=[{{}}], request={{"policy": "{{base_url}}"}})
"""


def app_of(reward: Any) -> web.Application:
    """Serve an OpenEnv environment and a system of episodes, which both give this reward."""

    async def socket(request: web.Request) -> web.WebSocketResponse:
        line = web.WebSocketResponse()
        await line.prepare(request)
        async for message in line:
            if message.type != WSMsgType.TEXT or json.loads(message.data)["type"] == "close":
                break
            is_done = json.loads(message.data)["type"] == "step"
            data = {"observation": {"shown": "x"}, "reward": reward if is_done else None,
                    "done": is_done}  # fmt: skip
            await line.send_json({"type": "observation", "data": data})
        return line

    async def run(request: web.Request) -> web.Response:
        return web.json_response({"reward": reward})

    app = web.Application()
    app.router.add_get("/ws", socket)
    app.router.add_post("/", run)
    return app


@pytest.mark.parametrize("given", NO_REWARDS)
@pytest.mark.parametrize("adapter", ["gymnasium", "textarena", "openenv", "remote"])
async def test_what_is_no_reward_is_the_environments_failure(
    router: Any, play_with: PlayWith, serve: Serve, adapter: str, given: str
) -> None:
    """It is never 0, and never the agent's failure."""
    reward = NO_REWARDS[given]
    url = await serve(app_of(reward))
    source = {"gymnasium": GYMNASIUM, "textarena": TEXTARENA, "openenv": OPENENV, "remote": REMOTE}
    router.num_episodes = 1
    router.answer = lambda messages: {"role": "assistant", "content": "yes"}
    names = {"remote": "RemoteEpisodes", "openenv": "OpenEnv"}
    options = {"tasks": "user:games", "rollout_function_path": f"user:{names.get(adapter, 'play')}"}
    await play_with(router, source[adapter].format(reward=reward, url=url), **options)
    (close,) = router.closes.values()
    assert (close["failure_kind"], close["reward"]) == ("environment", None), close
