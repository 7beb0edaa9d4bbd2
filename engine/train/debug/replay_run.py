"""Makes a step of a run again, from its archive and the newest checkpoint before it.

Without other settings the gradients are those of the run, bit by bit: on the same kind of machine,
for a run on one rank. What several ranks made is made here by one, equal to rounding. With other
settings the steps before are made as they were, and the step itself with these.
"""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from outloop.buffer.errors import SettingsError
from outloop.buffer.records import CheckpointMark, Group, Lease
from outloop.buffer.run import load_run_settings, with_found_paths
from outloop.buffer.settings import Settings, build_settings, with_overrides
from outloop.buffer.trajectories.folder import FOLDER
from outloop.buffer.trajectories.steps import StepRecord, missing_steps, read_steps
from outloop.engine.train.checkpoint.checkpoint_format import complete_checkpoints
from outloop.engine.train.debug.recorded_groups import Recording, group_of
from outloop.engine.train.megatron import parallel_config

_ROUNDING = 1e-4
"""Relative tolerance: one process adds up in another order than several ranks."""
_ALONE = (
    "trainer.num_ranks=1", "trainer.checkpoint_every=0", "trainer.resume=true", "eval.every=0",
    "trajectories.enabled=true", "trainer.keep_checkpoints=2",
)  # fmt: skip

TrainSteps = Callable[[Settings, Path, "RecordedSteps", threading.Event], None]
"""Trains what the recorded steps hold, in a run folder with these settings."""


class RecordedSteps(Recording):
    """The groups of recorded steps, as each step took them; sets `stop` when none is left."""

    def __init__(
        self,
        records: Sequence[StepRecord],
        groups: Mapping[str, Group],
        stop: threading.Event,
    ) -> None:
        super().__init__((), stop)
        self._stop = stop
        self._records = list(records)
        self._all = groups
        self._step = 0
        """Of the records, which is being made."""
        self._take = 0
        """Of its takes, which is next."""

    def take(
        self,
        num_groups: int,
        *,
        fence: int,
        policy_version: int,
        timeout_s: float,
        on_wait: Callable[[str], None],
        should_stop: Callable[[], bool],
    ) -> list[Lease]:
        """The groups of the step's next take; none and a stop behind the last step."""
        while self._step < len(self._records):
            record = self._records[self._step]
            if self._take < len(record.takes):
                chosen = record.takes[self._take]
                self._take += 1
                return [
                    Lease(
                        group=self._all[one],
                        fence=fence,
                        deadline=math.inf,
                        max_age=record.max_age,
                    )
                    for one in chosen
                ]
            self._step, self._take = self._step + 1, 0
        self._stop.set()
        return []

    def recover(self, mark: CheckpointMark | None, *, fence: int) -> int:
        """One below the version that the weights had before the first of the steps."""
        return self._records[0].policy_version - 1

    def version_depths(self, versions: Collection[int]) -> dict[int, int]:
        """As they were; the weights' own version counts as that of the run, whatever its number."""
        record = self._records[min(self._step, len(self._records) - 1)]
        known = {version: record.depths.get(version, version) for version in versions}
        known[max(versions)] = record.depths.get(record.policy_version, record.policy_version)
        return known


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """A step, then and now."""

    then: StepRecord
    now: StepRecord
    has_other_settings: bool
    first_step: int
    """That had to be made again to come to it."""

    @property
    def is_equal(self) -> bool:
        """Bit by bit for a run on one rank, otherwise to rounding."""
        if len(self.then.updates) != len(self.now.updates):
            return False
        pairs = list(zip(self.then.updates, self.now.updates, strict=True))
        if self.then.num_ranks == 1:
            return all(one.gradient_hash == other.gradient_hash for one, other in pairs)
        t = _ROUNDING
        return all(
            math.isclose(one.grad_norm, other.grad_norm, rel_tol=t)
            and math.isclose(one.loss, other.loss, rel_tol=t, abs_tol=t / 10)
            for one, other in pairs
        )

    def lines(self) -> list[str]:
        """For a person: each update, then and now."""
        shown = []
        for index in range(max(len(self.then.updates), len(self.now.updates))):
            for when, record in (("then", self.then), ("now ", self.now)):
                if index < len(record.updates):
                    one = record.updates[index]
                    shown.append(
                        f"update {index} {when}: loss {one.loss!r}  grad_norm {one.grad_norm!r}  "
                        f"gradients {one.gradient_hash}"
                    )
        return shown


