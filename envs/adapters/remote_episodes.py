"""Episodes that another system plays as a whole: it gets an endpoint and returns a reward.

    def train_tasks():
        return remote_episodes.tasks(
            "http://127.0.0.1:9000/run",
            rows=[{"task_id": "7"}],
            request={"task": "{task_id}", "base_url": "{base_url}", "api_key": "{api_key}"},
            reward="result.reward",
        )

    # run.toml: rollout_function_path = "outloop.envs.adapters.remote_episodes:RemoteEpisodes"

Fits systems with one HTTP request per episode that name the model's endpoint in it;
`verifiers_host` makes one of a verifiers environment. A system that is a program is played by
`env.agent_command`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import aiohttp

from outloop.buffer.errors import EnvironmentFailure, SettingsError
from outloop.buffer.records import Task
from outloop.envs.adapters.conversation import (
    field,
    reward_of,
)
from outloop.envs.rollout.episode import Episode


def tasks(
    url: str,
    *,
    rows: Iterable[Mapping[str, Any]],
    request: Mapping[str, Any],
    reward: str = "reward",
    components: str = "",
    agent_failure: str = "",
) -> list[dict[str, Any]]:
    """One task for each row.

    Args:
        url: gets a POST for each episode and answers when the episode is over.
        request: the JSON body. A text that is `{name}` and nothing else becomes the value of that
            name: a field of the row, or base_url, anthropic_base_url, api_key, episode_id,
            remaining_s.
        reward: where in the answer the reward is, as keys with dots between.
        components: where named components of it are, likewise; "": nowhere.
        agent_failure: where a sentence is if the agent failed, in place of a reward, likewise: the
            episode scores env.failure_reward.
    """
    shared = {
        "url": url,
        "request": dict(request),
        "reward": reward,
        "components": components,
        "agent_failure": agent_failure,
    }
    return [{**shared, "row": dict(row)} for row in rows]


class RemoteAgentFailed(RuntimeError):
    """The other system says that its agent failed."""


class RemoteEpisodes:
    """A rollout function with one pool of connections to the other system."""

    async def set_up(self) -> None:
        """Open the pool of connections."""
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        )

    async def tear_down(self) -> None:
        """Close the pool of connections."""
        await self._http.close()

    async def play(self, task: Task, episode: Episode) -> None:
        """Have the episode played, and score it with the reward that comes back.

        Raises:
            SettingsError: the system refuses the request (4xx), or a name is unknown.
            RemoteAgentFailed: the answer says that the agent failed.
            EnvironmentFailure: it cannot be reached, fails (5xx), breaks off, or its answer has no
                finite reward. Such an attempt is played again; it never scores zero.
        """
        url = field(task, "url", str)
        values = {
            **field(task, "row", dict, {}),
            "base_url": episode.base_url,
            "anthropic_base_url": episode.anthropic_base_url,
            "api_key": episode.api_key,
            "episode_id": episode.episode_id,
            "remaining_s": episode.remaining_s,
        }
        body = _filled(field(task, "request", dict), values)
        try:
            # Without a timeout: the runner ends the episode at its deadline, as truncated.
            async with self._http.post(url, json=body) as answer:
                text = await answer.text()
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EnvironmentFailure(f"{url}: {type(error).__name__}: {error}") from error
        if 400 <= answer.status < 500 and answer.status not in (408, 429):
            raise SettingsError(
                f"{url} refused an episode with status={answer.status}: {text[:300]}; correct "
                "`request` of its task"
            )
        if answer.status != 200:
            raise EnvironmentFailure(f"{url}: status={answer.status}: {text[:300]}")
        try:
            found = json.loads(text)
        except ValueError as error:
            raise EnvironmentFailure(f"{url}: its answer is no JSON: {text[:300]}") from error
        path = field(task, "agent_failure", str, "")
        if path and (reason := _at(found, path, url, default=None)):
            raise RemoteAgentFailed(f"{url}: {str(reason)[:300]}")
        path = field(task, "components", str, "")
        components = _at(found, path, url) if path else {}
        if not isinstance(components, dict):
            raise EnvironmentFailure(f"{url}: components={components!r} is no JSON object")
        numbers: dict[str, Any] = {
            name: _number(value, f"{url}: {name}") for name, value in components.items()
        }
        reward = field(task, "reward", str, "reward")
        episode.score(reward_of(_at(found, reward, url), f"{url}: {reward}"), **numbers)


def _filled(value: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        return {key: _filled(inner, values) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, values) for inner in value]
    if not (isinstance(value, str) and value.startswith("{") and value.endswith("}")):
        return value
    name = value[1:-1]
    if name not in values:
        raise SettingsError(
            f"request: {value!r} names no field; allowed are {', '.join(sorted(values))}"
        )
    return values[name]


_MISSING = object()


def _at(found: Any, path: str, url: str, default: Any = _MISSING) -> Any:
    for key in path.split("."):
        if not isinstance(found, dict) or key not in found:
            if default is not _MISSING:
                return default
            raise EnvironmentFailure(f"{url}: its answer has no {path!r}: {str(found)[:300]}")
        found = found[key]
    return found


def _number(value: Any, source: str) -> float:
    """A component; whether something holds is 0 or 1."""
    return reward_of(float(value) if isinstance(value, bool) else value, source)
