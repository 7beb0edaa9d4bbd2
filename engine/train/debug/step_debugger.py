"""Profiles the updates of a step, and reports an update that is refused.

Where nothing is asked for, the updates run as if this module were not there. A refused update stops
the run with the weights as they were before it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import structlog
import torch
import torch.distributed as dist

from outloop.buffer.errors import UpdateRefused
from outloop.buffer.records import Float32
from outloop.buffer.settings import Settings
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.debug.bad_gradient_report import suspects, write_report
from outloop.engine.train.step.update_metrics import UpdateReport

_NUM_NORMS = 20
"""Updates whose median gradient norm a spike is measured against."""
_log = structlog.get_logger()


class StepDebugger:
    """Profiles the steps that `[trainer]` names, and reports refused updates."""

    def __init__(self, settings: Settings, run_dir: Path) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._norms: deque[float] = deque(maxlen=_NUM_NORMS)

    def run(
        self,
        batch: TrainBatch,
        updates: Sequence[Sequence[int]],
        make: Callable[[Sequence[int], float], UpdateReport],
        *,
        step: int,
        score: Callable[[Sequence[int]], Float32],
    ) -> list[UpdateReport]:
        """Make the updates of a step.

        Args:
            updates: rows of the batch.
            make: one update, refused above a gradient norm.
            score: logprobs of rows, as a column of the batch, under the weights as they are.

        Raises:
            UpdateRefused: a gradient is not finite or a spike; names the episodes.
        """
        reports: list[UpdateReport] = []
        with self._profile(step):
            for rows in updates:
                try:
                    reports.append(make(rows, self._norm_limit()))
                except FloatingPointError as error:
                    raise self._refused(batch, rows, str(error), step=step, score=score) from error
                self._norms.append(reports[-1].grad_norm)
        return reports

    def _norm_limit(self) -> float:
        factor = self._settings.trainer.max_grad_spike
        if not factor or len(self._norms) < _NUM_NORMS:
            return math.inf
        return factor * statistics.median(self._norms)

    def _refused(
        self,
        batch: TrainBatch,
        rows: Sequence[int],
        reason: str,
        *,
        step: int,
        score: Callable[[Sequence[int]], Float32],
    ) -> UpdateRefused:
        """Name the episodes of the update's rows, the likeliest causes first."""
        path = self._run_dir / "reports" / f"refused_step_{step}.jsonl"
        sentence = write_report(
            path, step=step, reason=reason, found=suspects(batch, rows, score(rows))
        )
        return UpdateRefused(f"{sentence}. All of them are in {path}")

    @contextmanager
    def _profile(self, step: int) -> Iterator[None]:
        """A Chrome trace and a table of the step's updates, if it is to be profiled."""
        if step not in self._settings.trainer.profile_steps:
            yield
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
            yield
        folder = self._run_dir / "profile"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"step_{step}_rank_{dist.get_rank()}"
        profile.export_chrome_trace(str(folder / f"{name}.json"))
        order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = profile.key_averages().table(sort_by=order, row_limit=40)
        (folder / f"{name}.txt").write_text(table)
        _log.info("step_profiled", step=step, path=str(folder / f"{name}.json"))
