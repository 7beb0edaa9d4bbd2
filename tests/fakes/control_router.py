"""A router without a policy: the control routes over a plain list, and scripted chat answers.

    python control_router.py --port 8000 --num-episodes 4

It hands out `num_episodes` attempts in turn over the registered tasks and then says "finished".
Chat requests are answered by `answer(messages)`; by default it calls the calculator once and then
repeats what the tool said. What it saw is in its attributes.
"""

import argparse
import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from aiohttp import web

RUNNER_KEY = "ol-runner-fake"
Answer = Callable[[list[dict[str, Any]]], dict[str, Any]]


def ask_calculator(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Call the tool with the question, then say what it answered."""
    if messages[-1]["role"] == "tool":
        return {"role": "assistant", "content": messages[-1]["content"]}
    arguments = json.dumps({"expression": messages[-1]["content"]})
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "calculator", "arguments": arguments},
    }
    return {"role": "assistant", "content": None, "tool_calls": [call]}


class FakeRouter:
    """State and routes; `start` binds a free port."""

    def __init__(self, *, num_episodes: int = 4, deadline_s: float = 20.0) -> None:
        self.num_episodes = num_episodes
        self.deadline_s = deadline_s
        self.max_per_claim = 1000
        self.eval_names: list[str] = []
        self.answer: Answer = ask_calculator
        self.refusals: dict[str, list[int]] = {}
        """Path prefix -> statuses to answer next, before anything else is done."""
        self.chat_status = 200
        self.chat_gate: asyncio.Event | None = None
        self.gate_opens_after: int | None = None
        """Heartbeats."""
        self.chat_delay_s = 0.0
        self.tasks: list[dict[str, Any]] = []
        self.eval_tasks: list[dict[str, Any]] = []
        self.num_registered = 0
        self.claims: list[dict[str, Any]] = []
        self.claim_keys: list[str] = []
        self.claimed_by: set[str] = set()
        self.num_finished = 0
        """Claims that were told so."""
        self.lost_claims = 0
        """So many claims are made and answered as not ready."""
        self.heartbeats: list[str] = []
        self.warnings: list[str] = []
        self.closes: dict[str, dict[str, Any]] = {}
        self.num_close_calls = 0
        self.trajectories: list[dict[str, Any]] = []
        self.trajectory_calls: dict[str, bool] = {}
        self.num_chat_calls = 0
        self.turns: Counter[str] = Counter()
        self.refused_calls: dict[str, Any] = {"counts": {}, "last": ""}
        """What every episode is said to have been refused."""
        self.counts_turns = False
        """False: every episode is said to have made a model call."""
        self.health_status = 200
        self.health_delay_s = 0.0
        self.most_open = 0
        self.url = ""
        self._next = 0
        self._answers: dict[str, dict[str, Any]] = {}
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> str:
        """Serve on `port` (0: any) and return the address."""
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_post("/tasks", self._register)
        app.router.add_post("/tasks/claim", self._claim)
        app.router.add_post("/runners/heartbeat", self._heartbeat)
        app.router.add_get("/health", self._health)
        app.router.add_get("/seen", self._seen)
        app.router.add_get("/episodes/{id}", self._read)
        app.router.add_post("/episodes/{id}/close", self._close)
        app.router.add_post("/trajectories", self._put_trajectories)
        app.router.add_post("/episodes/{id}/v1/chat/completions", self._chat)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        assert self._runner.addresses
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self.url

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def closed(self, field: str) -> list[Any]:
        """One field of every close, in the order of opening."""
        return [close[field] for close in self.closes.values()]

    def _refuse(self, request: web.Request) -> web.Response | None:
        for prefix, statuses in self.refusals.items():
            if request.path.startswith(prefix) and statuses:
                status = statuses.pop(0)
                headers = {"Retry-After": "0.05"} if status >= 500 else {}
                return _error(status, "scripted refusal", headers)
        if request.headers.get("Authorization") != f"Bearer {RUNNER_KEY}":
            return _error(401, "the runner key is needed", {})
        return None

    async def _register(self, request: web.Request) -> web.Response:
        if refusal := self._refuse(request):
            return refusal
        body = await request.json()
        self.num_registered += 1
        self.tasks, self.eval_tasks = body["tasks"], body["eval_tasks"]
        return web.json_response(
            {"num_tasks": len(self.tasks), "num_eval_tasks": len(self.eval_tasks)}
        )

    async def _claim(self, request: web.Request) -> web.Response:
        if refusal := self._refuse(request):
            return refusal
        body = await request.json()
        self.claim_keys.append(body["key"])
        self.claimed_by.add(body["runner_id"])
        if body["key"] not in self._answers:
            self._answers[body["key"]] = self._hand_out(min(body["count"], self.max_per_claim))
        if self.lost_claims:
            self.lost_claims -= 1
            return _error(503, "not_ready", {"Retry-After": "0.05"})
        return web.json_response(self._answers[body["key"]])

    async def _heartbeat(self, request: web.Request) -> web.Response:
        if refusal := self._refuse(request):
            return refusal
        body = await request.json()
        if body.get("warning"):
            self.warnings.append(body["warning"])
            return web.json_response({"max_silence_s": 20.0})
        self.heartbeats.append(body["runner_id"])
        if self.chat_gate is not None and len(self.heartbeats) == self.gate_opens_after:
            self.chat_gate.set()
        return web.json_response({"max_silence_s": 20.0})

    def _hand_out(self, count: int) -> dict[str, Any]:
        claims = []
        while len(claims) < count and self._next < self.num_episodes:
            number, self._next = self._next, self._next + 1
            eval_name = self.eval_names.pop(0) if self.eval_names else ""
            source = self.eval_tasks if eval_name else self.tasks
            episode_id = f"ep-{number}"
            claim = {
                "task": source[number % len(source)],
                "purpose": "eval" if eval_name else "train",
                "group_id": None if eval_name else f"group-{number // 4}",
                "attempt": number % 4,
                "deadline_s": self.deadline_s,
                "sampling": None,
                "eval_name": eval_name,
                "episode": {
                    "episode_id": episode_id,
                    "base_url": f"{self.url}/episodes/{episode_id}/v1",
                    "api_key": f"ol-ep-{episode_id}-signature",
                },
            }
            claims.append(claim)
        self.claims += claims
        self.most_open = max(self.most_open, len(self.claims) - len(self.closes))
        is_over = not claims and len(self.closes) >= self.num_episodes
        self.num_finished += is_over
        reason = "" if claims else ("finished" if is_over else "admission")
        return {"claims": claims, "reason": reason, "retry_after_s": 0.05}

    async def _close(self, request: web.Request) -> web.Response:
        if refusal := self._refuse(request):
            return refusal
        self.num_close_calls += 1
        self.closes.setdefault(request.match_info["id"], await request.json())
        return web.json_response({"counted": True, "sealed_group": None})

    async def _health(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.health_delay_s)
        return web.json_response({}, status=self.health_status)

    async def _seen(self, request: web.Request) -> web.Response:
        seen = {
            "num_claimed": len(self.claims),
            "outcomes": Counter(close["outcome"] for close in self.closes.values()),
            "most_open": self.most_open,
            "num_chat_calls": self.num_chat_calls,
        }
        return web.json_response(seen)

    async def _read(self, request: web.Request) -> web.Response:
        if refusal := self._refuse(request):
            return refusal
        num_turns = self.turns[request.match_info["id"]] if self.counts_turns else 1
        num_refused = sum(self.refused_calls.get("counts", {}).values())
        found = {"turns": [{}] * num_turns, "refusals": self.refused_calls}
        return web.json_response(found | {"num_calls": num_turns + num_refused})

    async def _put_trajectories(self, request: web.Request) -> web.Response:
        if refusal := self._refuse(request):
            return refusal
        body = await request.json()
        if body["key"] not in self.trajectory_calls:
            self.trajectories += body["trajectories"]
        self.trajectory_calls[body["key"]] = body["final"]
        return web.json_response({"num_accepted": len(body["trajectories"])})

    async def _chat(self, request: web.Request) -> web.Response:
        self.num_chat_calls += 1
        episode_id = request.match_info["id"]
        self.turns[episode_id] += 1
        if request.headers.get("Authorization") != f"Bearer ol-ep-{episode_id}-signature":
            return _error(401, "another episode's key", {"x-should-retry": "false"})
        if self.chat_gate is not None:
            await self.chat_gate.wait()
        await asyncio.sleep(self.chat_delay_s)
        if self.chat_status != 200:
            return _error(self.chat_status, "scripted", {"x-should-retry": "false"})
        body = await request.json()
        message = self.answer(body["messages"])
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        return web.json_response(
            {
                "id": f"chatcmpl-fake-{self.turns[episode_id]}",
                "object": "chat.completion",
                "created": 0,
                "model": body["model"],
                "choices": [{"index": 0, "message": message, "finish_reason": reason}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            }
        )


def _error(status: int, message: str, headers: dict[str, str]) -> web.Response:
    envelope = {"message": message, "type": "fake", "code": "fake", "param": None}
    return web.json_response({"error": envelope}, status=status, headers=headers)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--num-episodes", type=int, default=4)
    parser.add_argument("--deadline-s", type=float, default=20.0)
    parser.add_argument("--chat-delay-s", type=float, default=0.0)
    options = parser.parse_args()
    router = FakeRouter(num_episodes=options.num_episodes, deadline_s=options.deadline_s)
    router.chat_delay_s = options.chat_delay_s
    facts = {"url": await router.start(options.port), "runner_key": RUNNER_KEY}
    print(json.dumps(facts), flush=True)
    for _ in itertools.repeat(None):
        await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(main())
