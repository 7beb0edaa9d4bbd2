"""Two policies that learn against each other: two runs, each the other's upstream."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from outloop.buffer.trajectories.query import query

ROLLOUT = '''
async def play(task, episode):
    """Whoever says the longer thing wins."""
    lengths = []
    for model in ("policy", "other"):
        answer = await episode.client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": task.payload["question"]}]
        )
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


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """`start("train", ...)`: a command in the folder of both runs; its output is in a file."""
    started: list[subprocess.Popen[str]] = []

    def run(name: str, *words: str) -> "subprocess.Popen[str]":
        with (tmp_path / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "outloop.cli", *words],
                cwd=tmp_path,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        started.append(process)
        return process

    yield run
    for process in started:
        process.terminate()
    for process in started:
        process.wait(60)


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
        seed = str(ports[name])
        made = start(f"policy-{name}", "new-policy", "--out", f"policy-{name}", "--seed", seed)
        assert made.wait(60) == 0
    runs = {name: start(name, "train", f"{name}.toml") for name in STEPS}
    assert runs["a"].wait(200) == 0, (tmp_path / "a.log").read_text()
    after = ['run.name="a-served"', 'model.path="runs/a/hf"']
    start("served", "serve", "a.toml", *(word for one in after for word in ("--set", one)))
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
