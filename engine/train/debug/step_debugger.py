"""Around the updates of a step: dumps, profiles, and the report of an update that is refused.

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
from outloop.engine.train.debug.step_dump import DumpWriter, SaveState
from outloop.engine.train.step.update_metrics import UpdateReport

_NUM_NORMS = 20
"""Updates whose median gradient norm a spike is measured against."""
_log = structlog.get_logger()


class StepDebugger:
    """Dumps and profiles the steps that `[trainer]` names, and reports refused updates."""

    def __init__(self, settings: Settings, run_dir: Path, save_state: SaveState) -> None:
        trainer = settings.trainer
        self._settings = settings
        self._run_dir = run_dir
        self._save_state = save_state
        self._num_updates = trainer.num_updates
        self._norms: deque[float] = deque(maxlen=_NUM_NORMS)

    def run(
        self,
        batch: TrainBatch,
        updates: Sequence[Sequence[int]],
        make: Callable[[Sequence[int], float], UpdateReport],
        *,
        step: int,
        policy_version: int,
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
        trainer = self._settings.trainer
        dump = None
        if step in trainer.dump_steps:
            dump = self._dump(batch, updates, step=step, policy_version=policy_version)
        reports: list[UpdateReport] = []
        with self._profile(step):
            for index, rows in enumerate(updates):
                try:
                    reports.append(make(rows, self._norm_limit()))
                except FloatingPointError as error:
                    raise self._refused(
                        batch,
                        updates[index:],
                        str(error),
                        step=step,
                        policy_version=policy_version,
                        score=score,
                    ) from error
                self._norms.append(reports[-1].grad_norm)
        if dump is not None:
            dump.write_results(reports, updates=updates, schedule=self._num_updates)
        return reports

    def _norm_limit(self) -> float:
        factor = self._settings.trainer.max_grad_spike
        if not factor or len(self._norms) < _NUM_NORMS:
            return math.inf
        return factor * statistics.median(self._norms)

    def _dump(
        self,
        batch: TrainBatch,
        updates: Sequence[Sequence[int]],
        *,
        step: int,
        policy_version: int,
    ) -> DumpWriter:
        path = self._run_dir / "dumps" / f"step_{step}"
        dump = DumpWriter(path, self._settings, step=step, policy_version=policy_version)
        dump.write_before(self._save_state, batch, updates, num_updates=self._num_updates)
        _log.info("step_dumped", step=step, path=str(path))
        return dump

    def _refused(
        self,
        batch: TrainBatch,
        updates: Sequence[Sequence[int]],
        reason: str,
        *,
        step: int,
        policy_version: int,
        score: Callable[[Sequence[int]], Float32],
    ) -> UpdateRefused:
        """Name the episodes of the first of `updates`, and leave it on disk for a replay."""
        rows = updates[0]
        path = self._run_dir / "reports" / f"refused_step_{step}.jsonl"
        found = suspects(batch, rows, score(rows))
        self._dump(batch, updates, step=step, policy_version=policy_version)
        sentence = write_report(path, step=step, reason=reason, found=found)
        return UpdateRefused(
            f"{sentence}. All of them are in {path}; make the update again with: outloop "
            f"replay-step {self._run_dir / 'dumps' / f'step_{step}'}"
        )

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
