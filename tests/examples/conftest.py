"""The examples' modules, a made policy, and the fake router to answer the agents."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from outloop.buffer.records import Task
from outloop.engine.models.random_init import Sizes, write_policy
from outloop.envs.rollout.clients import Clients
from outloop.envs.rollout.episode import Episode
from outloop.envs.rollout.episode_rewards import Scores

ROOT = Path(__file__).resolve().parents[2]
CALCULATOR = ROOT / "examples/calculator"
sys.path.insert(0, str(CALCULATOR))


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The calculator's initial policy of seed 0."""
    from tasks import conversations

    folder = tmp_path_factory.mktemp("policy")
    write_policy(folder, 0, conversations())
    return folder


@pytest.fixture
async def router() -> AsyncIterator[Any]:
    """A started fake router."""
    spec = importlib.util.spec_from_file_location(
        "control_router", ROOT / "tests/fakes/control_router.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    fake = module.FakeRouter()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
def load_example() -> Callable[..., ModuleType]:
    """`load_example("math", "tasks")`: examples name their modules alike, so each is apart."""

    def load(name: str, module: str) -> ModuleType:
        folder = ROOT / "examples" / name
        own = {path.stem for path in folder.glob("*.py")}
        others = {key: sys.modules.pop(key) for key in own if key in sys.modules}
        sys.path.insert(0, str(folder))
        try:
            return importlib.import_module(module)
        finally:
            sys.path.remove(str(folder))
            for key in own:
                sys.modules.pop(key, None)
            sys.modules.update(others)

    return load


@pytest.fixture
async def open_episode(router: Any) -> AsyncIterator[Callable[..., tuple[Task, Episode]]]:
    """A task and an episode at the fake router, as the runner would make them."""
    clients = Clients(max_connections=4, timeout_s=20.0)

    def open_one(
        payload: dict[str, Any], *, takes_turns: bool = False, **weights: float
    ) -> tuple[Task, Episode]:
        task = Task(task_id="t", payload=payload)
        episode = Episode(
            episode_id="ep-0",
            task=task,
            purpose="train",
            base_url=f"{router.url}/episodes/ep-0/v1",
            api_key="ol-ep-ep-0-signature",
            deadline=0.0,
            scores=Scores(takes_turns=takes_turns, weights=weights),
            clients=clients,
        )
        return task, episode

    yield open_one
    await clients.close()


@pytest.fixture
def train_example(
    tmp_path: Path, load_example: Callable[..., ModuleType]
) -> Callable[..., list[dict[str, Any]]]:
    """Two steps of an example from a random policy, as a user would; rows of metrics.jsonl."""

    def train(name: str, config: str = "run.toml", **settings: object) -> list[dict[str, Any]]:
        def outloop(*arguments: str) -> None:
            answer = subprocess.run(
                [sys.executable, "-m", "outloop.cli", *arguments],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=200,
                check=False,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            assert answer.returncode == 0, answer.stdout + answer.stderr

        folder = ROOT / "examples" / name
        # As `outloop new-policy` does, without another process that loads torch first.
        tasks = load_example(name, "tasks")
        rows = tasks.conversations() if hasattr(tasks, "conversations") else said(tasks)
        write_policy(tmp_path / "policy", 0, rows[:1000], Sizes(max_context_tokens=2048))
        settings = SHORT | settings
        flags = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in settings.items()]
        outloop("train", str(folder / config), *(w for flag in flags for w in ("--set", flag)))
        text = (tmp_path / "runs/short/metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    return train


def said(tasks: ModuleType) -> list[dict[str, Any]]:
    """Conversations for a tokenizer, of an example that has no warm start."""
    rows = tasks.train_tasks()
    roles = {"question": "user", "answer": "assistant"}
    return [{"messages": [{"role": roles[k], "content": row[k]} for k in roles]} for row in rows]


SHORT = {
    "run__name": "short",
    "model__path": "policy",
    "trainer__num_steps": 2,
    "trainer__groups_per_step": 3,
    "trainer__checkpoint_every": 0,
    "trainer__take_timeout_s": 150,
    "buffer__group_size": 4,
    "env__episode_deadline_s": 90,
    "env__max_concurrent_episodes": 12,
    "sampling__max_new_tokens": 8,
    "eval__every": 0,
}
