"""A node's worth of processes from one config: two servers of TP2, a trainer of TP2 x DP2, router,
runner; with devices of their own, and sharing them. Each part is killed once; the calculator is
learned.

There is no GPU: `nvidia-smi` is a script that lists eight, and servers are the stand-in for SGLang
(fakes/sglang_stand_in.py), whose ranks are payloads, not processes. One test has real SGLang, whose
ranks are processes on the CPU and cannot share its memory with the trainer's.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/calculator"
PATIENCE_S = 300
NUM_STEPS = 14
CONFIG = """
[run]
name = "node"
dir = "runs"

[model]
path = "runs/warm/hf"
renderer = "qwen3"
renderer_options = { enable_thinking = false }
max_context_tokens = 512

[env]
rollout_function_path = "rollout:play"
tasks = "tasks:train_tasks"
eval_tasks = "tasks:eval_tasks"
max_concurrent_episodes = 128
episode_deadline_s = 120
max_runner_silence_s = 3
max_replaced_share = 0.5

[sampling]
max_new_tokens = 24

[buffer]
group_size = 8

[server]
kind = "sglang"
num_servers = 2
tensor_parallel_size = 2
gpus = [0, 1, 2, 3]
start_timeout_s = 200

[trainer]
num_steps = 14
groups_per_step = 16
learning_rate = 1e-3
checkpoint_every = 2
num_ranks = 4
gpus = [4, 5, 6, 7]

[trainer.megatron]
tensor_model_parallel_size = 2
sequence_parallel = true

[publish]
verify = "probe"
phase_timeout_s = 30

[eval]
every = 14
num_episodes = 128
final_num_episodes = 128
"""
ON_A_CPU = re.sub(r"gpus = .*\n", "", CONFIG)
COLOCATED = ("trainer.is_colocated=true", "trainer.gpus=[0, 1, 2, 3]")
NVIDIA_SMI = """#!/bin/sh
for number in 0 1 2 3 4 5 6 7; do echo "$number, GPU-pretend-$number, Pretend, 81559"; done
"""
WARM_START = {"run.name": "warm", "trainer.num_steps": 250, "model.path": "policy"}


def outloop(*words: str) -> list[str]:
    """A command line."""
    return [sys.executable, "-m", "outloop.cli", *words]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the config, the calculator's warm-started policy, the list of GPUs and what
    takes the place of SGLang's Python."""
    folder = tmp_path_factory.mktemp("node")
    (folder / "run.toml").write_text(CONFIG)
    (folder / "cpu.toml").write_text(ON_A_CPU)
    programs = {
        "nvidia-smi": NVIDIA_SMI,
        # SGLang's environment has a PYTHONPATH of its own.
        "python": f"#!/bin/sh\nPYTHONPATH={ROOT / 'tests'} exec {sys.executable} "
        '-m fakes.sglang_stand_in "$@"\n',
    }
    (folder / "bin").mkdir()
    for name, text in programs.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    made = ["new-policy", "--out", "policy", "--conversations", "tasks:conversations"]
    warm = ["train", str(EXAMPLE / "warm_start.toml"), "--set", "run.dir=runs"]
    for name, value in WARM_START.items():
        warm += ["--set", f"{name}={json.dumps(value)}"]
    for words in (outloop(*made, "--import-dir", str(EXAMPLE)), outloop(*warm)):
        subprocess.run(words, cwd=folder, check=True, timeout=PATIENCE_S, env=environment(folder))
    return folder


def environment(folder: Path) -> dict[str, str]:
    """Of the run: the list of GPUs is that of the folder."""
    inherited = {name: v for name, v in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return {
        **inherited,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }


class Node:
    """The run, and its processes."""

    def __init__(self, folder: Path, name: str, settings: Sequence[str], config: str) -> None:
        self.dir = folder / "runs" / name
        settings = [f"run.name={name}", f'env.import_dir="{EXAMPLE}"', *settings]
        if config == "run.toml":
            settings.append(f'server.sglang_python="{folder / "bin/python"}"')
        words = [word for setting in settings for word in ("--set", setting)]
        self.output = folder / f"{name}.txt"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                outloop("train", config, *words),
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(folder),
            )

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Of the metrics."""
        path = self.dir / "metrics.jsonl"
        if not path.exists():
            return []
        lines = path.read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    @property
    def num_steps(self) -> int:
        """Made so far."""
        return max((row["step"] for row in self.rows if "train/loss" in row), default=0)

    def wait_for(self, num_steps: int, patience_s: float = PATIENCE_S) -> None:
        """Until so many steps are made."""
        deadline = time.monotonic() + patience_s
        while self.num_steps < num_steps:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.1)

    def kill(self, *words: str) -> None:
        """SIGKILL the first process of the run whose command line has all of these."""
        found = [
            process
            for process in psutil.process_iter(["cmdline", "cwd"])
            if process.info["cwd"] == str(self.dir.parents[1])
            and all(word in " ".join(process.info["cmdline"] or []) for word in words)
        ]
        assert found, words
        min(found, key=lambda process: process.pid).kill()

    @property
    def text(self) -> str:
        """What the terminal shows, and the last of the parts' logs."""
        logs = [path.read_text()[-2000:] for path in sorted((self.dir / "logs").glob("*.log"))]
        return "\n".join([self.output.read_text(), *logs])


