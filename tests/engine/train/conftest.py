"""Tiny Hugging Face folders and a process group of one."""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from fakes.records import trajectory_of
from outloop.buffer.records import (
    FinishReason,
    Outcome,
    Purpose,
    Reward,
    Sampling,
    Trajectory,
    Turn,
    VersionSpan,
)
from outloop.buffer.run import Run, create_run
from outloop.buffer.settings import Settings, TrainerSettings

sys.path.append(str(Path(__file__).resolve().parents[2] / "chaos"))

with warnings.catch_warnings():
    # megatron-core announces at import what it falls back to without Transformer Engine.
    warnings.simplefilter("ignore")
    from fakes.bandit_run import MakeTurn, RewardOf, Server, Setup, arm, join
    from fakes.families import make_family
    from fakes.twin import Twin
    from outloop.engine.train.checkpoint.async_writer import Shards
    from outloop.engine.train.data.samples import Sample
    from outloop.engine.train.megatron import import_weights, model_and_optimizer
    from outloop.engine.train.ranks.controller import RankController
    from outloop.engine.train.ranks.rank_worker import RankWorker
    from outloop.engine.train.ranks.watchdog import Watchdog


@pytest.fixture(scope="session", autouse=True)
def process_group() -> Iterator[None]:
    """One gloo process for every test of this folder."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model_and_optimizer.join_process_group(seed=1)
        yield
        model_and_optimizer.leave_process_group()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make (once) a random two-layer model of a family: `tiny_folder("qwen3", tied=True)`."""
    made: dict[tuple[str, bool], Path] = {}

    def make(kind: str = "qwen3", *, tied: bool = True) -> Path:
        if (kind, tied) not in made:
            folder = tmp_path_factory.mktemp(f"{kind}-{tied}")
            make_family(kind, folder, is_tied=tied)
            made[kind, tied] = folder
        return made[kind, tied]

    return make


@pytest.fixture(scope="session")
def double_model(tiny_folder: Callable[..., Path]) -> Any:
    """The tiny policy in transformers, in float64."""
    return transformers.AutoModelForCausalLM.from_pretrained(tiny_folder()).double()


@pytest.fixture
def make_turn() -> Callable[..., Turn]:
    """Build a turn: `make_turn("b", parent="a", prompt=[1], output=[2], version=0)`."""

    def make(
        turn_id: str,
        *,
        parent: str | None = None,
        prompt: Sequence[int] = (1, 2),
        output: Sequence[int] = (3, 4),
        logprobs: Sequence[float] | None = (),
        version: int = 0,
        spans: tuple[VersionSpan, ...] | None = None,
        loss_spans: tuple[tuple[int, int], ...] | None = None,
        sampling: Sampling | None = None,
        finish_reason: FinishReason = "stop",
    ) -> Turn:
        size = len(output)
        if logprobs == ():
            logprobs = [-1.0] * size
        default = (VersionSpan(policy_version=version, start=0, end=size),)
        return Turn(
            turn_id=turn_id,
            episode_id="e",
            parent_turn_id=parent,
            prompt_ids=np.array(prompt, np.int32),
            output_ids=np.array(output, np.int32),
            behavior_logprobs=None if logprobs is None else np.array(logprobs, np.float32),
            version_spans=() if logprobs is None else spans or default,
            loss_spans=((0, size),) if loss_spans is None else loss_spans,
            sampling=sampling or Sampling(temperature=1.0),
            finish_reason=finish_reason,
            started_at=0.0,
            finished_at=0.0,
        )

    return make


@pytest.fixture
def make_trajectory() -> Callable[..., Trajectory]:
    """Build a closed episode: `make_trajectory(turns, reward=1.0, group_id="g")`."""

    def make(
        turns: Sequence[Turn],
        *,
        reward: float | None = 1.0,
        episode_id: str = "e",
        group_id: str | None = "g",
        purpose: Purpose = "train",
        outcome: Outcome = "completed",
    ) -> Trajectory:
        return trajectory_of(
            turns,
            episode_id=episode_id,
            group_id=group_id,
            purpose=purpose,
            outcome=outcome,
            reward=None if reward is None else Reward(value=reward),
        )

    return make


