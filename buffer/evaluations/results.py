"""One line of `evaluations.jsonl` for each evaluation of a run: what each sample of a task got.

The trainer appends; whoever reads takes the last line of a step and name, since a run that resumed
from a checkpoint evaluates steps again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from outloop.buffer.errors import RecordError
from outloop.buffer.evaluations.estimates import majority_passes, mean_and_error, pass_at_k
from outloop.buffer.records import EvalEpisode

FILE = "evaluations.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskResult:
    """The samples of one task; an index of its lists is a sample."""

    task_id: str
    source: str = ""
    rewards: tuple[float, ...]
    answers: tuple[str, ...]
    num_tokens: tuple[int, ...]
    num_turns: tuple[int, ...]
    is_truncated: tuple[bool, ...]
    components: tuple[dict[str, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """One evaluation: of one version of the weights, or of that and later ones."""

    step: int
    policy_version: int
    """That was served when it was requested."""
    oldest_version: int | None = None
    newest_version: int | None = None
    """The first and the last that sampled its tokens; None: not known, as in older files."""
    mixed_share: float = 0.0
    """Of its episodes, those with tokens of later versions than `policy_version`."""
    name: str
    """sampled, greedy, test/sampled, test/greedy, or that of a suite."""
    temperature: float
    pass_reward: float
    tasks: tuple[TaskResult, ...]

    @property
    def rewards(self) -> dict[str, tuple[float, ...]]:
        """Of each task's samples, by task_id."""
        return {task.task_id: task.rewards for task in self.tasks}

    @property
    def is_mixed(self) -> bool:
        """True if its figures are not those of `policy_version` alone."""
        return self.mixed_share > 0

    @property
    def versions(self) -> str:
        """For a person: `5`, `5 to 17, mixed`, or `17, not 5`."""
        if not self.is_mixed or self.oldest_version is None:
            return str(self.policy_version)
        if self.oldest_version == self.newest_version:
            return f"{self.newest_version}, not {self.policy_version}"
        return f"{self.oldest_version} to {self.newest_version}, mixed"

    @property
    def num_samples(self) -> int:
        """Of the task that was played least."""
        return min((len(task.rewards) for task in self.tasks), default=0)

    def metrics(self) -> dict[str, float]:
        """Every figure of it, by name; standard errors (`_se`) are clustered by task.

        pass_at_K for 1 and every power of two up to `num_samples`, and for that; majority_at_K for
        the first `num_samples` samples of each task, where verifiers said what was answered.
        """
        tasks = self.tasks
        row = {
            "tasks": float(len(tasks)),
            "episodes": float(sum(len(task.rewards) for task in tasks)),
            "generated_tokens_mean": mean_and_error([task.num_tokens for task in tasks])[0],
            "turns_mean": mean_and_error([task.num_turns for task in tasks])[0],
            "truncated_share": mean_and_error([task.is_truncated for task in tasks])[0],
        }
        row |= _both("reward", [task.rewards for task in tasks])
        passed = [[reward >= self.pass_reward for reward in task.rewards] for task in tasks]
        for k in _ks(self.num_samples):
            chances = [[pass_at_k(len(own), sum(own), k)] for own in passed]
            row |= _both(f"pass_at_{k}", chances)
        row |= self._majority(passed)
        for name in sorted({name for task in tasks for one in task.components for name in one}):
            values = [[one[name] for one in task.components if name in one] for task in tasks]
            row |= _both(f"component/{name}", values)
        for source in sorted({task.source for task in tasks} - {""}):
            own = [task.rewards for task in tasks if task.source == source]
            row |= _both(f"source/{source}/reward", own)
            row[f"source/{source}/tasks"] = float(len(own))
        return row

    def _majority(self, passed: Sequence[Sequence[bool]]) -> dict[str, float]:
        k = self.num_samples
        if k < 2:
            return {}
        votes = [
            majority_passes(task.answers[:k], own[:k])
            for task, own in zip(self.tasks, passed, strict=True)
        ]
        if all(vote is None for vote in votes):
            return {}
        # A task whose samples gave no answer is not solved by their majority.
        return _both(f"majority_at_{k}", [[vote or 0.0] for vote in votes])


def _both(name: str, tasks: Sequence[Sequence[float]]) -> dict[str, float]:
    mean, error = mean_and_error(tasks)
    return {name: mean, f"{name}_se": error}


def _ks(num_samples: int) -> list[int]:
    powers = [2**n for n in range(num_samples.bit_length()) if 2**n <= num_samples]
    return sorted({*powers, num_samples} - {0})


def tasks_of(episodes: Sequence[EvalEpisode]) -> tuple[TaskResult, ...]:
    """The episodes by task, in the order of their first attempts."""
    by_task: dict[str, list[EvalEpisode]] = {}
    for episode in episodes:
        by_task.setdefault(episode.task_id, []).append(episode)
    return tuple(
        TaskResult(
            task_id=task_id,
            source=some[0].source,
            rewards=tuple(one.reward.value for one in some),
            answers=tuple(one.reward.answer for one in some),
            num_tokens=tuple(one.num_tokens for one in some),
            num_turns=tuple(one.num_turns for one in some),
            is_truncated=tuple(one.outcome == "truncated" for one in some),
            components=tuple(dict(one.reward.components) for one in some),
        )
        for task_id, some in by_task.items()
    )


def mixed_sentence(*evaluations: Evaluation) -> str:
    """What a comparison of these is not; empty where each is of its own version alone."""
    mixed = [one for one in evaluations if one.is_mixed]
    if not mixed:
        return ""
    names = " and ".join(f"step {one.step} is of versions {one.versions}" for one in mixed)
    return (
        f"{names}: the difference is not that of the two checkpoints. Set eval.blocks_publish = "
        "true for evaluations of one version"
    )


def append(run_dir: Path, evaluation: Evaluation) -> None:
    """Add its line."""
    line = json.dumps(asdict(evaluation), ensure_ascii=False)
    with (run_dir / FILE).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def read(run_dir: Path) -> list[Evaluation]:
    """The evaluations of a run by step, of each step and name the last; none without the file.

    A last line that is cut off, as after a kill, is left out.

    Raises:
        RecordError: another line is none of an evaluation.
    """
    path = run_dir / FILE
    if not path.is_file():
        return []
    decoder = msgspec.json.Decoder(Evaluation)
    found: dict[tuple[int, str], Evaluation] = {}
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            evaluation = decoder.decode(line)
        except msgspec.DecodeError as error:
            if number == len(lines) and not line.endswith(b"\n"):
                break
            raise RecordError(f"{path}, line {number} is no evaluation: {error}") from error
        found.pop((evaluation.step, evaluation.name), None)
        found[evaluation.step, evaluation.name] = evaluation
    return sorted(found.values(), key=lambda one: one.step)
