"""A step on disk, to be made again elsewhere: state before its updates, batch, results.

A replay on the same machine and number of threads gives the same loss and gradient norm, bit by
bit.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import torch.distributed as dist

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings, build_settings
from outloop.buffer.whole_file import whole_file
from outloop.engine.train.checkpoint.checkpoint_format import latest_checkpoint, load_checkpoint
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.megatron.model_and_optimizer import Policy
from outloop.engine.train.megatron.value_head import ValueHead
from outloop.engine.train.step.update_metrics import UpdateReport

SCHEMA = 4
_FACTS = "step.json"
_BATCH = "batch.msgpack"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDump:
    """A dumped step, as `read_dump` returns it."""

    path: Path
    step: int
    policy_version: int
    settings: Settings
    num_updates: int
    """Updates that the learning rate's schedule is made for."""
    batch: TrainBatch
    updates: list[list[int]]
    """Rows of the batch."""
    results: list[tuple[float, float]]
    """(loss, gradient norm) of each update that was made; fewer than updates: one was refused."""


class SaveState(Protocol):
    """Writes all ranks' state into a folder."""

    def __call__(self, folder: Path, *, step: int) -> None: ...


class DumpWriter:
    """Writes one step: its state before the updates, then their results. Rank 0 writes."""

    def __init__(self, path: Path, settings: Settings, *, step: int, policy_version: int) -> None:
        self._path = path
        self._settings = settings
        self._step = step
        self._version = policy_version
        self._is_writer = dist.get_rank() == 0

    def write_before(
        self,
        save_state: SaveState,
        batch: TrainBatch,
        updates: Sequence[Sequence[int]],
        *,
        num_updates: int,
    ) -> None:
        """Write the state, by all ranks, and the batch."""
        if self._is_writer:
            shutil.rmtree(self._path, ignore_errors=True)
            self._path.mkdir(parents=True)
            _write(self._path / _BATCH, batch.encode())
        save_state(self._path / "state", step=self._step)
        self.write_results([], updates=updates, schedule=num_updates)

    def write_results(
        self, reports: Sequence[UpdateReport], *, updates: Sequence[Sequence[int]], schedule: int
    ) -> None:
        """Write the results of the updates so far."""
        if not self._is_writer:
            return
        facts = {
            "schema": SCHEMA,
            "step": self._step,
            "policy_version": self._version,
            "num_updates": schedule,
            "settings": self._settings.model_dump(mode="json"),
            "updates": [list(rows) for rows in updates],
            "results": [(report.loss, report.grad_norm) for report in reports],
        }
        _write(self._path / _FACTS, msgspec.json.format(msgspec.json.encode(facts)))


def read_dump(path: Path) -> StepDump:
    """Read what `DumpWriter` wrote.

    Raises:
        SettingsError: it is no dumped step, or of another release.
    """
    try:
        facts = msgspec.json.decode((path / _FACTS).read_bytes())
        batch = TrainBatch.decode((path / _BATCH).read_bytes())
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise SettingsError(
            f"path={str(path)!r} is not a dumped step ({error}); give a folder dumps/step_N of a "
            "run, written with trainer.dump_steps"
        ) from error
    if facts["schema"] != SCHEMA:
        raise SettingsError(
            f"path={str(path)!r} has schema={facts['schema']}, this release reads {SCHEMA}"
        )
    return StepDump(
        path=path,
        step=facts["step"],
        policy_version=facts["policy_version"],
        settings=build_settings(facts["settings"], source=str(path / _FACTS)),
        num_updates=facts["num_updates"],
        batch=batch,
        updates=facts["updates"],
        results=[(loss, norm) for loss, norm in facts["results"]],
    )


def load_state(policy: Policy, dump: StepDump, *, head: ValueHead | None = None) -> None:
    """Put weights, optimizer and schedule where they were before the step, those of a critic's
    head too.

    Raises:
        SettingsError: the state is incomplete, or of another model.
    """
    found = latest_checkpoint(dump.path / "state")
    if found is None:
        raise SettingsError(f"path={str(dump.path / 'state')!r} holds no complete checkpoint")
    load_checkpoint(policy, found, critic=head)


def _write(path: Path, data: bytes) -> None:
    """Write a file that appears only when it is complete."""
    with whole_file(path) as writing, writing.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
