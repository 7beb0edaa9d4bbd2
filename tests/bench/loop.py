"""`make bench-loop`: what the loop itself costs beside model work and the agent's own client.

Runs the calculator's RL phase and, in the same run, the same agent against a trivial local
endpoint, so that what the agent and its client cost can be taken out of the runner's CPU. Prints a
table and writes runs/bench/loop.json.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import uvicorn
from cpu_usage import CpuUsage
from figures import OUT, say, tell

from outloop.envs.rollout.clients import Clients

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fakes.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
OWN_PARTS = {"router", "redis", "runner", "launcher"}
NUM_STEPS = 20
NUM_AGENT_EPISODES = 1280
AGENT_CONCURRENCY = 128
SAMPLE_S = 0.25
LATENCY_S = 0.3
"""Of the trivial endpoint, about what a turn takes in the run: as many calls are in flight."""
CALL = {
    "id": "call_0",
    "type": "function",
    "function": {"name": "calculator", "arguments": '{"expression": "12*7"}'},
}


def completion(message: dict[str, object], finish_reason: str) -> bytes:
    """A chat completion as the router would answer it."""
    choice = {"index": 0, "finish_reason": finish_reason, "message": message}
    usage = {"prompt_tokens": 60, "completion_tokens": 15, "total_tokens": 75}
    return json.dumps(
        {
            "id": "chatcmpl-0",
            "object": "chat.completion",
            "created": 0,
            "model": "policy",
            "choices": [choice],
            "usage": usage,
        }
    ).encode()


FIRST_ANSWER = completion(
    {"role": "assistant", "content": None, "tool_calls": [CALL]}, "tool_calls"
)
SECOND_ANSWER = completion({"role": "assistant", "content": "84"}, "stop")
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, object]], Awaitable[None]]


async def trivial_endpoint(scope: dict[str, object], receive: Receive, send: Send) -> None:
    """Answer the first turn of an episode with a tool call and the second with a number."""
    if scope["type"] != "http":
        return
    body = b""
    while True:
        part = await receive()
        body += part.get("body", b"")
        if not part.get("more_body"):
            break
    await asyncio.sleep(LATENCY_S)
    answer = SECOND_ANSWER if b'"tool_call_id"' in body else FIRST_ANSWER
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


def serve_trivially(port: int) -> None:
    """Run the trivial endpoint until killed."""
    uvicorn.run(trivial_endpoint, host="127.0.0.1", port=port, log_level="warning")  # type: ignore[arg-type]


def agent_cpu_per_turn() -> float:
    """CPU seconds that the agent and its openai client take per turn, against no work at all."""
    (port,) = free_ports(1)
    server = subprocess.Popen([sys.executable, __file__, "--serve-trivially", str(port)])
    try:
        return asyncio.run(_measure_agent(f"http://127.0.0.1:{port}/v1"))
    finally:
        server.kill()
        server.wait()


async def _measure_agent(base_url: str) -> float:
    sys.path.insert(0, str(ROOT / "examples" / "calculator"))
    from agent import solve

    shared = Clients(max_connections=2 * AGENT_CONCURRENCY + 16, timeout_s=60.0)

    async def worker(num_episodes: int) -> None:
        for _ in range(num_episodes):
            assert await solve("12*7", shared.openai(base_url, "key")) == "84"

    await worker(4)
    share = NUM_AGENT_EPISODES // AGENT_CONCURRENCY
    before = time.process_time()
    await asyncio.gather(*(worker(share) for _ in range(AGENT_CONCURRENCY)))
    spent = time.process_time() - before
    await shared.close()
    return spent / (2 * share * AGENT_CONCURRENCY)


def train(config: str, **settings: object) -> CpuUsage:
    """Run `outloop train` on one of the calculator's configurations; return its CPU time."""
    flags = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in settings.items()]
    command = [sys.executable, "-m", "outloop.cli", "train", f"examples/calculator/{config}"]
    command += [part for flag in flags for part in ("--set", flag)]
    usage, metrics = CpuUsage(), OUT / "loop" / str(settings["run__name"]) / "metrics.jsonl"
    with subprocess.Popen(command, cwd=ROOT) as process:
        launcher = psutil.Process(process.pid)
        while process.poll() is None:
            usage.sample(launcher)
            if metrics.is_file() and "train/loss" in metrics.read_text():
                usage.mark("first_step")
            time.sleep(SAMPLE_S)
    if process.returncode != 0:
        raise RuntimeError(f"outloop train {config} ended with exit code {process.returncode}")
    usage.mark("end")
    return usage


def run_demo_phase() -> tuple[Path, CpuUsage]:
    """Make the demo's warm start and the first steps of its RL phase; return the folder of it."""
    shutil.rmtree(OUT / "loop", ignore_errors=True)
    model = OUT / "loop" / "policy"
    command = [sys.executable, "-m", "outloop.cli", "new-policy", "--out", str(model)]
    command += ["--conversations", "tasks:conversations", "--import-dir", "examples/calculator"]
    subprocess.run(command, cwd=ROOT, check=True)
    place = {"run__dir": str(OUT / "loop")}
    train("warm_start.toml", run__name="warm-start", model__path=str(model), **place)
    usage = train(
        "run.toml",
        run__name="rl",
        model__path=str(OUT / "loop" / "warm-start" / "hf"),
        trainer__num_steps=NUM_STEPS,
        eval__every=0,
        **place,
    )
    return OUT / "loop" / "rl", usage


def main() -> None:
    """Measure, print, write."""
    OUT.mkdir(parents=True, exist_ok=True)
    say("the agent and its client alone")
    per_turn_s = agent_cpu_per_turn()
    say("a warm start and the demo's RL phase")
    run_dir, usage = run_demo_phase()
    first, end = usage.marks()["first_step"], usage.marks()["end"]
    spent = {name: end[name] - first.get(name, 0.0) for name in end if name != "wall"}
    wall_s = end["wall"] - first["wall"]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/loss" in row][1:]
    num_turns = sum(row["train/episodes"] * row["train/turns_per_episode"] for row in steps)
    num_tokens = sum(row["train/tokens"] for row in steps)
    agent_s = num_turns * per_turn_s
    ours = sum(s for name, s in spent.items() if name.split("-")[0] in OWN_PARTS)
    total = sum(spent.values())
    figures = {
        "overhead_share": (ours - agent_s) / total,
        "overhead_ms_per_turn": 1000 * (ours - agent_s) / num_turns,
        "agent_ms_per_turn": 1000 * per_turn_s,
        "requests_per_s": num_turns / wall_s,
        "tokens_per_s": num_tokens / wall_s,
        **{f"cpu_share_{name}": seconds / total for name, seconds in spent.items()},
    }
    tell("loop", figures)


if __name__ == "__main__":
    if "--serve-trivially" in sys.argv:
        serve_trivially(int(sys.argv[-1]))
    else:
        main()
