"""Sending a model in buckets: the double-buffered pipeline, and the sender for shared memory.

Every sending rank fills one bucket while servers read the one before; none holds a third. Servers
take the ranks' buckets one after the other, in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from outloop.buffer.errors import PublishFailed
from outloop.engine.publish.buckets.plan import Bucket
from outloop.engine.publish.sending.orders import Begin, Describe, End, Fill, Release
from outloop.engine.publish.sending.ranks import OrderedRanks, OwnRank, SendingRanks
from outloop.engine.publish.sending.sending_rank import Packing
from outloop.engine.publish.sending.sent import Sent
from outloop.engine.publish.server_client import ServerClient
from outloop.engine.publish.server_fanout import Fanout
from outloop.engine.publish.tensor_source import TensorSource


class Transport(Protocol):
    """Moves weights; used for one publish after the other."""

    is_joint: bool
    """Servers receive over one group, so that a failed or late one would cost the others time: its
    weights are loaded by the fallback."""

    def prepare(self, source: TensorSource, fanout: Fanout, kinds: Sequence[str]) -> None:
        """What can be done before servers are paused.

        Args:
            kinds: of the servers for which checksums are kept.
        """

    def stage(self, fanout: Fanout) -> None:
        """Send what servers can hold beside the weights that they go on serving.

        Only for servers that never write into those. What cannot be staged is left to `send`.
        """

    def send(self, fanout: Fanout) -> Sent:
        """Have paused servers load everything that `prepare` was given, less what was staged."""

    def end(self) -> None:
        """This publish is over, whether or not all of it was sent."""

    def release(self) -> None:
        """Give memory back that is kept for the next publish."""

    def close(self) -> None:
        """Release everything that is held."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A bucket that a rank has filled."""

    rank: int
    index: int
    places: Bucket


class Sender(Protocol):
    """Has the ranks send their buckets to every server of a fanout."""

    is_joint: bool

    def connect(self, fanout: Fanout, ranks: OrderedRanks) -> None:
        """Before servers are paused."""

    def start(self, fanout: Fanout, bucket: Outgoing) -> None:
        """Begin to send; the bucket's memory must not change until `finish`."""

    def finish(self, fanout: Fanout) -> None:
        """Wait for what `start` began; servers that did not take it fail."""

    def close(self) -> None:
        """Release everything that is held."""


def ranks_of(source: TensorSource, own: OwnRank, transport: str) -> OrderedRanks:
    """Where the source's tensors leave from: its ranks, or this process."""
    ranks = source if isinstance(source, SendingRanks) else own.reading(source)
    return OrderedRanks(ranks, transport)


class Bucketed:
    """Buckets in two staging buffers on each sending rank."""

    def __init__(self, name: str, sender: Sender, packing: Packing, own: OwnRank) -> None:
        """`name`: of the transport, in `publish.transport`."""
        self.is_joint = sender.is_joint
        self._name = name
        self._sender = sender
        self._packing = packing
        self._own = own
        self._ranks: OrderedRanks | None = None
        self._plans: list[list[Bucket]] = []
        self._sent = Sent()
        self._is_staged = False

    def prepare(self, source: TensorSource, fanout: Fanout, kinds: Sequence[str]) -> None:
        """Connect, and fill each rank's first bucket.

        Raises:
            PublishFailed: nothing to publish, no memory for it, or no server left.
        """
        self._sent = Sent()
        self._is_staged = False
        self._ranks = ranks_of(source, self._own, self._name)
        self._plans = self._packing.plan(self._ranks.shares)
        self._sender.connect(fanout, self._ranks)
        self._ranks.all(Begin(tuple(kinds)))
        self._ranks.all(Fill(0))

    def stage(self, fanout: Fanout) -> None:
        """Open the update and send every bucket, unless a server has an update open.

        Closing that one would make what it holds live.
        """
        refused: list[str] = []

        def open_update(client: ServerClient, deadline: float) -> None:
            if not client.open_update(deadline):
                refused.append(client.server_id)

        fanout.run("begin", open_update)
        if not refused:
            self._send_buckets(fanout)
            self._is_staged = True

    def send(self, fanout: Fanout) -> Sent:
        """Open the update and send every bucket, unless that was done; close the update."""
        assert self._ranks is not None
        if not self._is_staged:
            fanout.run("begin", ServerClient.begin_update)
            self._send_buckets(fanout)
        fanout.run("end", ServerClient.end_update)
        self._sent.complete(self._ranks, self._plans)
        return self._sent

    def _send_buckets(self, fanout: Fanout) -> None:
        assert self._ranks is not None
        num_rounds = max(map(len, self._plans))
        for index in range(num_rounds):
            to_fill = [index + 1] if index + 1 < num_rounds else []
            for rank, plan in enumerate(self._plans):
                if index >= len(plan):
                    continue
                self._sender.start(fanout, Outgoing(rank, index, plan[index]))
                # All ranks at once, while the first one's bucket travels.
                while to_fill:
                    self._ranks.all(Fill(to_fill.pop()))
                self._sender.finish(fanout)

    def end(self) -> None:
        """Release what this publish read and staged."""
        if self._ranks is not None:
            self._ranks.tell(End())

    def release(self) -> None:
        """Give staging back; the next publish takes it again."""
        if self._ranks is not None:
            self._ranks.tell(Release())

    def close(self) -> None:
        """Give this process's staging back and leave what the sender joined; other ranks do that
        for themselves when they end."""
        self._sender.close()
        self._own.close()


class PayloadSender:
    """Servers on this machine map the bucket: shared memory, or CUDA-IPC when staging is there."""

    is_joint = False

    def __init__(self, num_ranks: int = 1) -> None:
        """Each server has `num_ranks` tensor-parallel ranks, which all read whole buckets."""
        self._num_ranks = num_ranks
        self._ranks: OrderedRanks | None = None
        self._in_flight: dict[str, Future[None]] = {}

    def connect(self, fanout: Fanout, ranks: OrderedRanks) -> None:
        """Nothing to do."""
        self._ranks = ranks

    def start(self, fanout: Fanout, bucket: Outgoing) -> None:
        """Post the bucket's payload to every server.

        Raises:
            PublishFailed: the rank could not say where it lies.
        """
        assert self._ranks is not None
        servers = fanout.left
        order = Describe(bucket.rank, bucket.index, len(servers))
        outcome = self._ranks.one(bucket.rank, order)
        if outcome.error:
            raise PublishFailed(outcome.error)
        payloads = outcome.payloads
        if len(payloads) == 1:
            payloads *= len(servers)
        payload_of = dict(zip(servers, payloads, strict=True))

        def post(client: ServerClient, deadline: float) -> None:
            client.update_from_bucket([payload_of[client.server_id]] * self._num_ranks, deadline)

        self._in_flight = fanout.start(post)

    def finish(self, fanout: Fanout) -> None:
        """Wait for the answers."""
        started, self._in_flight = self._in_flight, {}
        fanout.finish("bucket", started)

    def close(self) -> None:
        """Nothing to remove."""
