"""The settings of the env's side.

Owns: names, types and defaults of `[env]` and `[eval]`. Does not own: where values come from and
the rules across sections (settings), finding what paths name (envs). Invariant: frozen; unknown
keys are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TaskSourceSettings(BaseModel):
    """One list of tasks of a mixture."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    """JSONL file, or package.module:function returning an iterable of tasks."""
    weight: float = Field(1.0, ge=0)
    """How often it is played, relative to the others, when the run begins."""
    priority: int = Field(0, ge=-1_000_000, le=1_000_000)
    """Added to the priority of each of its tasks; higher is played earlier, not more often."""


class EnvSettings(BaseModel):
    """What is played, by whom, under which limits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rollout_function_path: str | None = None
    """package.module:function, `async def play(task, episode) -> reward`."""
    agent_command: str | None = None
    """A program that plays one episode, in place of a rollout function; `{task_file}` and fields of
    the task are filled in."""
    verifier: str | None = None
    """What scores an agent program: package.module:function, or a command."""
    agent_environment: tuple[str, ...] = ()
    """Variables of the runner's environment that an agent program gets too, by name: a key of a
    search engine for example."""
    agent_sandbox: Literal["auto", "bubblewrap", "none"] = "auto"
    """What is around an agent program: bubblewrap, where it can be had (auto), or an error where it
    cannot; none: it runs with the runner's rights."""
    agent_read_only: tuple[Path, ...] = ()
    """Folders below home folders that an agent program in bubblewrap may read, beside the project
    and the interpreters on PATH."""
    hidden_task_fields: tuple[str, ...] = ()
    """Fields of a task that only the verifier sees."""
    reward_weights: dict[str, float] = {}
    """Of named components, where a verifier returns several; 1 for those left out."""
    tasks: str | dict[str, TaskSourceSettings] | None = None
    """JSONL file, or package.module:function returning an iterable of tasks; or several by name."""
    eval_tasks: str | None = None
    """Held-out tasks: JSONL file, or package.module:function."""
    split: dict[Literal["train", "validation", "test"], float] | None = None
    """Relative sizes of the splits of `tasks`, by hash of the content; the validation split is
    evaluated, and the test split left out."""
    eval_split: Literal["validation", "test"] = "validation"
    """Which split is evaluated; the other one is left out."""
    import_dir: Path | None = None
    """Where user code and task files are looked for after the working directory. Left out: the
    settings file's own folder."""
    conversations: str | None = None
    """SFT only: JSONL file or package.module:function giving {"messages", "tools"} rows."""
    max_concurrent_episodes: int = Field(64, gt=0)
    """Per runner."""
    num_runners: int = Field(1, ge=0)
    """0: runners are started elsewhere."""
    num_workers: int = Field(1, ge=0)
    """Processes per runner in which episodes are played; 0: in the runner itself."""
    max_blocking_episodes: int = Field(32, gt=0, le=256)
    """Threads per worker for a rollout function that blocks."""
    max_stall_s: float = Field(30.0, gt=0)
    """A worker whose event loop stands still for longer is killed and replaced."""
    max_runner_silence_s: float = Field(20.0, ge=0, allow_inf_nan=False)
    """The attempts of a runner without a heartbeat for longer are lost: resumed or replaced, as at
    their deadlines. Runners say four times in it that they are there. 0: deadlines alone."""
    worker_memory_mb: float = Field(4096, gt=64)
    """A worker process that grows beyond it is replaced."""
    set_up_timeout_s: float = Field(120.0, gt=0)
    """For set_up of a rollout function's class."""
    episode_deadline_s: float = Field(60.0, gt=0)
    """From claim to reward; then the episode is truncated. A task's own deadline_s wins."""
    verifier_timeout_s: float = Field(30.0, gt=0)
    """A verifier that takes longer scores env.failure_reward."""
    agent_memory_mb: float = Field(2048, gt=16)
    """Of an agent program's processes together."""
    max_output_bytes: int = Field(64 * 2**20, gt=0)
    """An agent program that writes more is ended."""
    max_kept_bytes: int = Field(65536, gt=0, le=4 * 2**20)
    """What its verifier sees of standard output and of standard error: the end."""
    turn_scores: Literal["refuse", "record", "train"] = "refuse"
    """Scores of single turns, branches or spans of tokens, beside the episode's. refuse: 422, since
    most advantages look at the episode's alone. record: kept for reading. train: by an advantage
    that uses them."""
    failure_reward: float = 0.0
    """Reward of an episode whose agent failed: the lowest that the verifier can give."""
    max_resumptions: int = Field(3, ge=0)
    """How often an attempt that was lost to the infrastructure is resumed before it is replaced:
    its recorded turns answer the same requests, and only what differs is generated. 0: never."""
    max_replacements: int = Field(3, ge=0)
    """Attempts replaced per slot before the group is dead-lettered."""
    max_failed_share: float = Field(0.98, ge=0, le=1)
    """A runner stops the run when a larger share of its last 200 episodes (at least 32) failed by
    their agent and all of these got the same reward: nothing can be learned. 1: never."""
    max_replaced_share: float = Field(0.02, ge=0, le=1)
    """The run stops when a larger share of attempts ended without a result (after 200 attempts)."""


class EvalSettings(BaseModel):
    """Evaluation episodes on a schedule, through the same router, never trained."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    every: int = Field(0, ge=0)
    """Policy versions between evaluations; 0: none. Version 0 and the last are evaluated too."""
    num_episodes: int = Field(128, gt=0)
    """Per evaluation and sampling; tasks are taken from the front of the evaluation list."""
    final_num_episodes: int = Field(128, gt=0)
    """For version 0 and the last version."""
    greedy: bool = True
    """Evaluate with temperature 0 beside the run's own sampling, at version 0 and the last."""
    timeout_s: float = Field(300.0, gt=0)
    """For one evaluation; training waits for it."""
    chooses_checkpoint: bool = False
    """Evaluate the validation split, end with the weights that did best on it, and report the test
    split for these once; needs both in env.split."""


def check_choice(env: EnvSettings, plan: EvalSettings) -> None:
    """Refuse a choice of checkpoints that has nothing to choose by.

    Raises:
        ValueError: which setting is missing.
    """
    shares = env.split or {}
    is_split = shares.get("validation", 0) > 0 and shares.get("test", 0) > 0
    if plan.chooses_checkpoint and not (plan.every and is_split):
        raise ValueError(
            f"eval.chooses_checkpoint=true with eval.every={plan.every}, env.split={env.split}: it "
            "needs evaluations, and shares above 0 of validation and test; set eval.every, and for "
            "example env.split = {train = 8, validation = 1, test = 1}"
        )
    if plan.chooses_checkpoint and env.eval_split != "validation":
        raise ValueError(
            f"eval.chooses_checkpoint=true with env.eval_split={env.eval_split!r}: the test split "
            "must not choose; leave env.eval_split out"
        )
