"""The checkpoint that did best on the validation split, on which the test split is reported.

`best` in the run's folder is a whole checkpoint of the lineage that the run continues, or absent.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import structlog

from outloop.engine.train.checkpoint.checkpoint_format import Checkpoint, read_checkpoint

_CHOICE = "choice.json"
_log = structlog.get_logger()


class BestCheckpoint:
    """Keeps the better of two checkpoints, by the mean reward of their validation episodes."""

    def __init__(self, run_dir: Path) -> None:
        self._checkpoints = run_dir / "checkpoints"
        self._best = run_dir / "best"

    @property
    def best(self) -> Checkpoint | None:
        """The checkpoint that is kept."""
        return read_checkpoint(self._best) if (self._best / _CHOICE).is_file() else None

    @property
    def is_reported(self) -> bool:
        """Whether the test split was evaluated for it."""
        return bool(self._read().get("is_reported"))

    def offer(self, step: int, reward: float) -> None:
        """Keep the checkpoint of `step` if nothing better is kept; of equals the earlier stays."""
        source = self._checkpoints / f"step_{step}"
        if reward <= self._read().get("reward", -float("inf")) or not source.is_dir():
            return
        temporary = self._best.with_name(".best.writing")
        shutil.rmtree(temporary, ignore_errors=True)
        # The files of a checkpoint never change, so that both folders may hold the same ones.
        shutil.copytree(source, temporary, copy_function=os.link)
        self._write(temporary, step=step, reward=reward, is_reported=False)
        shutil.rmtree(self._best, ignore_errors=True)
        temporary.rename(self._best)
        _log.info("best_checkpoint", step=step, validation_reward=reward)

    def mark_reported(self) -> None:
        """Record that the test split was evaluated for it."""
        self._write(self._best, **(self._read() | {"is_reported": True}))

    def forget_after(self, step: int) -> None:
        """A run that resumes from `step` abandons what came later."""
        if self._read().get("step", 0) > step:
            shutil.rmtree(self._best)

    def _read(self) -> dict[str, float]:
        path = self._best / _CHOICE
        found: dict[str, float] = json.loads(path.read_text()) if path.is_file() else {}
        return found

    def _write(self, folder: Path, **values: float) -> None:
        temporary = folder / f".{_CHOICE}"
        temporary.write_text(json.dumps(values))
        temporary.rename(folder / _CHOICE)
