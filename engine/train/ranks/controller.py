"""Rank 0 leads, the others follow.

Owns: the commands by which rank 0 has every rank do the same work, and the followers' loop. Does
not own: the work (work), bytes between ranks (exchange). Invariant: only rank 0 knows Redis and
servers; a follower does nothing but what it is told, in order; when rank 0 ends, for whatever
reason, it says so, and a follower that hears nothing for the deadline ends by itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import structlog
from torch import Tensor

from outloop.buffer.errors import OutloopError, PartFailed
from outloop.buffer.records import CheckpointMark, Float32
from outloop.engine.publish.buckets.plan import TensorSpec
from outloop.engine.train.checkpoint.async_writer import Saving
from outloop.engine.train.checkpoint.checkpoint_format import Checkpoint, read_checkpoint
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.megatron.model_and_optimizer import PolicyConfig
from outloop.engine.train.ranks.collectives import broadcast_bytes
from outloop.engine.train.ranks.rank_worker import ModelName, Work
from outloop.engine.train.ranks.watchdog import Watchdog
from outloop.engine.train.step.update_metrics import UpdateReport

Result = TypeVar("Result")
_log = structlog.get_logger()


class Idle(msgspec.Struct, tag="idle"):
    """Rank 0 is alive and waits for something."""


class End(msgspec.Struct, tag="end"):
    """No command follows; `sentence` says what failed on rank 0, if anything did."""

    sentence: str = ""


class Build(msgspec.Struct, tag="build"):
    """See `Work.build`."""

    num_updates: int


class LoadReference(msgspec.Struct, tag="load_reference"):
    """See `Work.load_reference`."""

    pinned_hash: str


class LoadBatch(msgspec.Struct, tag="load_batch"):
    """See `Work.load_batch`."""

    batch: bytes


class SetColumn(msgspec.Struct, tag="set_column"):
    """See `Work.set_column`."""

    name: str
    values: bytes


class ScoreReference(msgspec.Struct, tag="score_reference"):
    """See `Work.score_reference`."""

    rows: list[int]


class RecomputeProximal(msgspec.Struct, tag="recompute_proximal"):
    """See `Work.recompute_proximal`."""

    updates: list[list[int]]


class Update(msgspec.Struct, tag="update"):
    """See `Work.update`; without a version, `Work.sft_update`."""

    rows: list[int] = []
    policy_version: int | None = None
    norm_limit: float | None = None
    """None: no limit."""


class Scores(msgspec.Struct, tag="score"):
    """See `Work.score`."""

    model: ModelName
    rows: list[int] | None


class ScorePrompts(msgspec.Struct, tag="score_prompts"):
    """See `Work.score_prompts`."""

    prompts: list[list[int]]


class Load(msgspec.Struct, tag="load"):
    """See `Work.load`."""

    path: str


class Save(msgspec.Struct, tag="save"):
    """See `Work.save`."""

    step: int
    mark: CheckpointMark
    reference_hash: str


class SaveState(msgspec.Struct, tag="save_state"):
    """See `Work.save_state`."""

    path: str
    step: int


class Place(msgspec.Struct, tag="place"):
    """Take this rank's tensors off its device, or put them back."""

    is_away: bool


class SaveFolder(msgspec.Struct, tag="save_folder"):
    """See `Work.save_folder`."""


class Read(msgspec.Struct, tag="read"):
    """Send what this rank holds of these tensors to rank 0."""

    names: list[str]


Command = (
    Idle
    | End
    | Build
    | LoadReference
    | LoadBatch
    | SetColumn
    | ScoreReference
    | RecomputeProximal
    | Update
    | Scores
    | ScorePrompts
    | Load
    | Save
    | SaveState
    | Place
    | SaveFolder
    | Read
)
_DECODER = msgspec.msgpack.Decoder(Command)