@pytest.fixture
def make_samples() -> Callable[..., list[Sample]]:
    """Random samples of unequal length with masks: `make_samples(9, seed=1)`."""

    def make(count: int, *, seed: int = 0, temperature: float = 1.0) -> list[Sample]:
        generator = np.random.default_rng(seed)
        samples = []
        for index in range(count):
            size = int(generator.integers(3, 40))
            mask = generator.random(size) < 0.5
            mask[0], mask[-1] = False, True
            samples.append(
                Sample(
                    episode_id=f"e{index // 2}",
                    group_id=f"g{index // 4}",
                    branch=index % 2,
                    token_ids=generator.integers(0, 400, size).astype(np.int32),
                    loss_mask=mask,
                    behavior_logprobs=generator.normal(-6.0, 0.1, size).astype(np.float32),
                    policy_versions=np.zeros(size, np.int32),
                    temperature=np.full(size, temperature, np.float32),
                    turns=np.where(mask, 0, -1).astype(np.int32),
                    advantages=np.full(size, generator.normal(), np.float32),
                )
            )
        return samples

    return make


@pytest.fixture
def make_policy(tiny_folder: Callable[..., Path]) -> Callable[..., model_and_optimizer.Policy]:
    """A tiny policy with its optimizer: `make_policy(learning_rate=1e-3)`."""

    def make(
        kind: str = "qwen3",
        *,
        num_updates: int = 10,
        raw: dict[str, Any] | None = None,
        **settings: object,
    ) -> model_and_optimizer.Policy:
        folder = tiny_folder(kind)
        trainer = TrainerSettings(**({"learning_rate": 1e-3} | settings))
        policy = model_and_optimizer.build_policy(
            model_and_optimizer.read_config(folder, raw or {}, dtype=trainer.dtype),
            trainer,
            num_updates=num_updates,
        )
        import_weights.load_huggingface(policy.model, folder)
        policy.take_weights()
        return policy

    return make


@pytest.fixture
def make_ranks() -> Iterator[Callable[..., RankController]]:
    """A run's rank 0 without followers: `make_ranks(run, num_updates=3)`.

    Other arguments are those of `RankWorker`.
    """

    def make(run: Run, *, num_updates: int | None = None, **parts: Any) -> RankController:
        config = model_and_optimizer.read_config(
            run.settings.model.path,
            run.settings.trainer.megatron,
            dtype=run.settings.trainer.dtype,
        )
        timeout_s = run.settings.trainer.hang_timeout_s
        watchdog = Watchdog(run.dir, rank=0, num_ranks=1, hang_timeout_s=timeout_s)
        watchdogs.append(watchdog)
        worker = RankWorker(run, config, watchdog, **parts)
        ranks = RankController(worker, watchdog, num_ranks=1, timeout_s=60.0)
        if num_updates is not None:
            ranks.run(RankWorker.build, num_updates=num_updates)
        return ranks

    watchdogs: list[Watchdog] = []
    yield make
    for watchdog in watchdogs:
        watchdog.close()


@pytest.fixture
def setup(
    tmp_path: Path,
    tiny_folder: Callable[..., Path],
    make_ranks: Callable[..., RankController],
    make_turn: MakeTurn,
) -> Iterator[Callable[..., Setup]]:
    """Make a run: `setup(trainer={"num_steps": 3}, reward_of=arm)`; again: a restart.

    Publishes are made within the loop, unless `publish` says otherwise.
    """
    twin = Twin()
    made: list[Setup] = []

    def make(
        reward_of: RewardOf = arm,
        lag: int = 0,
        make_shards: Callable[..., Shards] = Shards,
        **sections: dict[str, Any],
    ) -> Setup:
        nonlocal twin
        sections.setdefault("publish", {"overlaps_training": False})
        settings = Settings(**({"model": {"path": tiny_folder()}} | sections))
        if not settings.trainer.resume:
            twin = Twin()
        run = create_run(settings, tmp_path / "run", "unix:///nowhere")
        events: list[tuple[str, Any]] = []
        server = Server(tiny_folder(), events)
        buffer = join(run, twin, server, make_turn)
        buffer.events, buffer.reward_of, buffer.lag = events, reward_of, lag
        num_updates = settings.trainer.num_steps
        ranks = make_ranks(run, num_updates=num_updates, make_shards=make_shards)
        made.append(Setup(run, buffer, server, ranks))
        return made[-1]

    yield make
    for one in made:
        one.buffer.close()
