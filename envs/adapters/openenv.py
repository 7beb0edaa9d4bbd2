"""OpenEnv environments over their WebSocket protocol: reset, step, state, close.

    from outloop.envs.adapters import openenv

    def train_tasks():
        return openenv.tasks(["http://127.0.0.1:8000"], seeds=range(1000), action="message")

    # run.toml: rollout_function_path = "outloop.envs.adapters.openenv:OpenEnv"

Each episode holds one connection, because the server keeps an environment for each: a server that
ends silent sessions must wait for longer than a turn of the policy takes. Written against
openenv-core 0.3.0; that package is not needed here.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import aiohttp

from outloop.buffer.errors import EnvironmentFailure, SettingsError
from outloop.buffer.records import Task
from outloop.envs.adapters.conversation import (
    InvalidAction,
    Observation,
    field,
    play_conversation,
    reward_of,
)
from outloop.envs.rollout.episode import Episode

_FULL = "CAPACITY_REACHED"
_REFUSED = ("VALIDATION_ERROR", "INVALID_JSON")
_FIRST_RETRY_S = 0.1
_MAX_RETRY_S = 2.0
_PING_EVERY_S = 20.0
_MAX_MESSAGE_BYTES = 2**27


def tasks(
    servers: Sequence[str],
    *,
    seeds: Iterable[int],
    action: str = "",
    observation: str = "",
    instructions: str = "",
    max_actions: int = 64,
    reset: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """One task for each seed, played on any of `servers`.

    Args:
        servers: base URLs of servers of the same environment.
        action: the field of the environment's action that gets the policy's text; "": the policy
            writes the action as a JSON object.
        observation: the field of the observation that is shown; "": all of it as JSON.
        reset: further parameters of the reset beside the seed.
    """
    shared = {
        "servers": list(servers),
        "action": action,
        "observation": observation,
        "instructions": instructions,
        "max_actions": max_actions,
        "reset": dict(reset or {}),
    }
    return [{**shared, "seed": seed} for seed in seeds]


class OpenEnv:
    """A rollout function with one pool of connections, and episodes spread over the servers."""

    async def set_up(self) -> None:
        """Open the pool of connections."""
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        )
        self._num_playing: Counter[str] = Counter()

    async def tear_down(self) -> None:
        """Close the pool of connections."""
        await self._http.close()

    async def play(self, task: Task, episode: Episode) -> float:
        """Play one episode; its rewards are summed.

        A server without a free session is asked again until the episode's deadline.

        Raises:
            SettingsError: a field of the task is missing.
            InvalidAction: the policy wrote three times what is no action.
            EnvironmentFailure: a server does not answer, breaks off or fails.
        """
        servers = field(task, "servers", list)
        if not servers:
            raise SettingsError(f"task_id={task.task_id!r}: servers=[]; give at least one base URL")
        server = min(servers, key=lambda url: self._num_playing[url])
        self._num_playing[server] += 1
        environment = _Environment(
            self._http,
            server.rstrip("/") + "/ws",
            action=field(task, "action", str, ""),
            observation=field(task, "observation", str, ""),
            reset={"seed": field(task, "seed", int), **field(task, "reset", dict, {})},
            deadline=episode.deadline,
        )
        try:
            return await play_conversation(environment, episode)
        finally:
            self._num_playing[server] -= 1


class _Refusal(Exception):
    """The server answered with an error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class _Environment:
    """One session of a server, which lives as long as its connection."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        url: str,
        *,
        action: str,
        observation: str,
        reset: Mapping[str, Any],
        deadline: float,
    ) -> None:
        self._http, self._url = http, url
        self._action, self._observation, self._reset = action, observation, reset
        self._deadline = deadline
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def reset(self) -> Observation:
        pause_s = _FIRST_RETRY_S
        while True:
            await self._connect()
            try:
                return self._shown(await self._request("reset", self._reset))
            except _Refusal as error:
                if error.code != _FULL or time.time() + pause_s > self._deadline:
                    raise self._failure(str(error)) from error
            # The server has closed the connection, and nothing says when a session is free.
            await asyncio.sleep(pause_s)
            pause_s = min(_MAX_RETRY_S, 2 * pause_s)

    async def step(self, action: str) -> Observation:
        try:
            return self._shown(await self._request("step", self._parse(action)))
        except _Refusal as error:
            if error.code in _REFUSED:
                raise InvalidAction(f"The environment refused this action: {error}") from error
            raise self._failure(str(error)) from error

    async def close(self) -> None:
        if self._socket is None or self._socket.closed:
            return
        # The server ends the session with the connection, also if it does not get the message.
        with suppress(aiohttp.ClientError, ConnectionError):
            await self._socket.send_json({"type": "close"})
        await self._socket.close()

    async def _connect(self) -> None:
        await self.close()
        try:
            self._socket = await self._http.ws_connect(
                self._url, heartbeat=_PING_EVERY_S, max_msg_size=_MAX_MESSAGE_BYTES
            )
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._failure(f"{type(error).__name__}: {error}") from error

    async def _request(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        assert self._socket is not None
        try:
            await self._socket.send_json({"type": kind, "data": data})
            answer = await self._socket.receive()
        except (aiohttp.ClientError, ConnectionError) as error:
            raise self._failure(f"{type(error).__name__}: {error}") from error
        if answer.type != aiohttp.WSMsgType.TEXT:
            raise self._failure(f"it sent {answer.type.name} in place of an answer to {kind!r}")
        try:
            decoded = json.loads(answer.data)
            found, content = decoded["type"], decoded["data"]
            if found == "error":
                raise _Refusal(str(content["code"]), str(content["message"]))
        except (ValueError, TypeError, KeyError) as error:
            raise self._failure(f"malformed answer to {kind!r}: {answer.data[:200]}") from error
        if found != "observation" or not isinstance(content, dict):
            raise self._failure(f"malformed answer to {kind!r}: {answer.data[:200]}")
        return content

    def _shown(self, content: dict[str, Any]) -> Observation:
        try:
            observation = content["observation"]
            shown = observation[self._observation] if self._observation else observation
            reward, is_done = content["reward"], content["done"]
            if not isinstance(is_done, bool):
                raise TypeError(f"done={is_done!r}")
            return Observation(
                text=shown if isinstance(shown, str) else json.dumps(shown),
                reward=None if reward is None else reward_of(reward, "reward"),
                is_done=is_done,
            )
        except EnvironmentFailure as error:
            raise self._failure(str(error)) from error
        except (KeyError, TypeError, ValueError) as error:
            raise self._failure(
                f"malformed observation ({type(error).__name__}: {error}): {str(content)[:200]}"
            ) from error

    def _parse(self, text: str) -> dict[str, Any]:
        if self._action:
            return {self._action: text}
        start, end = text.find("{"), text.rfind("}")
        try:
            action = json.loads(text[start : end + 1])
        except ValueError as error:
            raise InvalidAction("That is no JSON object. Answer with the action as one.") from error
        if not isinstance(action, dict):
            raise InvalidAction("That is no JSON object. Answer with the action as one.")
        return action

    def _failure(self, why: str) -> EnvironmentFailure:
        return EnvironmentFailure(f"OpenEnv server {self._url}: {why}")
