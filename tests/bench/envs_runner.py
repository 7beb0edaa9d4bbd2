"""The runner's part of `make bench-envs`: 2,000 episodes at once in one runner.

`episodes_lost`: claimed and not closed as completed, in both runs. `cpu_ms_per_turn`: CPU time of
the runner and its workers, start-up and imports included, per turn of agents that wait where others
would call the model: what the runner itself costs. Beside it, not in it: the same with agents that
call a mock model by their `openai` client (`with_client_cpu_ms_per_turn`), and that client alone,
as many calls at once per process, without a runner (`client_cpu_ms_per_turn`). The mock is another
process and answers after a while, so that all episodes are open at the same time (`most_open`).
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from figures import say
from rich.console import Console
from rich.table import Table

from outloop.envs.rollout.clients import Clients

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "runs/bench/envs.json"
MOCK = ROOT / "tests/fakes/control_router.py"
NUM_AT_ONCE = 2000
NUM_EPISODES = 3000
TURNS_PER_EPISODE = 2
NUM_WORKERS = 2
NUM_PER_PROCESS = NUM_AT_ONCE // NUM_WORKERS
ANSWER_AFTER_S = 20.0
DEADLINE_S = 900.0
TARGETS = {"episodes_lost": "0", "cpu_ms_per_turn": "< 5", "most_open": f">= {NUM_AT_ONCE}"}
CALLS = f"""
MESSAGES = [{{"role": "user", "content": "12*7"}}]


async def play(task, episode):
    for _ in range({TURNS_PER_EPISODE}):
        await episode.client.chat.completions.create(model="policy", messages=MESSAGES)
    return 1.0
"""
WAITS = f"""
import asyncio


async def play(task, episode):
    for _ in range({TURNS_PER_EPISODE}):
        await asyncio.sleep({ANSWER_AFTER_S})
    return 1.0
"""
TASKS = """

def tasks():
    return [{"question": str(number)} for number in range(50)]
"""
RUN = """
import asyncio, json, resource, sys
import uvloop
from outloop.buffer.settings import build_settings
from outloop.envs.runner.runner import run

settings = build_settings(json.loads(sys.argv[1]), source="bench")


async def main():
    await run(settings, router_url=sys.argv[2], runner_key=sys.argv[3], stop=asyncio.Event())


uvloop.run(main())
used = {}
for name, who in (("runner", resource.RUSAGE_SELF), ("workers", resource.RUSAGE_CHILDREN)):
    usage = resource.getrusage(who)
    used[name] = usage.ru_utime + usage.ru_stime
print(json.dumps(used))
"""


@contextmanager
def mock_model() -> Iterator[dict[str, str]]:
    """The mock router and model, for as long as they are needed."""
    words = ("--num-episodes", NUM_EPISODES, "--deadline-s", DEADLINE_S)
    answer = ("--chat-delay-s", ANSWER_AFTER_S)
    command = [sys.executable, str(MOCK), *map(str, (*words, *answer))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.terminate()


def play_all(facts: dict[str, str], source: str) -> dict[str, float]:
    """Play every episode by a runner in a process of its own; CPU seconds of it and its workers."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "user.py").write_text(source + TASKS)
        settings = {
            "model": {"path": folder},
            "env": {
                "tasks": "user:tasks",
                "rollout_function_path": "user:play",
                "import_dir": folder,
                "max_concurrent_episodes": NUM_AT_ONCE,
                "num_workers": NUM_WORKERS,
                "episode_deadline_s": DEADLINE_S,
                "max_stall_s": 300.0,
            },
        }
        answer = subprocess.run(
            [sys.executable, "-c", RUN, json.dumps(settings), facts["url"], facts["runner_key"]],
            capture_output=True,
            text=True,
            check=True,
            cwd=folder,
            timeout=3600,
        )
    return json.loads(answer.stdout.strip().splitlines()[-1])


async def call_alone(url: str) -> float:
    """CPU seconds per model call of the agent's client alone, with as many calls in flight."""
    clients = Clients(max_connections=2 * NUM_PER_PROCESS + 16, timeout_s=DEADLINE_S)
    messages = [{"role": "user", "content": "12*7"}]

    async def play(number: int) -> None:
        name = f"alone-{number}"
        client = clients.openai(f"{url}/episodes/{name}/v1", f"ol-ep-{name}-signature")
        for _ in range(TURNS_PER_EPISODE):
            await client.chat.completions.create(model="policy", messages=messages)

    # Imports are the client's once, not per call; the first call pays them.
    await play(-1)
    before = time.process_time()
    await asyncio.gather(*map(play, range(NUM_PER_PROCESS)))
    used_s = time.process_time() - before
    await clients.close()
    return used_s / (NUM_PER_PROCESS * TURNS_PER_EPISODE)


def measure() -> dict[str, float]:
    """The figures."""
    import uvloop

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    used, seen, client_s = {}, {}, 0.0
    for name, source in (("waits", WAITS), ("calls", CALLS)):
        say(f"{NUM_EPISODES} episodes, whose agent {name}")
        with mock_model() as facts:
            used[name] = play_all(facts, source)
            with urllib.request.urlopen(f"{facts['url']}/seen") as answer:
                seen[name] = json.load(answer)
            if name == "calls":
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    client_s = runner.run(call_alone(facts["url"]))
    ms = 1000 / (NUM_EPISODES * TURNS_PER_EPISODE)
    return {
        "episodes_lost": sum(
            one["num_claimed"] - one["outcomes"].get("completed", 0) for one in seen.values()
        ),
        "most_open": min(one["most_open"] for one in seen.values()),
        "cpu_ms_per_turn": ms * sum(used["waits"].values()),
        "runner_process_cpu_ms_per_turn": ms * used["waits"]["runner"],
        "with_client_cpu_ms_per_turn": ms * sum(used["calls"].values()),
        "client_cpu_ms_per_turn": 1000 * client_s,
    }


def main() -> None:
    """Measure, add to the file, print the table."""
    load = os.getloadavg()[0]
    figures = measure()
    earlier = json.loads(OUT.read_text()) if OUT.exists() else {}
    report = {
        "name": "envs",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {sys.version.split()[0]}",
        **earlier,
        "figures": earlier.get("figures", {}) | figures,
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(report, indent=2) + "\n")
    title = f"the runner, {report['machine']}, load {load:.1f}"
    table = Table(title=title, title_justify="left")
    for column in ("figure", "value", "target"):
        table.add_column(column)
    for name, value in figures.items():
        table.add_row(name, f"{value:.4g}", TARGETS.get(name, ""))
    Console().print(table)


if __name__ == "__main__":
    main()
