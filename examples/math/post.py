"""The same problems, played and recorded by a program of its own, which posts whole trajectories.

    outloop train examples/math/run.toml --set env.num_runners=0 --set router.port=8017
    python examples/math/post.py runs/math http://127.0.0.1:8017

No episode speaks to the router: this program renders its prompts itself, asks the inference servers
for tokens, and keeps what they answer. What it claims and posts is admitted, grouped and trained as
episodes of a runner are.
"""

import argparse
import asyncio
import contextlib
import json
import uuid
from pathlib import Path

import aiohttp
from agent import SYSTEM_PROMPT
from tasks import eval_tasks, train_tasks
from tokenizers import Tokenizer
from verifier import verify

import outloop
from outloop.buffer.records import Task
from outloop.buffer.run import load_run
from outloop.envs.verifiers.result import Result

PROMPT = (
    "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
NUM_AT_ONCE = 32
AWAY_S = 0.5


class RunOver(Exception):
    """The run has ended, and its router with it."""


class Player:
    """Plays claims against the run's servers."""

    def __init__(self, folder: Path, router_url: str, http: aiohttp.ClientSession) -> None:
        self._run = load_run(folder)
        self._launched = outloop.Run(folder)
        self._router_url = router_url
        self._http = http
        self._tokenizer = Tokenizer.from_file(str(self._run.settings.model.path / "tokenizer.json"))

    async def request(self, method: str, path: str, key: str, body: dict | None = None) -> dict:
        """Ask the router. 503 is "not now", as is a router that is away while the run is up: every
        request may be repeated.

        Raises:
            RunOver: the run has ended meanwhile.
        """
        url, headers = self._router_url + path, {"Authorization": f"Bearer {key}"}
        while True:
            is_up = self._launched.is_up
            try:
                async with self._http.request(method, url, json=body, headers=headers) as answer:
                    if answer.status != 503:
                        answer.raise_for_status()
                        return await answer.json()
                    wait_s = float(answer.headers.get("Retry-After", 1))
            except aiohttp.ClientConnectionError as error:
                if not is_up:
                    raise RunOver from error
                wait_s = AWAY_S
            await asyncio.sleep(wait_s)

    async def post(self, path: str, body: dict) -> dict:
        """As a runner."""
        return await self.request("POST", path, self._run.keys.runner_key, body)

    async def servers(self) -> list[str]:
        """Servers that hold published weights."""
        found = (await self.request("GET", "/servers", self._run.keys.admin_key))["servers"]
        return [one["url"] for one in found if not one["is_quarantined"]]

    async def play(self, claim: dict, server: str) -> dict:
        """The trajectory of one claim; a server that fails is no result of the policy."""
        episode_id, payload = claim["episode"]["episode_id"], claim["task"]["payload"]
        try:
            turn, text = await self.ask(payload["question"], claim["sampling"], server)
        except aiohttp.ClientError as error:
            failure = {"failure_kind": "infrastructure", "error": f"{server}: {error!r}"}
            return {"episode_id": episode_id, "turns": [], "outcome": "aborted", **failure}
        task = Task(task_id=claim["task"]["task_id"], payload=payload)
        reward = await verify(task, Result(answer=text))
        return {"episode_id": episode_id, "turns": [turn], "reward": {"value": reward}}

    async def ask(self, question: str, own: dict | None, server: str) -> tuple[dict, str]:
        """A turn as it is posted, and the answer's text."""
        settings = self._run.settings.sampling
        in_force = {
            "temperature": settings.temperature,
            "max_new_tokens": settings.max_new_tokens,
            **(own or {}),
        }
        prompt = PROMPT.format(system=SYSTEM_PROMPT, question=question)
        prompt_ids = self._tokenizer.encode(prompt, add_special_tokens=False).ids
        stop = self._tokenizer.token_to_id("<|im_end|>")
        body = {
            "input_ids": prompt_ids,
            "sampling_params": {**in_force, "stop_token_ids": [stop]},
            "return_logprob": True,
        }
        headers = {"Authorization": f"Bearer {self._run.server_key}"}
        async with self._http.post(f"{server}/generate", json=body, headers=headers) as answer:
            answer.raise_for_status()
            generated = await answer.json()
        meta = generated["meta_info"]
        spans = meta.get("weight_versions") or [
            {"version": meta["weight_version"], "start": 0, "end": len(generated["output_ids"])}
        ]
        turn = {
            "prompt_ids": prompt_ids,
            "output_ids": generated["output_ids"],
            "behavior_logprobs": [logprob for logprob, *_ in meta["output_token_logprobs"]],
            "version_spans": [[int(s["version"]), s["start"], s["end"]] for s in spans],
            "sampling": in_force,
            "finish_reason": meta["finish_reason"]["type"],
        }
        return turn, self._tokenizer.decode(generated["output_ids"])


def numbered(name: str, rows: list[dict]) -> list[dict]:
    """Tasks with ids."""
    return [{"task_id": f"{name}-{number}", "payload": row} for number, row in enumerate(rows)]


async def main() -> None:
    parser = argparse.ArgumentParser(description="Play a run's problems and post them.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("router_url")
    options = parser.parse_args()
    num_posted = num_counted = 0
    async with aiohttp.ClientSession() as http:
        player = Player(options.folder, options.router_url, http)
        every = {
            "tasks": numbered("train", train_tasks()),
            "eval_tasks": numbered("eval", eval_tasks()),
        }
        with contextlib.suppress(RunOver):
            await player.post("/tasks", every)
            while True:
                claimed = await player.post(
                    "/tasks/claim", {"key": uuid.uuid4().hex, "count": NUM_AT_ONCE, "open": True}
                )
                if claimed["reason"] == "finished":
                    break
                if claimed["claims"]:
                    servers = await player.servers()
                    played = await asyncio.gather(
                        *(
                            player.play(claim, servers[number % len(servers)])
                            for number, claim in enumerate(claimed["claims"])
                        )
                    )
                    answer = await player.post("/trajectories", {"trajectories": played})
                    num_posted += len(played)
                    num_counted += answer["num_accepted"]
                await asyncio.sleep(claimed["retry_after_s"])
    await verify.tear_down()
    print(json.dumps({"posted": num_posted, "counted": num_counted}))


if __name__ == "__main__":
    asyncio.run(main())
