"""Plays the tasks of NeMo-Gym for `remote_episodes`: each episode by its own endpoint.

    python PATH/TO/nemo_gym_host.py --agent http://127.0.0.1:9100 --port 9000

or as a model server that `gym env start` starts, with `agent`, `host` and `port` in its
configuration.

An agent server of NeMo-Gym asks the one model server of its configuration. With
`observability_enabled` it puts the rollout's id before the path of each of these requests. So this
program stands on both sides of the agent: `POST /run` gets an episode from the run and hands it to
the agent under an id of its own, and as the agent's model server it hands a request under that id
on to that episode's endpoint. It imports nothing of outloop and runs where NeMo-Gym does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

_MAX_BODY = 256 * 2**20
_NOT_FINAL = frozenset({408, 409, 429})
_AGENTS_KINDS = frozenset({"timeout_exceeded"})
"""Kinds of failure that say what the agent did; all others are no result."""
_ID_IS_MISSING = (
    "a model request came without a rollout id; set observability_enabled=true in NeMo-Gym's "
    "configuration (0.5 and later), and let its agents alone use this model server"
)


@dataclass
class _Rollout:
    """An episode that the agent plays."""

    base_url: str
    api_key: str
    model: str
    num_calls: int = 0
    num_in_flight: int = 0
    refusal: str = ""
    """The last sentence by which the router refused a request for good."""
    quiet_since: float = field(default_factory=time.monotonic)
    """When the agent last waited for no answer of the model."""


class Host:
    """The episodes that one agent server plays.

    Args:
        agent_url: base URL of the agent server, or of an environment server that relays to it.
        max_silence_s: how long the other side may go on without asking the model.
    """

    def __init__(self, agent_url: str, max_silence_s: float) -> None:
        self._agent_url = agent_url.rstrip("/")
        self._max_silence_s = max_silence_s
        self._rollouts: dict[str, _Rollout] = {}
        self._has_seen_no_id = False

    def app(self) -> web.Application:
        """The routes, and a pool of connections for as long as they are served."""
        app = web.Application(client_max_size=_MAX_BODY)
        app.cleanup_ctx.append(self._connections)
        app.router.add_get("/", self.health)
        app.router.add_post("/run", self.run)
        app.router.add_post("/ng-rollout/{rollout}/training-token-capture/v1/{path:.+}", self.ask)
        app.router.add_post("/ng-rollout/{rollout}/v1/{path:.+}", self.ask)
        app.router.add_post("/v1/{path:.+}", self.refuse)
        return app

    async def _connections(self, app: web.Application) -> AsyncIterator[None]:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        )
        yield
        await self._http.close()

    async def health(self, request: web.Request) -> web.Response:
        """What NeMo-Gym asks its servers while it starts."""
        return web.json_response({"status": "ok"})

    async def run(self, request: web.Request) -> web.Response:
        """Play one episode.

        Answers 200 with `reward` and `components`, or with `agent_failure`, a sentence, where the
        agent failed; 400 for what the user has to correct; 502 and 504 where anything else failed,
        which is no result.
        """
        body = await request.json()
        if missing := [name for name in ("row", "base_url", "api_key") if not body.get(name)]:
            return _error(400, f"{missing[0]} is missing")
        rollout = _Rollout(
            base_url=body["base_url"].rstrip("/"),
            api_key=body["api_key"],
            model=body.get("model", "policy"),
        )
        rollout_id = secrets.token_hex(16)
        self._rollouts[rollout_id] = rollout
        playing = asyncio.ensure_future(self._play(_asked(body["row"], rollout_id)))
        try:
            if not await self._is_over(playing, rollout):
                return _error(
                    504,
                    f"{self._agent_url} asked nothing of the model and gave no result for "
                    f"--max-silence-s={self._max_silence_s:g}",
                )
            status, text = playing.result()
        except (aiohttp.ClientError, ConnectionError) as error:
            return _error(502, f"{self._agent_url}: {type(error).__name__}: {error}")
        finally:
            del self._rollouts[rollout_id]
            # Whoever leaves, the run at its deadline or this program, ends the agent's work.
            playing.cancel()
        if status == 200:
            return _verdict(text, rollout.refusal)
        if rollout.refusal:
            return web.json_response({"agent_failure": rollout.refusal})
        if self._has_seen_no_id and not rollout.num_calls:
            return _error(400, _ID_IS_MISSING)
        if 400 <= status < 500 and status not in _NOT_FINAL:
            return _error(400, f"{self._agent_url}/run refused the row: status={status}: {text}")
        return _error(502, f"{self._agent_url}/run: status={status}: {text}")

    async def _play(self, row: dict[str, Any]) -> tuple[int, str]:
        async with self._http.post(f"{self._agent_url}/run", json=row) as answer:
            return answer.status, await answer.text()

    async def _is_over(self, playing: asyncio.Future[Any], rollout: _Rollout) -> bool:
        """Wait for the end; False when nothing was asked of the model for too long."""
        while True:
            left = self._max_silence_s
            if not rollout.num_in_flight:
                left -= time.monotonic() - rollout.quiet_since
            if left <= 0:
                return playing.done()
            await asyncio.wait({playing}, timeout=left)
            if playing.done():
                return True

    async def ask(self, request: web.Request) -> web.StreamResponse:
        """Hand a model request on to its episode's endpoint, and the answer back as it comes."""
        rollout = self._rollouts.get(request.match_info["rollout"])
        if rollout is None:
            return _error(404, "this rollout has ended here")
        try:
            body = {"model": rollout.model, **(await request.json())}
        except (ValueError, TypeError):
            return _error(400, "the request is no JSON object")
        body["model"] = body["model"] or rollout.model
        rollout.num_calls += 1
        rollout.num_in_flight += 1
        try:
            return await self._hand_on(request, rollout, body)
        finally:
            rollout.num_in_flight -= 1
            rollout.quiet_since = time.monotonic()

    async def _hand_on(
        self, request: web.Request, rollout: _Rollout, body: dict[str, Any]
    ) -> web.StreamResponse:
        url = f"{rollout.base_url}/{request.match_info['path']}"
        headers = {"Authorization": f"Bearer {rollout.api_key}"}
        try:
            async with self._http.post(url, json=body, headers=headers) as found:
                if 400 <= found.status < 500 and found.status not in _NOT_FINAL:
                    rollout.refusal = f"status={found.status}: {(await found.text())[:1000]}"
                answer = web.StreamResponse(
                    status=found.status, headers={"Content-Type": found.headers["Content-Type"]}
                )
                await answer.prepare(request)
                async for chunk in found.content.iter_any():
                    await answer.write(chunk)
        except (aiohttp.ClientError, ConnectionError) as error:
            return _error(502, f"{url}: {type(error).__name__}: {error}")
        await answer.write_eof()
        return answer

    async def refuse(self, request: web.Request) -> web.Response:
        """A model request that names no rollout could be any episode's."""
        self._has_seen_no_id = True
        return _error(400, _ID_IS_MISSING)