class Lead:
    """Rank 0's face of all ranks; a `TensorSource` of the policy for publishing."""

    def __init__(self, work: Work, watchdog: Watchdog, *, num_ranks: int, timeout_s: float) -> None:
        """`timeout_s`: how long followers wait for a word, trainer.rank_timeout_s."""
        self.work = work
        self.watchdog = watchdog
        self._has_followers = num_ranks > 1
        self._interval_s = timeout_s / 8.0
        self._told_at = time.monotonic()

    @property
    def config(self) -> PolicyConfig:
        """Of the policy."""
        return self.work.config

    def idle(self) -> None:
        """To be called wherever rank 0 waits for others than its ranks; cheap enough for polls.

        Raises:
            FenceExpired: the leases are lost.
        """
        self.watchdog.progress()
        if self._has_followers and time.monotonic() - self._told_at > self._interval_s:
            self._tell(Idle)

    def build(self, *, num_updates: int) -> None:
        """See `Work.build`."""
        self._all(
            "build",
            lambda: Build(num_updates),
            lambda: self.work.build(num_updates=num_updates),
        )

    def load_reference(self, *, pinned_hash: str) -> str:
        """See `Work.load_reference`."""
        return self._all(
            "load the reference",
            lambda: LoadReference(pinned_hash),
            lambda: self.work.load_reference(pinned_hash=pinned_hash),
        )

    @property
    def batch(self) -> TrainBatch:
        """The rows of the step."""
        return self.work.batch

    def load_batch(self, batch: TrainBatch) -> None:
        """See `Work.load_batch`: what a step trains is sent to the other ranks once, here."""
        self._all(
            "load the batch",
            lambda: LoadBatch(batch.encode()),
            lambda: self.work.load_batch(batch),
        )

    def set_column(self, name: str, values: Float32) -> None:
        """See `Work.set_column`."""
        self._all(
            f"set {name}",
            lambda: SetColumn(name, values.tobytes()),
            lambda: self.work.set_column(name, values),
        )

    def score_reference(self, rows: Sequence[int]) -> Float32:
        """See `Work.score_reference`."""
        return self._all(
            "score under the reference",
            lambda: ScoreReference(list(rows)),
            lambda: self.work.score_reference(rows, on_microbatch=self.watchdog.progress),
        )

    def recompute_proximal(self, updates: Sequence[Sequence[int]]) -> dict[str, float]:
        """See `Work.recompute_proximal`."""
        return self._all(
            "score under the policy",
            lambda: RecomputeProximal([list(rows) for rows in updates]),
            lambda: self.work.recompute_proximal(updates, on_microbatch=self.watchdog.progress),
        )

    def update(
        self,
        rows: Sequence[int],
        *,
        policy_version: int,
        norm_limit: float = math.inf,
    ) -> UpdateReport:
        """See `Work.update`."""
        limit = norm_limit if math.isfinite(norm_limit) else None
        return self._all(
            f"update after version {policy_version}",
            lambda: Update(list(rows), policy_version, limit),
            lambda: self.work.update(
                rows,
                policy_version=policy_version,
                norm_limit=norm_limit,
                on_microbatch=self.watchdog.progress,
            ),
        )

    def sft_update(self) -> UpdateReport:
        """See `Work.sft_update`."""
        return self._all("update", Update, self.work.sft_update)

    def score(self, name: ModelName, rows: Sequence[int] | None = None) -> Float32:
        """See `Work.score`."""
        return self._all(
            f"score under the {name}",
            lambda: Scores(name, None if rows is None else list(rows)),
            lambda: self.work.score(name, rows, on_microbatch=self.watchdog.progress),
        )

    def load(self, checkpoint: Checkpoint) -> None:
        """See `Work.load`."""
        self._all(
            "load a checkpoint",
            lambda: Load(str(checkpoint.path)),
            lambda: self.work.load(checkpoint),
        )

    def save(
        self, *, step: int, mark: CheckpointMark, reference_hash: str, kept: bytes = b""
    ) -> Saving:
        """See `Work.save`."""
        return self._all(
            f"save step {step}",
            lambda: Save(step, mark, reference_hash),
            lambda: self.work.save(step=step, mark=mark, reference_hash=reference_hash, kept=kept),
        )

    def save_state(self, folder: Path, *, step: int) -> None:
        """See `Work.save_state`."""
        self._all(
            f"save the state before step {step}",
            lambda: SaveState(str(folder), step),
            lambda: self.work.save_state(folder, step=step),
        )

    def leave(self) -> None:
        """Take every rank's tensors off its device, if servers share it and they are there."""
        if self.work.placement.can_leave:
            self._all("leave the device", lambda: Place(True), self.work.placement.leave)

    def come_back(self) -> None:
        """Put every rank's tensors back, if they are away."""
        if self.work.placement.is_away:
            self._all(
                "come back to the device", lambda: Place(False), self.work.placement.come_back
            )

    @contextmanager
    def present(self) -> Iterator[None]:
        """Have the tensors on the devices for a while, and leave again if they were away."""
        was_away = self.work.placement.is_away
        self.come_back()
        try:
            yield
        finally:
            if was_away:
                self.leave()

    def save_folder(self) -> None:
        """See `Work.save_folder`."""
        self._all("write the Hugging Face folder", SaveFolder, self.work.save_folder)

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """Every tensor of the policy, in the order of a forward pass."""
        return self.work.exports.specs

    def read(
        self, specs: Sequence[TensorSpec], into: Sequence[Tensor] | None = None
    ) -> Iterator[Tensor]:
        """The full tensors of one bucket, one at a time; every rank takes part in each.

        A reader that stops early leaves no rank waiting: the rest of the bucket is gathered and
        forgotten.
        """
        names = [spec.name for spec in specs]
        self._tell(lambda: Read(names))
        with self.watchdog.enter("gather weights"):
            tensors = self.work.exports.gather(names, into)
            try:
                yield from tensors
            finally:
                for _ in tensors:
                    pass

    def score_prompts(self, prompts: Sequence[Sequence[int]]) -> list[Float32]:
        """See `Work.score_prompts`."""
        return self._all(
            "score prompts",
            lambda: ScorePrompts([list(map(int, ids)) for ids in prompts]),
            lambda: self.work.score_prompts(prompts, on_microbatch=self.watchdog.progress),
        )

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Tells the followers when the block ends, or what failed in it."""
        try:
            yield
        except Exception as error:
            self._say_end(str(error) or repr(error))
            raise
        self._say_end("")

    def _say_end(self, sentence: str) -> None:
        if not self._has_followers:
            return
        try:
            self._tell(lambda: End(sentence))
        except (RuntimeError, OutloopError):
            # They are gone already; what failed here is what must be told.
            _log.warning("followers_gone", sentence=sentence)

    def _all(
        self, phase: str, command: Callable[[], Command], work: Callable[[], Result]
    ) -> Result:
        self._tell(command)
        with self.watchdog.enter(phase):
            return work()

    def _tell(self, command: Callable[[], Command]) -> None:
        """Commands are made only for followers: encoding a batch is not free."""
        if self._has_followers:
            with self.watchdog.enter("tell the other ranks"):
                broadcast_bytes(msgspec.msgpack.encode(command()))
            self._told_at = time.monotonic()


def follow(work: Work, watchdog: Watchdog) -> None:
    """A follower's life: do what rank 0 says until it says that it is over.

    Raises:
        DeadlineExceeded, RankKilled: rank 0 said nothing for the deadline, or is gone.
        PartFailed: rank 0 failed; its sentence.
    """
    while True:
        with watchdog.enter("wait for rank 0", is_watched=False):
            command = _DECODER.decode(broadcast_bytes(b""))
        if isinstance(command, End):
            if command.sentence:
                raise PartFailed(f"trainer rank 0 failed: {command.sentence}")
            return
        if not isinstance(command, Idle):
            with watchdog.enter(type(command).__name__.lower()):
                _perform(command, work, watchdog)


def _perform(command: Command, work: Work, watchdog: Watchdog) -> None:
    match command:
        case Build(num_updates):
            work.build(num_updates=num_updates)
        case LoadReference(pinned_hash):
            work.load_reference(pinned_hash=pinned_hash)
        case Load(path):
            work.load(read_checkpoint(Path(path)))
        case Save(step, mark, reference_hash):
            work.save(step=step, mark=mark, reference_hash=reference_hash)
        case SaveState(path, step):
            work.save_state(Path(path), step=step)
        case Place(is_away):
            (work.placement.leave if is_away else work.placement.come_back)()
        case SaveFolder():
            work.save_folder()
        case Read(names):
            work.exports.send(names)
        case _:
            _compute(command, work, watchdog)


def _compute(command: Command, work: Work, watchdog: Watchdog) -> None:
    """What is done with the rows of a step."""
    match command:
        case LoadBatch(batch):
            work.load_batch(TrainBatch.decode(batch))
        case SetColumn(name, values):
            work.set_column(name, np.frombuffer(values, np.float32))
        case ScoreReference(rows):
            work.score_reference(rows, on_microbatch=watchdog.progress)
        case RecomputeProximal(updates):
            work.recompute_proximal(updates, on_microbatch=watchdog.progress)
        case Update(_, None):
            work.sft_update()
        case Update(rows, int() as version, limit):
            _update(work, rows, version, limit, watchdog)
        case Scores(model, chosen):
            work.score(model, chosen, on_microbatch=watchdog.progress)
        case ScorePrompts(prompts):
            work.score_prompts(prompts, on_microbatch=watchdog.progress)


def _update(
    work: Work, rows: list[int], version: int, limit: float | None, watchdog: Watchdog
) -> None:
    """A refusal is every rank's; what becomes of it is for rank 0 to say."""
    try:
        work.update(
            rows,
            policy_version=version,
            norm_limit=math.inf if limit is None else limit,
            on_microbatch=watchdog.progress,
        )
    except FloatingPointError as error:
        _log.warning("update_refused", sentence=str(error))
