"""The settings `[env]` and `[eval]`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field

from outloop.buffer.settings.section import Section


class TaskSourceSettings(Section):
    """One list of tasks of a mixture."""

    source: str
    """JSONL file, or package.module:function returning an iterable of tasks."""
    weight: float = Field(1.0, ge=0)
    """Relative to the other sources: how often it is played, until the run changes it."""
    priority: int = Field(0, ge=-1_000_000, le=1_000_000)
    """Added to the priority of each of its tasks; higher is played earlier, not more often."""


class EnvSettings(Section):
    """Tasks, the agent that plays them, the verifier, and limits of episodes."""

    rollout_function_path: str | None = None
    """package.module:function, `async def play(task, episode) -> reward`."""
    agent_command: str | None = None
    """A program that plays one episode, in place of a rollout function; `{task_file}` and fields of
    the task are filled in."""
    verifier: str | None = None
    """What scores an agent program: package.module:function, or a command."""
    agent_environment: tuple[str, ...] = ()
    """Names of variables that an agent program gets from the runner's environment, for example the
    key of a search engine."""
    agent_sandbox: Literal["bubblewrap", "none"] = "bubblewrap"
    """Sandbox of an agent program. bubblewrap: it must work here, or nothing starts. none: the
    program has the runner's rights, and can read the run's keys and the tasks' answers."""
    agent_read_only: tuple[Path, ...] = ()
    """Files and folders that an agent program in bubblewrap may read, besides those of the system,
    the interpreters on PATH, and the files that its command names and imports."""
    hidden_task_fields: tuple[str, ...] = ()
    """Fields of a task that only the verifier sees."""
    reward_weights: dict[str, float] = {}
    """Weights of the components of a reward, by name; 1 for those left out."""
    tasks: str | dict[str, TaskSourceSettings] | None = None
    """JSONL file, or package.module:function returning an iterable of tasks; or several by name."""
    eval_tasks: str | None = None
    """Held-out tasks: JSONL file, or package.module:function."""
    split: dict[Literal["train", "validation", "test"], float] | None = None
    """Relative sizes of the splits of `tasks`, by hash of the content; the validation split is
    evaluated, and the test split left out."""
    eval_split: Literal["validation", "test"] = "validation"
    """The split that is evaluated; the other one is not used."""
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
    """A worker process that blocks its event loop for longer is killed and replaced."""
    max_runner_silence_s: float = Field(20.0, ge=0, allow_inf_nan=False)
    """A runner that sends no heartbeat for longer loses its attempts: they are resumed or replaced,
    as at their deadlines. Runners send four in this time. 0: only deadlines count."""
    worker_memory_mb: float = Field(4096, gt=64)
    """A worker process that grows beyond it is replaced."""
    set_up_timeout_s: float = Field(120.0, gt=0)
    """Limit of `set_up` of a rollout class."""
    episode_deadline_s: float = Field(60.0, gt=0)
    """From claim to reward; then the episode is truncated. A task's own deadline_s wins."""
    verifier_timeout_s: float = Field(30.0, gt=0)
    """If the verifier takes longer, the reward is env.failure_reward."""
    agent_memory_mb: float = Field(2048, gt=16)
    """Limit of all processes of an agent program together."""
    agent_disk_mb: float = Field(4096, gt=1)
    """Limit of all files together that an agent program has in its folders; each counts 4 KiB at
    least."""
    max_output_bytes: int = Field(64 * 2**20, gt=0)
    """An agent program that writes more is ended."""
    max_kept_bytes: int = Field(65536, gt=0, le=4 * 2**20)
    """How much of the end of standard output, and of standard error, the verifier sees."""
    turn_scores: Literal["refuse", "record", "train"] = "refuse"
    """Scores of single turns, branches or spans of tokens, beside the episode's. refuse: 422, since
    most advantages look at the episode's alone. record: kept for reading. train: by an advantage
    that uses them."""
    failure_reward: float = 0.0
    """Reward of an episode if its agent failed; set it to the lowest that the verifier gives."""
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


class EvalSuiteSettings(Section):
    """One named evaluation with a schedule of its own; see docs/evaluation.md."""

    tasks: str | None = None
    """JSONL file, or package.module:function; left out: the tasks of env.eval_tasks, or the split
    that is evaluated."""
    every: int = Field(10, gt=0)
    """Policy versions between its evaluations. Version 0 and the last are evaluated too."""
    num_tasks: int = Field(128, gt=0)
    """The first of its tasks, at most."""
    samples_per_task: int = Field(1, gt=0)
    """Episodes of each task."""
    temperature: float | None = Field(None, ge=0)
    """Left out: sampling.temperature; 0: greedy."""
    pass_reward: float = 1.0
    """An episode with this reward or more passes, for pass_at_K and majority_at_K."""


