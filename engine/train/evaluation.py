"""Evaluation on a schedule.

With eval.blocks_publish an evaluation is complete before the next version is published, so that its
episodes are of one version.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outloop.buffer.errors import DeadlineExceeded
from outloop.buffer.records import EvalProgress, Split
from outloop.buffer.settings import Settings
from outloop.buffer.telemetry import MetricsWriter
from outloop.engine.train.interfaces import Reader

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class _Pending:
    step: int
    names: dict[str, str]
    """Sampling name -> name of the evaluation."""
    policy_version: int
    requested_at: float
    split: Split = "validation"


class Evaluations:
    """Requests evaluations and collects their scores."""

    def __init__(
        self,
        reader: Reader,
        settings: Settings,
        metrics: MetricsWriter,
        *,
        stop: threading.Event,
        beat: Callable[[str], None],
    ) -> None:
        self._reader = reader
        self._settings = settings
        self._metrics = metrics
        self._stop = stop
        self._beat = beat
        self._pending: list[_Pending] = []
        """In the order of their requests."""

    def request(self, *, step: int, policy_version: int) -> None:
        """Ask for an evaluation of the version just acknowledged, if the schedule wants one."""
        is_end = step in (0, self._settings.trainer.num_steps)
        if self.is_due(step):
            self._request(step, policy_version, "validation", is_end=is_end)

    def is_due(self, step: int) -> bool:
        """Whether the schedule wants an evaluation of this step."""
        every = self._settings.eval.every
        return every > 0 and (step % every == 0 or step == self._settings.trainer.num_steps)

    def request_test(self, *, step: int, policy_version: int) -> None:
        """Ask for the test split, of the version that was chosen."""
        self._request(step, policy_version, "test", is_end=True)

    def _request(self, step: int, policy_version: int, split: Split, *, is_end: bool) -> None:
        plan = self._settings.eval
        temperatures = {"sampled": self._settings.sampling.temperature}
        if plan.greedy and is_end:
            temperatures["greedy"] = 0.0
        prefix = "" if split == "validation" else f"{split}-"
        names = {name: f"{policy_version}:{prefix}{name}" for name in temperatures}
        for name, temperature in temperatures.items():
            self._reader.request_eval(
                names[name],
                policy_version=policy_version,
                num_episodes=plan.final_num_episodes if is_end else plan.num_episodes,
                sampling={"temperature": temperature},
                split=split,
            )
        self._pending.append(_Pending(step, names, policy_version, time.monotonic(), split))

    def collect_done(self, *, policy_version: int) -> None:
        """Record the evaluations that are complete; wait for none.

        Args:
            policy_version: that is published now.
        """
        for pending in list(self._pending):
            progress = self._progress(pending)
            if _is_done(progress):
                self._record(pending, progress, policy_version)

    def collect(self, *, policy_version: int) -> tuple[int, float] | None:
        """Wait for the evaluations under way, if any, and record them.

        Returns the step of the last and its mean reward under the run's sampling; None without one,
        on stop, or when no episode was scored.

        Args:
            policy_version: that is published now.

        Raises:
            DeadlineExceeded: for eval.timeout_s no attempt was in flight.
        """
        found = None
        for pending in list(self._pending):
            progress = self._wait_for(pending)
            if progress is None:
                return None
            reward = self._record(pending, progress, policy_version)
            found = None if math.isnan(reward) else (pending.step, reward)
        return found

    def _progress(self, pending: _Pending) -> dict[str, EvalProgress]:
        return {name: self._reader.eval_progress(key) for name, key in pending.names.items()}

    def _wait_for(self, pending: _Pending) -> dict[str, EvalProgress] | None:
        """What it scored, once it is complete; None on stop."""
        timeout_s = self._settings.eval.timeout_s
        deadline = time.monotonic() + timeout_s
        while not _is_done(progress := self._progress(pending)):
            done = sum(part.num_done for part in progress.values())
            total = sum(part.num_total for part in progress.values())
            self._beat(f"evaluation at step {pending.step}: {done} of {total} episodes")
            if self._stop.wait(_POLL_S):
                return None
            if any(part.num_in_flight for part in progress.values()):
                deadline = time.monotonic() + timeout_s
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    who="trainer",
                    phase=f"evaluation at step {pending.step} ({done} of {total} episodes)",
                    peer="runner",
                    after_s=timeout_s,
                )
        return progress

    def _record(
        self, pending: _Pending, progress: dict[str, EvalProgress], policy_version: int
    ) -> float:
        """Write its row; returns the mean reward under the run's sampling, NaN without any."""
        self._pending.remove(pending)
        kind = "eval" if pending.split == "validation" else pending.split
        row = {
            f"{kind}/episodes": float(max(len(part.rewards) for part in progress.values())),
            f"{kind}/duration_s": time.monotonic() - pending.requested_at,
        }
        if not self._settings.eval.blocks_publish:
            row[f"{kind}/num_publishes"] = float(policy_version - pending.policy_version)
        for name, part in progress.items():
            row[f"{kind}/{name}_reward"], row[f"{kind}/{name}_se"] = mean_and_error(part.rewards)
        self._metrics.write(pending.step, row)
        return row[f"{kind}/sampled_reward"]


def _is_done(progress: dict[str, EvalProgress]) -> bool:
    return all(part.num_done >= part.num_total for part in progress.values())


def mean_and_error(rewards: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error (sample standard deviation over root n); NaN without data."""
    count = len(rewards)
    if count == 0:
        return math.nan, math.nan
    mean = math.fsum(rewards) / count
    if count == 1:
        return mean, math.nan
    variance = math.fsum((reward - mean) ** 2 for reward in rewards) / (count - 1)
    return mean, math.sqrt(variance / count)
