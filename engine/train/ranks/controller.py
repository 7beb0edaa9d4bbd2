"""Rank 0 decides what is done next, and every rank does it.

Only rank 0 knows Redis and servers. It announces an operation of `RankWorker` with its arguments,
by one broadcast, and then every rank runs that same method. When rank 0 ends, for whatever reason,
it announces that; a rank that receives nothing within the process group's deadline ends on its own.
"""

from __future__ import annotations

import functools
import inspect
import time
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec
import structlog
from torch import Tensor

from outloop.buffer.errors import OutloopError, PartFailed, UpdateRefused
from outloop.buffer.records import Float32
from outloop.engine.publish.buckets.plan import Place, TensorSpec
from outloop.engine.publish.sending.orders import Order, Outcome
from outloop.engine.train.data.train_batch import plain, restored
from outloop.engine.train.megatron.model_config import PolicyConfig
from outloop.engine.train.ranks.collectives import broadcast_bytes
from outloop.engine.train.ranks.rank_worker import RankWorker
from outloop.engine.train.ranks.watchdog import Watchdog

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
_LOOK_S = 1.0
"""Between messages to ranks that wait, which fail where one is lost: torchrun stops the others
then, and ends them 30 s later, so a wait for what a lost rank had to do has to end before."""
_log = structlog.get_logger()


class Idle(msgspec.Struct, tag="idle"):
    """Rank 0 is alive and waits for something."""