@pytest.fixture
def start(workspace: Path) -> Iterator[Callable[..., Node]]:
    """`start("name", "section.key=value", ...)`."""
    nodes: list[Node] = []

    def make(name: str, *settings: str, config: str = "run.toml") -> Node:
        nodes.append(Node(workspace, name, settings, config))
        return nodes[-1]

    yield make
    for node in nodes:
        node.process.kill()
        node.process.wait()


@pytest.mark.slow
@pytest.mark.node
@pytest.mark.parametrize("is_colocated", [True, False], ids=["colocated", "apart"])
def test_a_node_learns_whoever_is_killed(is_colocated: bool, start: Callable[..., Node]) -> None:
    """Every step is made once, by weights that every server was given, and rewards rise."""
    node = start("colocated" if is_colocated else "apart", *(COLOCATED if is_colocated else ()))
    folder = str(node.dir)
    node.wait_for(1)
    # SGLang itself; its server part, with which it ends; the front; who plays; a rank.
    for step, words in (
        (2, ("fakes.sglang_stand_in",)),
        (4, ("outloop.cli server", folder, "--index 1")),
        (6, ("outloop.cli router", folder)),
        (8, ("outloop.cli runner", folder)),
        (10, ("outloop.cli trainer", folder, " -u ")),
    ):
        node.wait_for(step)
        node.kill(*words)
    assert node.process.wait(PATIENCE_S) == 0, node.text
    text = node.output.read_text()
    first_gpu = 0 if is_colocated else 4
    assert "server-1: GPU 2, 3 (Pretend)" in text
    assert f"trainer rank 3: GPU {first_gpu + 3} (Pretend)" in text
    assert text.count("part_restarted") >= 5
    steps = {row["step"]: row for row in node.rows if "train/loss" in row}
    assert sorted(steps) == list(range(1, NUM_STEPS + 1))
    versions = [row["train/policy_version"] for row in steps.values()]
    assert versions == sorted(set(versions))
    gaps = [row["train/logprob_gap_max"] for row in steps.values()]
    assert max(gap for gap in gaps if gap is not None) < 1e-3
    evaluations = [row["step"] for row in node.rows if "eval/sampled_reward" in row]
    assert evaluations == [0, NUM_STEPS]
    # Of more than a thousand episodes: an evaluation's 128 differ by as much as is learned.
    rewards = [steps[step]["train/reward_mean"] for step in sorted(steps)]
    assert fmean(rewards[3:]) > fmean(rewards[:3]) + 0.06, rewards
    left = [p for p in psutil.process_iter(["cmdline"]) if folder in str(p.info["cmdline"])]
    assert not psutil.wait_procs(left, timeout=20)[1]


@pytest.mark.sglang
@pytest.mark.timeout(900)
def test_two_sglang_servers_of_two_ranks_are_fed(start: Callable[..., Node]) -> None:
    """Real SGLang: four trainer ranks feed both servers each version, and the one that was killed
    again; what servers sampled has the trainer's logprobs."""
    patient = ("server.start_timeout_s=500", "publish.phase_timeout_s=120", "eval.every=0")
    node = start("sglang", "trainer.num_steps=6", *patient, config="cpu.toml")
    node.wait_for(2, 600)
    node.kill("sglang/entrypoint.py")
    assert node.process.wait(600) == 0, node.text
    assert "part_restarted" in node.output.read_text()
    steps = [row for row in node.rows if "train/loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 7))
    gaps = [row["train/logprob_gap_max"] for row in steps]
    assert max(gap for gap in gaps if gap is not None) < 1e-3
    for index in range(2):
        assert " TP1]" in (node.dir / f"logs/server-{index}.log").read_text()