def replay_run(
    run_dir: Path, step: int, overrides: Sequence[str], *, train_steps: TrainSteps
) -> Replayed:
    """Make step `step` of the run in `run_dir` again.

    What it writes is in RUN/replays/step_N; the run itself is only read.

    Raises:
        SettingsError: the archive does not hold what the step needs; the sentence says what.
    """
    run_dir = run_dir.absolute()
    settings = with_found_paths(load_run_settings(run_dir), run_dir)
    records = read_steps(run_dir)
    if step not in records:
        held = f"steps {min(records)} to {max(records)}" if records else "none"
        raise SettingsError(
            f"--step {step}: the archive of {run_dir} holds {held}; steps are recorded while "
            "trajectories are kept (trajectories.enabled)"
        )
    before = [one for one in complete_checkpoints(run_dir / "checkpoints") if one.step < step]
    start = max(before, key=lambda one: one.step, default=None)
    first = 1 if start is None else start.step + 1
    if missing := missing_steps(list(records), first, step):
        raise SettingsError(
            f"--step {step}: the newest checkpoint before it is of step {first - 1}, and steps "
            f"{missing[:5]} between them are not recorded; they were made without keeping "
            "trajectories"
        )
    wanted = [records[one] for one in range(first, step + 1)]
    groups = _read_groups(run_dir, wanted, step)
    alone = with_overrides(_on_one_rank(settings), _ALONE)
    folder = run_dir / "replays" / f"step_{step}"
    shutil.rmtree(folder, ignore_errors=True)
    checkpoint = None if start is None else start.path
    last = wanted
    if overrides:
        last = wanted[-1:]
        if wanted[:-1]:
            checkpoint = _train(
                alone, folder / "before", wanted[:-1], groups, checkpoint, train_steps
            )
            checkpoint = max(
                complete_checkpoints(checkpoint / "checkpoints"), key=lambda one: one.step
            ).path
        alone = with_overrides(alone, tuple(overrides))
    made = _train(alone, folder / "step", last, groups, checkpoint, train_steps)
    return Replayed(
        then=records[step],
        now=read_steps(made)[step],
        has_other_settings=bool(overrides),
        first_step=first,
    )


def _train(
    settings: Settings,
    folder: Path,
    records: Sequence[StepRecord],
    groups: Mapping[str, Group],
    checkpoint: Path | None,
    train_steps: TrainSteps,
) -> Path:
    """Make these steps in a run folder of their own, from a checkpoint of another; the folder."""
    here = (f'run.dir="{folder.parent}"', f'run.name="{folder.name}"')
    folder.mkdir(parents=True)
    if checkpoint is not None:
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / checkpoint.name).symlink_to(checkpoint.resolve())
    stop = threading.Event()
    train_steps(with_overrides(settings, here), folder, RecordedSteps(records, groups, stop), stop)
    return folder


def _on_one_rank(settings: Settings) -> Settings:
    tree = settings.model_dump(mode="json")
    raw = tree["trainer"]["megatron"]
    spread = {*parallel_config.FIELDS, "sequence_parallel"}
    tree["trainer"]["megatron"] = {name: raw[name] for name in raw.keys() - spread}
    tree["trainer"]["num_ranks"] = 1
    return build_settings(tree, source="settings.json")


def _read_groups(run_dir: Path, records: Sequence[StepRecord], step: int) -> dict[str, Group]:
    """Every group that these steps took, from the archive.

    Raises:
        SettingsError: some are not there.
    """
    from outloop.buffer.trajectories.reading import read_groups_of

    wanted = {one for record in records for take in record.takes for one in take}
    found = read_groups_of(run_dir / FOLDER, wanted)
    if missing := sorted(wanted - found.keys()):
        raise SettingsError(
            f"--step {step}: the archive of {run_dir} lacks {len(missing)} of {len(wanted)} groups "
            f"that it needs ({', '.join(missing[:3])}): retention removed them, only a share is "
            "kept, or no checkpoint contains them yet. Take a later step, or stop the run first"
        )
    return {one: group_of(one, slot, whole) for one, (slot, whole) in found.items()}