class Call(msgspec.Struct, tag="call"):
    """Every rank runs this method of its worker."""

    method: str
    arguments: dict[str, msgspec.Raw]
    """In msgpack; the method's annotations are the types to decode."""

    @classmethod
    def of(cls, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
        """A call of a method of `RankWorker`, without the worker.

        Raises:
            TypeError: the method does not take these arguments.
        """
        given = inspect.signature(operation).bind(None, *args, **kwargs).arguments
        return cls(
            operation.__name__,
            {
                name: msgspec.Raw(msgspec.msgpack.encode(value, enc_hook=plain))
                for name, value in given.items()
                if name != "self"
            },
        )

    def perform(self, worker: RankWorker) -> None:
        """Run it on this rank's worker; an update that every rank refuses is logged."""
        hints = _hints_of(self.method)
        decoded = {
            name: msgspec.msgpack.decode(data, type=hints[name], dec_hook=restored)
            for name, data in self.arguments.items()
        }
        try:
            getattr(worker, self.method)(**decoded)
        except UpdateRefused as error:
            # Every rank refuses alike; rank 0 decides what follows.
            _log.warning("update_refused", sentence=str(error))


class End(msgspec.Struct, tag="end"):
    """The run is over; `sentence` is the failure of rank 0, empty without one."""

    sentence: str = ""


Message = Idle | Call | End
_DECODER = msgspec.msgpack.Decoder(Message)


class RankController:
    """All ranks of a run, as rank 0 sees them; a `TensorSource` of the policy for publishing, and
    the `SendingRanks` of it."""

    def __init__(
        self, worker: RankWorker, watchdog: Watchdog, *, num_ranks: int, timeout_s: float
    ) -> None:
        """`timeout_s`: how long the other ranks wait for a message, trainer.rank_timeout_s."""
        self.worker = worker
        self.watchdog = watchdog
        self._has_followers = num_ranks > 1
        self._interval_s = min(timeout_s / 8.0, _LOOK_S)
        self._sent_at = time.monotonic()

    @property
    def config(self) -> PolicyConfig:
        """Configuration of the policy."""
        return self.worker.config

    def run(
        self,
        operation: Callable[Concatenate[RankWorker, Parameters], Result],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Result:
        """Have every rank run a method of its worker; returns what it returns on this rank.

        Raises:
            DeadlineExceeded, RankKilled, PartFailed, SettingsError: another rank did not come, or
                failed; and whatever the method raises here.
        """
        self._call(operation, *args, **kwargs)
        with self.watchdog.enter(_phase_of(operation.__name__)):
            return operation(self.worker, *args, **kwargs)

    def idle(self) -> None:
        """Call this wherever rank 0 waits for other processes; cheap enough for polls.

        Raises:
            FenceExpired: the leases are lost.
            RankKilled, DeadlineExceeded: a rank is lost.
        """
        self.watchdog.progress()
        self.look()

    def look(self) -> None:
        """Find out whether a rank is lost; for polls of a wait for something in this process.

        Raises:
            RankKilled, DeadlineExceeded: one is.
        """
        if self._has_followers and time.monotonic() - self._sent_at > self._interval_s:
            self._send(Idle())

    def leave(self, *, keeps_weights: bool = False) -> None:
        """Take every rank's tensors off its device, if servers share it: all that is there, or all
        but the policy's weights."""
        if self.worker.placement.can_leave(keeps_weights=keeps_weights):
            self.run(RankWorker.leave_device, keeps_weights=keeps_weights)

    def come_back(self, *, weights_only: bool = False) -> None:
        """Put back what is away of every rank's tensors, or of the policy's weights alone."""
        placement = self.worker.placement
        if placement.is_away or (placement.has_left and not weights_only):
            self.run(RankWorker.come_back_to_device, weights_only=weights_only)

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """Every tensor of the policy, in the order of a forward pass."""
        return self.worker.exports.specs

    def read(
        self, specs: Sequence[TensorSpec], into: Sequence[Tensor] | None = None
    ) -> Iterator[Tensor]:
        """The full tensors of one bucket, one at a time; every rank takes part in each.

        A reader that stops early leaves no rank waiting: the rest of the bucket is gathered and
        discarded.
        """
        names = [spec.name for spec in specs]
        self._call(RankWorker.send_weights, names)
        with self.watchdog.enter(_phase_of(RankWorker.send_weights.__name__)):
            tensors = self.worker.exports.gather(names, into)
            try:
                yield from tensors
            finally:
                for _ in tensors:
                    pass

    @property
    def shares(self) -> Sequence[Sequence[TensorSpec]]:
        """Of every rank."""
        return self.worker.shares.shares

    def carry_out(self, transport: str, order: Order) -> Sequence[Outcome]:
        """See `SendingRanks`."""
        return self.run(RankWorker.carry_out, transport, order)

    @property
    def gpus(self) -> tuple[str, ...]:
        """Of each rank; empty where they are not known."""
        return self.worker.gpus

    def stage(
        self, places: Sequence[Place], *, index: int, num_bytes: int, num_readers: Sequence[int]
    ) -> tuple[Tensor, list[list[str]]]:
        """See `DeviceSource`."""
        payloads = self.run(
            RankWorker.stage_bucket,
            [place.spec.name for place in places],
            [place.start for place in places],
            dtype=str(places[0].spec.dtype).removeprefix("torch."),
            index=index,
            num_bytes=num_bytes,
            num_readers=list(num_readers),
        )
        return self.worker.staged, payloads

    def end_staging(self) -> None:
        """See `DeviceSource`."""
        self.run(RankWorker.end_staging)

    def score_prompts(self, prompts: Sequence[Sequence[int]]) -> list[Float32]:
        """See `RankWorker.score_prompts`."""
        return self.run(RankWorker.score_prompts, [list(map(int, ids)) for ids in prompts])

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Announces to the other ranks that the block ended, or what failed in it."""
        try:
            yield
        except Exception as error:
            self._send_end(str(error) or repr(error))
            raise
        self._send_end("")

    def _send_end(self, sentence: str) -> None:
        if not self._has_followers:
            return
        try:
            self._send(End(sentence))
        except (RuntimeError, OutloopError):
            # They ended already; the failure of this rank is the one to report.
            _log.warning("ranks_gone", sentence=sentence)

    def _call(self, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Announce an operation; encoding a batch is not free, so only where others listen."""
        if self._has_followers:
            self._send(Call.of(operation, *args, **kwargs))

    def _send(self, message: Message) -> None:
        with self.watchdog.enter("send to the other ranks"):
            broadcast_bytes(msgspec.msgpack.encode(message))
        self._sent_at = time.monotonic()


def follow(worker: RankWorker, watchdog: Watchdog) -> None:
    """Run what rank 0 announces until it announces the end; every other rank does this.

    Raises:
        DeadlineExceeded, RankKilled: rank 0 sent nothing for the deadline, or is gone.
        PartFailed: rank 0 failed; its sentence.
    """
    while True:
        with watchdog.enter("wait for rank 0", is_watched=False):
            message = _DECODER.decode(broadcast_bytes(b""))
        match message:
            case End(sentence) if sentence:
                raise PartFailed(f"trainer rank 0 failed: {sentence}")
            case End():
                return
            case Call() as call:
                with watchdog.enter(_phase_of(call.method)):
                    call.perform(worker)


def _phase_of(method: str) -> str:
    return method.replace("_", " ")


@functools.cache
def _hints_of(method: str) -> dict[str, Any]:
    return typing.get_type_hints(getattr(RankWorker, method))
