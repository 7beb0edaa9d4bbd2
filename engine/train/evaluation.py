"""Evaluations on their schedules: the run's own and those of named suites.

An evaluation for which `blocks_training` holds is complete before the weights change, so that its
episodes are of one version. Others go on beside training, and their rows say how many later
versions sampled their tokens.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from outloop.buffer.errors import DeadlineExceeded
from outloop.buffer.evaluations import results
from outloop.buffer.evaluations.estimates import Change, change_between
from outloop.buffer.evaluations.results import Evaluation
from outloop.buffer.records import EvalProgress
from outloop.buffer.settings import Settings
from outloop.buffer.telemetry import MetricsWriter
from outloop.engine.train.interfaces import Reader

_POLL_S = 0.1
_MIN_TASKS_TO_WARN = 8
"""With fewer, an interval by task says little."""
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Part:
    """One sampling of a list of tasks."""

    name: str
    """Its beginning in metrics, behind eval/ or test/."""
    key: str
    """Of the request."""
    temperature: float
    pass_reward: float


@dataclass(frozen=True, slots=True)
class _Pending:
    step: int
    parts: tuple[_Part, ...]
    policy_version: int
    requested_at: float
    kind: str = "eval"
    """What its metrics begin with: eval, or test."""
    is_suite: bool = False


class Evaluations:
    """Requests evaluations and collects their scores.

    `request` may be called by another thread than the one that calls the others.
    """

    def __init__(
        self,
        reader: Reader,
        settings: Settings,
        metrics: MetricsWriter,
        *,
        run_dir: Path,
        stop: threading.Event,
        beat: Callable[[str], None],
    ) -> None:
        self._reader = reader
        self._settings = settings
        self._metrics = metrics
        self._run_dir = run_dir
        self._stop = stop
        self._beat = beat
        self._pending: list[_Pending] = []
        """In the order of their requests."""

    def request(self, *, step: int, policy_version: int) -> None:
        """Ask for the evaluations of the version just acknowledged that the schedules want."""
        is_end = step in (0, self._settings.trainer.num_steps)
        for name, suite in self._settings.eval.suites.items():
            if step % suite.every == 0 or is_end:
                self._request_suite(name, step, policy_version)
        if self.is_due(step):
            self._request(step, policy_version, "validation", is_end=is_end)

    def is_due(self, step: int) -> bool:
        """Whether the run's own schedule wants an evaluation of this step."""
        every = self._settings.eval.every
        return every > 0 and (step % every == 0 or step == self._settings.trainer.num_steps)

    def blocks_training(self, step: int) -> bool:
        """Whether the evaluations of this step must be complete before the next update."""
        return self._settings.eval.blocks_training(step)

    def request_test(self, *, step: int, policy_version: int) -> None:
        """Ask for the test split, of the version that was chosen."""
        self._request(step, policy_version, "test", is_end=True)

    def _request(self, step: int, policy_version: int, suite: str, *, is_end: bool) -> None:
        plan = self._settings.eval
        temperatures = {"sampled": self._settings.sampling.temperature}
        if plan.greedy and is_end:
            temperatures["greedy"] = 0.0
        prefix = "" if suite == "validation" else f"{suite}-"
        parts = tuple(
            _Part(name, f"{policy_version}:{prefix}{name}", temperature, plan.pass_reward)
            for name, temperature in temperatures.items()
        )
        num_episodes, samples = plan.episodes(is_end=is_end)
        for part in parts:
            self._reader.request_eval(
                part.key,
                policy_version=policy_version,
                num_episodes=num_episodes,
                sampling={"temperature": part.temperature},
                suite=suite,
                samples_per_task=samples,
                blocks_training=suite == "test" or self.blocks_training(step),
            )
        kind = "eval" if suite == "validation" else suite
        self._pending.append(_Pending(step, parts, policy_version, time.monotonic(), kind))

    def _request_suite(self, name: str, step: int, policy_version: int) -> None:
        suite = self._settings.eval.suites[name]
        temperature = suite.temperature
        if temperature is None:
            temperature = self._settings.sampling.temperature
        part = _Part(name, f"{policy_version}:suite-{name}", temperature, suite.pass_reward)
        self._reader.request_eval(
            part.key,
            policy_version=policy_version,
            num_episodes=suite.num_tasks * suite.samples_per_task,
            sampling={"temperature": temperature},
            suite=self._settings.eval.task_list(name),
            samples_per_task=suite.samples_per_task,
            blocks_training=self.blocks_training(step),
        )
        pending = _Pending(step, (part,), policy_version, time.monotonic(), is_suite=True)
        self._pending.append(pending)

    def collect_done(self) -> None:
        """Record the evaluations that are complete; wait for none."""
        for pending in list(self._pending):
            progress = self._progress(pending)
            if _is_done(progress):
                self._record(pending, progress)

    def collect(self) -> tuple[int, float] | None:
        """Wait for the evaluations under way, if any, and record them.

        Returns the step of the last of the run's own and its mean reward under the run's sampling;
        None without one, on stop, or when no episode was scored.

        Raises:
            DeadlineExceeded: for eval.timeout_s no attempt was in flight.
        """
        found = None
        for pending in list(self._pending):
            if not self._wait_for(pending):
                return None
            reward = self._record(pending, self._progress(pending))
            if not pending.is_suite:
                found = None if math.isnan(reward) else (pending.step, reward)
        return found

    def _progress(self, pending: _Pending) -> list[EvalProgress]:
        return [self._reader.eval_progress(part.key) for part in pending.parts]

    def _wait_for(self, pending: _Pending) -> bool:
        """True once it is complete; False on stop."""
        timeout_s = self._settings.eval.timeout_s
        deadline = time.monotonic() + timeout_s
        while not _is_done(progress := self._progress(pending)):
            done = sum(part.num_done for part in progress)
            total = sum(part.num_total for part in progress)
            what = f"evaluation {pending.parts[0].name}" if pending.is_suite else "evaluation"
            self._beat(f"{what} at step {pending.step}: {done} of {total} episodes")
            if self._stop.wait(_POLL_S):
                return False
            if any(part.num_in_flight for part in progress):
                deadline = time.monotonic() + timeout_s
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    who="trainer",
                    phase=f"{what} at step {pending.step} ({done} of {total} episodes)",
                    peer="runner",
                    after_s=timeout_s,
                )
        return True

    def _record(self, pending: _Pending, progress: list[EvalProgress]) -> float:
        """Write its row and its results; returns the mean reward of its first sampling, NaN
        without any."""
        self._pending.remove(pending)
        kind, row = pending.kind, dict[str, float]()
        own = f"eval/{pending.parts[0].name}" if pending.is_suite else kind
        rewards = []
        for part, seen in zip(pending.parts, progress, strict=True):
            evaluation = Evaluation(
                step=pending.step,
                policy_version=pending.policy_version,
                oldest_version=seen.oldest_version,
                newest_version=seen.newest_version,
                mixed_share=seen.num_mixed / max(1, seen.num_done),
                name=part.name if kind == "eval" else f"{kind}/{part.name}",
                temperature=part.temperature,
                pass_reward=part.pass_reward,
                tasks=results.tasks_of(self._reader.eval_episodes(part.key)),
            )
            measured = evaluation.metrics() | self._change(evaluation)
            row |= {f"{kind}/{part.name}/{name}": value for name, value in measured.items()}
            if not pending.is_suite:
                row[f"{kind}/{part.name}_reward"] = measured["reward"]
                row[f"{kind}/{part.name}_se"] = measured["reward_se"]
                row[f"{kind}/episodes"] = max(
                    row.get(f"{kind}/episodes", 0.0), measured["episodes"]
                )
            rewards.append(measured["reward"])
            if not evaluation.tasks:
                continue
            results.append(self._run_dir, evaluation)
        row[f"{own}/duration_s"] = time.monotonic() - pending.requested_at
        known = [x for x in progress if x.oldest_version is not None]
        if known:
            oldest = min(x.oldest_version or 0 for x in known)
            newest = max(x.newest_version or 0 for x in known)
            row[f"{own}/oldest_version"] = float(oldest)
            row[f"{own}/newest_version"] = float(newest)
        if not self._settings.eval.blocks_training(pending.step):
            num_done = sum(part.num_done for part in progress)
            newest = max(part.newest_version or 0 for part in progress)
            row[f"{own}/mixed_share"] = sum(x.num_mixed for x in progress) / max(1, num_done)
            row[f"{own}/num_publishes"] = float(max(0, newest - pending.policy_version))
        self._metrics.write(pending.step, row)
        return rewards[0]

    def _change(self, evaluation: Evaluation) -> dict[str, float]:
        """How far it moved from the evaluation of the same name before it, task by task."""
        earlier = [
            one
            for one in results.read(self._run_dir)
            if one.name == evaluation.name and one.step < evaluation.step
        ]
        if not earlier:
            return {}
        before = earlier[-1]
        try:
            change = change_between(before.rewards, evaluation.rewards)
        except ValueError:
            # Too few tasks are in both, as after a change of eval.num_episodes.
            return {}
        if change.is_regression and change.num_tasks >= _MIN_TASKS_TO_WARN:
            _log.warning("evaluation_fell", sentence=_sentence(before, evaluation, change))
        return {"change": change.difference, "change_se": change.standard_error}


def _sentence(before: Evaluation, after: Evaluation, change: Change) -> str:
    worst = ", ".join(f"{name} {old:.2f} to {new:.2f}" for name, old, new in change.fell[:3])
    mixed = results.mixed_sentence(before, after)
    return (
        f"evaluation {after.name!r} fell by {-change.difference:.3f} from step {before.step} to "
        f"{after.step} (95%: {-change.high:.3f} to {-change.low:.3f}, {change.num_tasks} tasks); "
        f"most: {worst}. `outloop evaluations` compares any two steps{mixed and '. '}{mixed}"
    )


def _is_done(progress: list[EvalProgress]) -> bool:
    return all(part.num_done >= part.num_total for part in progress)
