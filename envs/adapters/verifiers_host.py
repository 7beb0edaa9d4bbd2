"""Serves a verifiers environment over HTTP, so that `remote_episodes` plays it.

    VENV/bin/python PATH/TO/verifiers_host.py gsm8k-v1 --port 9000
    VENV/bin/python PATH/TO/verifiers_host.py --config env.toml

It runs in an environment of its own, with `verifiers` and the environment installed: their pins
contradict ours, and nothing of outloop is imported here. `POST /run` plays one episode against the
endpoint that the request names; `GET /tasks` says how many tasks there are.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import secrets
import sys
import tomllib
from pathlib import Path
from typing import Any

from aiohttp import web

_AGENT_ERRORS = frozenset({"HarnessError"})
"""The agent's program ended badly, which may be what the policy did."""
_MAX_TASKS = 1_000_000


class Host:
    """One verifiers environment, its tasks in memory."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._tasks = list(itertools.islice(env.taskset, _MAX_TASKS))

    async def tasks(self, request: web.Request) -> web.Response:
        """The number of tasks; `POST /run` names one by its index."""
        return web.json_response({"num_tasks": len(self._tasks)})

    async def run(self, request: web.Request) -> web.Response:
        """Play one episode.

        Answers 200 with `reward` and `components`, or with `agent_failure`, a sentence, where the
        agent failed or ran out of time; 400 for a request that names no task; 502 where anything
        else failed, which is no result.
        """
        body = await request.json()
        index = body.get("index")
        if not isinstance(index, int) or not 0 <= index < len(self._tasks):
            return _error(400, f"index={index!r}; 0 to {len(self._tasks) - 1} is allowed")
        if missing := [name for name in ("base_url", "api_key") if not body.get(name)]:
            return _error(400, f"{missing[0]} is missing")
        # Its client reads the key from a variable; a name with API_KEY in it reaches no program.
        variable = f"EPISODE_API_KEY_{secrets.token_hex(8)}"
        os.environ[variable] = body["api_key"]
        try:
            episode = await self._play(self._tasks[index], body, variable)
        finally:
            del os.environ[variable]
        return _answer(episode)

    async def _play(self, task: Any, body: dict[str, Any], variable: str) -> Any:
        import verifiers.v1 as vf
        from verifiers.v1.types import SamplingConfig

        context = vf.ModelContext(
            client=vf.EvalClientConfig(base_url=body["base_url"], api_key_var=variable),
            model=body.get("model", "policy"),
            sampling=SamplingConfig(),
        )
        (slot,) = self._env.slots(task)
        return await self._env.run_slot(slot, context)


def _answer(episode: Any) -> web.Response:
    """What an episode comes to."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    is_late = episode.is_timeout or any(trace.is_timeout for trace in episode.traces)
    if is_late or (errors and all(map(_is_agents, errors))):
        reason = "; ".join(f"{error.type}: {error.message}" for error in errors)
        return web.json_response({"agent_failure": reason or "it ran out of time"})
    if errors or not episode.ok:
        reason = "; ".join(f"{error.type}: {error.message}" for error in errors)
        return _error(502, reason or "the episode ended without a verdict")
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if len(trained) != 1:
        return _error(400, f"{len(trained)} trained agents; environments with one are played")
    (trace,) = trained
    components = {name: one.score for name, one in trace.rewards.items() if one is not None}
    return web.json_response({"reward": trace.reward, "components": components})


def _is_agents(error: Any) -> bool:
    """A program that failed, or a request refused for good: a spent budget, for example."""
    if error.type == "ProviderError":
        return error.status_code is not None and 400 <= error.status_code < 500
    return error.type in _AGENT_ERRORS


def _error(status: int, sentence: str) -> web.Response:
    return web.json_response({"error": sentence[:2000]}, status=status)


async def _serve(env: Any, address: str, port: int) -> None:
    host = Host(env)
    app = web.Application()
    app.router.add_get("/tasks", host.tasks)
    app.router.add_post("/run", host.run)
    # A client that leaves, at its deadline, ends the episode.
    runner = web.AppRunner(app, handler_cancellation=True)
    async with env.serving():
        await runner.setup()
        site = web.TCPSite(runner, address, port)
        await site.start()
        bound = runner.addresses[0]
        sys.stdout.write(json.dumps({"url": f"http://{bound[0]}:{bound[1]}"}) + "\n")
        sys.stdout.flush()
        try:
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()


def main() -> None:
    """Load the environment that the command line names, and serve it."""
    parser = argparse.ArgumentParser(description="Serve a verifiers environment over HTTP.")
    parser.add_argument("taskset", nargs="?", help="id of an installed taskset")
    parser.add_argument("--config", type=Path, help="TOML with what verifiers calls [env]")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address; it asks for no key, so keep it private"
    )
    parser.add_argument("--port", type=int, default=0, help="0: any free one, which it prints")
    options = parser.parse_args()

    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    tree = tomllib.loads(options.config.read_text()) if options.config else {}
    tree = tree.get("env", tree)
    if options.taskset:
        tree["taskset"] = {**tree.get("taskset", {}), "id": options.taskset}
    env = load_environment(resolve_env_config(tree))
    asyncio.run(_serve(env, options.host, options.port))


if __name__ == "__main__":
    main()
