"""Settings of a run on a cluster: two servers on GPUs, a trainer on two machines, three runners."""

from collections.abc import Callable
from pathlib import Path

import pytest

from outloop.buffer.settings import Settings, load_settings

CLUSTER = """
[run]
name = "walk"
[model]
path = "model"
[env]
tasks = "rollouts:tasks"
rollout_function_path = "rollouts:play"
num_runners = 3
agent_environment = ["SEARCH_KEY"]
[router]
num_processes = 2
upstreams.judge = {base_url = "https://judge.example/v1", api_key_env = "JUDGE_KEY"}
[server]
kind = "sglang"
num_servers = 2
device = "cuda"
tensor_parallel_size = 2
dtype = "bfloat16"
[trainer]
device = "cuda"
num_ranks = 8
[deploy]
image = "registry.example/outloop:1"
gpu_type = "H100"
trainer_nodes = 2
notice_s = 90
slurm = {partition = "gpu", exclusive = true}
parts.server = {cpus = 6, memory_mb = 60000}
"""
Written = Callable[..., tuple[Settings, Path]]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """A settings file of the cluster, with overrides, and the settings in it."""

    def write(*overrides: str) -> tuple[Settings, Path]:
        config = tmp_path / "run.toml"
        config.write_text(CLUSTER)
        run_dir = f'run.dir="{tmp_path / "runs"}"'
        return load_settings(config, (run_dir, *overrides)), config

    return write
