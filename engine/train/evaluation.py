"""Evaluation on a schedule.

The episodes of an evaluation are pinned to one version, so that it is complete before the next
version is published.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outloop.buffer.errors import DeadlineExceeded
from outloop.buffer.records import Split
from outloop.buffer.settings import Settings
from outloop.buffer.telemetry import MetricsWriter
from outloop.engine.train.interfaces import Reader

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class _Pending:
    step: int
    names: dict[str, str]
    """Sampling name -> name of the evaluation."""
    requested_at: float
    split: Split = "validation"


class Evaluations:
    """Requests evaluations and collects what they scored."""

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
        self._pending: _Pending | None = None

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
        self._pending = _Pending(step, names, time.monotonic(), split)

    def collect(self) -> tuple[int, float] | None:
        """Wait for the evaluation under way, if any, and record it.

        Returns its step and the mean reward under the run's sampling; None without one, on stop, or
        when no episode was scored.

        Raises:
            DeadlineExceeded: it took longer than eval.timeout_s.
        """
        pending = self._pending
        if pending is None:
            return None
        timeout_s = self._settings.eval.timeout_s
        deadline = time.monotonic() + timeout_s
        while True:
            progress = {n: self._reader.eval_progress(name) for n, name in pending.names.items()}
            if all(part.num_done >= part.num_total for part in progress.values()):
                break
            done = sum(part.num_done for part in progress.values())
            total = sum(part.num_total for part in progress.values())
            self._beat(f"evaluation at step {pending.step}: {done} of {total} episodes")
            if self._stop.wait(_POLL_S):
                return None
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    who="trainer",
                    phase=f"evaluation at step {pending.step} ({done} of {total} episodes)",
                    peer="runner",
                    after_s=timeout_s,
                )
        self._pending = None
        kind = "eval" if pending.split == "validation" else pending.split
        row = {
            f"{kind}/episodes": float(max(len(part.rewards) for part in progress.values())),
            f"{kind}/duration_s": time.monotonic() - pending.requested_at,
        }
        for name, part in progress.items():
            row[f"{kind}/{name}_reward"], row[f"{kind}/{name}_se"] = mean_and_error(part.rewards)
        self._metrics.write(pending.step, row)
        reward = row[f"{kind}/sampled_reward"]
        return None if math.isnan(reward) else (pending.step, reward)


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
