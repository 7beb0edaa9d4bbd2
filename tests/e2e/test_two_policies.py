"""Two policies that learn against each other: two runs, each the other's upstream."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fakes import user_folder
from fakes.ports import free_ports
from outloop.buffer.trajectories.query import query

ROLLOUT = '''
import asyncio
from pathlib import Path


async def play(task, episode):
    """Whoever says the longer thing wins. Once somebody has met nobody, games wait: each fails
    once at most, however long the other stays away."""
    while not Path("both").exists() or (Path("away").exists() and not Path("back").exists()):
        await asyncio.sleep(0.05)
    lengths = []
    for model in ("policy", "other"):
        try:
            answer = await episode.client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": task.payload["question"]}]
            )
        except Exception:
            # The first run is over.
            if Path("runs/a/hf/model.safetensors").exists():
                Path("away").touch()
            raise
        lengths.append(len(answer.choices[0].message.content or ""))
    return float(lengths[0] > lengths[1])
'''
SETTINGS = """
[run]
name = "{name}"

[model]
path = "policy-{name}"
renderer = "qwen3"
renderer_options = {{ enable_thinking = false }}
max_context_tokens = 256

[env]
rollout_function_path = "rollout:play"
tasks = "tasks.jsonl"
max_concurrent_episodes = 12
episode_deadline_s = 120

[sampling]
max_new_tokens = 8

[buffer]
group_size = 4
drop_zero_signal = false

[router]
port = {port}
unkeyed = "serve"

[router.upstreams.other]
base_url = "http://127.0.0.1:{other_port}/v1"
model = "policy"

[trainer]
num_steps = {num_steps}
groups_per_step = 3
"""
STEPS = {"a": 2, "b": 40}
pytestmark = pytest.mark.e2e


def wait_for(what: str, is_true: Callable[[], bool]) -> None:
    """Return when it is true."""
    deadline = time.monotonic() + 120
    while not is_true():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.1)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """`start("train", ...)`: a command in the folder of both runs; its output is in a file."""
    started: list[subprocess.Popen[str]] = []

    def run(name: str, *words: str) -> "subprocess.Popen[str]":
        process = user_folder.start(tmp_path, *words, log=tmp_path / f"{name}.log")
        started.append(process)
        return process

    yield run
    for process in started:
        process.terminate()
    for process in started:
        process.wait(60)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_runs_train_against_each_other(
    tmp_path: Path, start: Callable[..., "subprocess.Popen[str]"]
) -> None:
    """Each trains its own turns alone; the other's answers are context. When one has ended, its
    weights are served under its address, and the other goes on: what met nobody meanwhile is played
    again, and every attempt is trained once."""
    ports = dict(zip(STEPS, free_ports(2), strict=True))
    (tmp_path / "rollout.py").write_text(ROLLOUT)
    tasks = "".join(json.dumps({"question": f"{n} + 1"}) + "\n" for n in range(40))
    (tmp_path / "tasks.jsonl").write_text(tasks)
    for name, other in (("a", "b"), ("b", "a")):
        text = SETTINGS.format(
            name=name, port=ports[name], other_port=ports[other], num_steps=STEPS[name]
        )
        (tmp_path / f"{name}.toml").write_text(text)
        seed = str(list(STEPS).index(name))
        made = start(f"policy-{name}", "new-policy", "--out", f"policy-{name}", "--seed", seed)
        assert made.wait(60) == 0
    runs = {name: start(name, "train", f"{name}.toml") for name in STEPS}
    routers = [tmp_path / f"runs/{name}/logs/router-0.log" for name in STEPS]
    wait_for(
        "both routers",
        lambda: all(log.exists() and "part_ready" in log.read_text() for log in routers),
    )
    (tmp_path / "both").touch()
    assert runs["a"].wait(200) == 0, (tmp_path / "a.log").read_text()
    after = ['run.name="a-served"', 'model.path="runs/a/hf"']
    start("served", "serve", "a.toml", *(word for one in after for word in ("--set", one)))
    wait_for("the served weights", lambda: "base_url" in (tmp_path / "served.log").read_text())
    (tmp_path / "back").touch()
    assert runs["b"].wait(200) == 0, (tmp_path / "b.log").read_text()
    for name, num_steps in STEPS.items():
        rows = [
            json.loads(line)
            for line in (tmp_path / f"runs/{name}/metrics.jsonl").read_text().splitlines()
        ]
        steps = [row for row in rows if "train/loss" in row]
        assert [row["train/episodes"] for row in steps] == [12] * num_steps
        assert all(row["train/failed_share"] == 0 for row in steps)
        assert steps[-1]["buffer/ledger/replaced"] == 0
        trained = query(
            tmp_path / f"runs/{name}/trajectories",
            "SELECT max(num_turns) AS most, min(num_turns) AS least, count(*) AS number "
            "FROM episodes WHERE fate = 'trained'",
        )
        assert trained == [{"most": 1, "least": 1, "number": 12 * num_steps}]