def _asked(row: dict[str, Any], rollout_id: str) -> dict[str, Any]:
    """What `/run` gets: an agent server takes a row, an environment server an episode."""
    if isinstance(row.get("task_id"), dict) and "task_input" in row:
        task = {"task_id": row["task_id"], "task_input": row["task_input"]}
        return {"episode_id": {"rollout_id": rollout_id, "attempt": 0}, "task": task}
    return {**row, "_ng_rollout_id": rollout_id}


def _verdict(text: str, refusal: str) -> web.Response:
    """What an answer comes to. Where it tells of a failure, its reward of zero is none."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if isinstance(found, dict) and isinstance(found.get("failure"), dict):
        found = {"failure_kind": "failed", **found["failure"]}
    elif isinstance(found, dict) and isinstance(found.get("result"), dict):
        found = found["result"]
    if not isinstance(found, dict):
        return _error(502, f"the agent's answer is no JSON object: {text}")
    instance = found.get("instance_config")
    is_masked = found.get("mask_sample") or (
        isinstance(instance, dict) and instance.get("mask_sample")
    )
    kind = found.get("_ng_failure_class") or found.get("failure_kind")
    if kind or is_masked or found.get("_ng_no_persist"):
        reason = found.get("_ng_failure_message") or found.get("failure_reason") or ""
        sentence = f"{kind or 'the sample is masked'}: {reason}"
        if refusal or kind in _AGENTS_KINDS:
            return web.json_response({"agent_failure": refusal or sentence})
        return _error(502, f"no result: {sentence}")
    if found.get("verification_skipped"):
        return _error(400, "the agent is configured to skip verification, so nothing is measured")
    reward, components = found.get("reward"), found.get("reward_components") or {}
    if not _is_number(reward):
        return _error(502, f"reward={reward!r} is no finite number")
    return web.json_response({"reward": reward, "components": components})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _error(status: int, sentence: str) -> web.Response:
    return web.json_response({"error": sentence[:2000]}, status=status)


async def _serve(host: Host, address: str, port: int) -> None:
    # A client that leaves, at its deadline, ends the episode.
    runner = web.AppRunner(host.app(), handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, address, port).start()
    bound = runner.addresses[0]
    sys.stdout.write(json.dumps({"url": f"http://{bound[0]}:{bound[1]}"}) + "\n")
    sys.stdout.flush()
    try:
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def _configured() -> list[str]:
    """Options that stand in NeMo-Gym's configuration, if this is one of its servers."""
    name = os.environ.get("NEMO_GYM_CONFIG_PATH")
    if name is None:
        return []
    import yaml

    servers = yaml.safe_load(os.environ["NEMO_GYM_CONFIG_DICT"])

    def server(name: str) -> dict[str, Any]:
        for programs in servers.get(name, {}).values():
            return dict(next(iter(programs.values())))
        raise SystemExit(f"agent={name!r} is no server of NeMo-Gym's configuration")

    own = server(name)
    agent = server(str(own.get("agent")))
    silence = {"--max-silence-s": own["max_silence_s"]} if "max_silence_s" in own else {}
    options = {
        "--agent": f"http://{agent['host']}:{agent['port']}",
        "--host": own["host"],
        "--port": own["port"],
    }
    return [str(part) for pair in (options | silence).items() for part in pair]


def main() -> None:
    """Serve the agent that the command line names."""
    parser = argparse.ArgumentParser(description="Play NeMo-Gym's tasks for an outloop run.")
    parser.add_argument("--agent", required=True, help="base URL of the agent server")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address; it asks for no key, so keep it private"
    )
    parser.add_argument("--port", type=int, default=0, help="0: any free one, which it prints")
    parser.add_argument(
        "--max-silence-s",
        type=float,
        default=120.0,
        help="an episode whose agent asks nothing of the model for so long is no result; keep it "
        "below env.episode_deadline_s",
    )
    options = parser.parse_args([*_configured(), *sys.argv[1:]])
    asyncio.run(_serve(Host(options.agent, options.max_silence_s), options.host, options.port))


if __name__ == "__main__":
    main()