class EvalSettings(Section):
    """Evaluation episodes on a schedule, through the same router, never trained."""

    every: int = Field(0, ge=0)
    """Policy versions between evaluations; 0: none. Version 0 and the last are evaluated too."""
    num_episodes: int | None = Field(None, gt=0)
    """Per evaluation and sampling; tasks are taken from the front of the evaluation list. Left out:
    128, or each task samples_per_task times where that is less."""
    final_num_episodes: int | None = Field(None, gt=0)
    """The same for version 0 and the last version; left out: as num_episodes."""
    samples_per_task: int | None = Field(None, gt=0)
    """Episodes of each task: the first num_episodes / samples_per_task tasks are played. Left out:
    all tasks, again and again if num_episodes asks for more."""
    pass_reward: float = 1.0
    """An episode with this reward or more passes, for pass_at_K and majority_at_K."""
    suites: dict[str, EvalSuiteSettings] = {}
    """Further evaluations by name, each with tasks, samples and a schedule of its own."""
    greedy: bool = True
    """Evaluate with temperature 0 beside the run's own sampling, at version 0 and the last."""
    timeout_s: float = Field(300.0, gt=0)
    """How long an evaluation may stand still, with no attempt of the run in flight."""
    blocks_publish: bool | None = None
    """true: the weights change when the evaluation is done, so that its episodes are of one
    version. false: training goes on beside it, in places that training leaves free first, and its
    later turns are sampled by later versions; eval/mixed_share says how many episodes have such.
    None: only the first, by which others are measured, holds training up; all if
    eval.chooses_checkpoint."""
    chooses_checkpoint: bool = False
    """Evaluate on the validation split, keep the weights that did best on it, and evaluate these
    once on the test split; needs both in env.split."""

    def task_list(self, suite: str) -> str:
        """The list of tasks that a suite plays: "validation", or the first suite with equal
        `tasks`, which both share."""
        tasks = self.suites[suite].tasks
        if tasks is None:
            return "validation"
        return next(name for name, other in self.suites.items() if other.tasks == tasks)

    def blocks_training(self, step: int) -> bool:
        """Whether the weights stay as they are until the evaluation of `step` is done."""
        if self.blocks_publish is not None:
            return self.blocks_publish
        return self.chooses_checkpoint or step == 0

    def episodes(self, *, is_end: bool) -> tuple[int, int]:
        """How many episodes an evaluation has at most, and how often it plays each task; 0: again
        and again.

        Args:
            is_end: it is that of version 0 or of the last version.

        Raises:
            ValueError: samples_per_task does not divide it.
        """
        given = self.final_num_episodes if is_end else None
        given = given or self.num_episodes
        samples = self.samples_per_task or (1 if given is None else 0)
        num_episodes = given or max(1, _NUM_EPISODES // samples) * samples
        if samples and num_episodes % samples:
            raise ValueError(
                f"eval.samples_per_task={samples} does not divide num_episodes="
                f"{num_episodes}; each task is played so often: change one of them"
            )
        return num_episodes, samples


_NUM_EPISODES = 128
"""Of an evaluation where eval.num_episodes is left out, at most."""
_SUITE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
_TAKEN_NAMES = ("validation", "test", "sampled", "greedy")


def check_evaluations(env: EnvSettings, plan: EvalSettings) -> None:
    """Refuse suites that have no tasks or no usable name, and a choice of checkpoints that has
    nothing to choose by.

    Raises:
        ValueError: which setting is missing or wrong.
    """
    for name, suite in plan.suites.items():
        if not _SUITE_NAME.fullmatch(name) or name in _TAKEN_NAMES:
            raise ValueError(
                f"eval.suites: name={name!r}; small letters, digits, - and _ are allowed, and none "
                f"of {', '.join(_TAKEN_NAMES)}"
            )
        if suite.tasks is None and env.eval_tasks is None and env.split is None:
            raise ValueError(
                f"eval.suites.{name} has no tasks; set its `tasks`, env.eval_tasks or env.split"
            )
    for is_end in (False, True):
        plan.episodes(is_end=is_end)
    shares = env.split or {}
    is_split = shares.get("validation", 0) > 0 and shares.get("test", 0) > 0
    if plan.chooses_checkpoint and not (plan.every and is_split):
        raise ValueError(
            f"eval.chooses_checkpoint=true with eval.every={plan.every}, env.split={env.split}: it "
            "needs evaluations, and shares above 0 of validation and test; set eval.every, and for "
            "example env.split = {train = 8, validation = 1, test = 1}"
        )
    if plan.blocks_publish is not None and not plan.every and not plan.suites:
        raise ValueError(
            f"eval.blocks_publish={str(plan.blocks_publish).lower()} has no effect with "
            "eval.every=0 and no eval.suites; leave it out, or set eval.every"
        )
    if plan.blocks_publish is False and plan.chooses_checkpoint:
        raise ValueError(
            "eval.blocks_publish=false with eval.chooses_checkpoint=true: what chooses a "
            "checkpoint must be played by its weights alone; leave one of them out"
        )
    if plan.chooses_checkpoint and env.eval_split != "validation":
        raise ValueError(
            f"eval.chooses_checkpoint=true with env.eval_split={env.eval_split!r}: the test split "
            "must not choose; leave env.eval_split out"
        )
