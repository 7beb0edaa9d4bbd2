"""What each step took and gave: `steps.jsonl` beside the archive, written by the trainer.

With the archive's episodes and a checkpoint before it a step can be made again. Losing the file
loses nothing of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from outloop.buffer import json_lines
from outloop.buffer.trajectories.folder import FOLDER

STEPS = "steps.jsonl"


class UpdateResult(msgspec.Struct, frozen=True, kw_only=True):
    """An optimizer update."""

    loss: float
    grad_norm: float
    """Before clipping."""
    gradient_hash: str
    """Of every bit of the gradients before clipping, all ranks together."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A step."""

    step: int
    policy_version: int
    """That the weights had before it."""
    takes: list[list[str]]
    """Groups in the order in which they were taken; what was dropped was taken for again."""
    depths: dict[int, int]
    """How many publishes into the run's surviving lineage each version in them is."""
    max_age: int | None
    """How old tokens might be when they were taken."""
    num_ranks: int
    updates: list[UpdateResult]


def write_step(run_dir: Path, record: StepRecord) -> None:
    """Append a step.

    Raises:
        OSError: it cannot be written.
    """
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with json_lines.open_for_appending(folder / STEPS) as file:
        json_lines.append_line(file, msgspec.json.encode(record))


def read_steps(run_dir: Path) -> dict[int, StepRecord]:
    """Step -> its record, of the lineage that survived; a line without its end is left out."""
    found: dict[int, StepRecord] = {}
    for row in json_lines.read_rows(run_dir / FOLDER / STEPS):
        record = msgspec.convert(row, StepRecord, str_keys=True)
        # A resume from an older checkpoint gives up what came after it.
        found = {step: one for step, one in found.items() if step < record.step}
        found[record.step] = record
    return found


def missing_steps(known: Sequence[int], first: int, last: int) -> list[int]:
    """Steps from `first` to `last` that have no record."""
    return [step for step in range(first, last + 1) if step not in known]
