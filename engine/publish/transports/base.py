"""Sending a model in buckets: the double-buffered pipeline, and the sender for shared memory.

One bucket is filled while servers read the one before; no third bucket is ever held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from outloop.engine.publish.buckets.pipeline import Filled, Filler, Sent
from outloop.engine.publish.buckets.plan import ALIGNMENT
from outloop.engine.publish.buckets.staging import Staging
from outloop.engine.publish.flattened_bucket import write_bucket
from outloop.engine.publish.server_client import ServerClient
from outloop.engine.publish.server_fanout import Fanout
from outloop.engine.publish.tensor_source import TensorSource
from outloop.engine.publish.verification.accounts import Account


class Transport(Protocol):
    """Moves weights; used for one publish after the other."""

    is_joint: bool
    """Servers receive over one group, so that a failed or late one would cost the others time: its
    weights are loaded by the fallback."""

    def prepare(
        self, source: TensorSource, fanout: Fanout, accounts: Mapping[str, Account]
    ) -> None:
        """What can be done before servers are paused."""

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


class Sender(Protocol):
    """Sends a bucket to every server of a fanout."""

    alignment: int
    is_joint: bool

    def connect(self, fanout: Fanout) -> None:
        """Before servers are paused."""

    def start(self, fanout: Fanout, bucket: Filled) -> None:
        """Begin to send; the bucket's memory must not change until `finish`."""

    def finish(self, fanout: Fanout) -> None:
        """Wait for what `start` began; servers that did not take it fail."""

    def close(self) -> None:
        """Release everything that is held."""


class Bucketed:
    """Buckets in two staging buffers, sent by a sender."""

    def __init__(
        self, sender: Sender, staging: Staging, *, bucket_bytes: int, dtype: torch.dtype
    ) -> None:
        self.is_joint = sender.is_joint
        self._sender = sender
        self._staging = staging
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._filler: Filler | None = None
        self._sent = Sent({})
        self._is_staged = False

    def prepare(
        self, source: TensorSource, fanout: Fanout, accounts: Mapping[str, Account]
    ) -> None:
        """Connect, and fill the first bucket.

        Raises:
            PublishFailed: nothing to publish, no memory for it, or no server left.
        """
        self._sent = Sent(accounts)
        self._is_staged = False
        self._sender.connect(fanout)
        self._filler = Filler(
            source,
            self._staging,
            bucket_bytes=self._bucket_bytes,
            dtype=self._dtype,
            alignment=self._sender.alignment,
            on_filled=self._sent.account,
        )
        self._filler.fill_first()

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
        assert self._filler is not None
        if not self._is_staged:
            fanout.run("begin", ServerClient.begin_update)
            self._send_buckets(fanout)
        fanout.run("end", ServerClient.end_update)
        self._sent.peak_bytes = self._filler.peak_bytes
        self._sent.bucket_bytes = self._filler.max_bytes
        return self._sent

    def _send_buckets(self, fanout: Fanout) -> None:
        assert self._filler is not None
        for bucket in self._filler.filled():
            if self._sent.num_buckets:
                self._sender.finish(fanout)
            self._sender.start(fanout, bucket)
            self._sent.count(bucket)
        self._sender.finish(fanout)

    def end(self) -> None:
        """Release what this publish read and staged."""
        self._filler = None
        self._staging.end()

    def release(self) -> None:
        """Give staging back; the next publish takes it again."""
        self._staging.close()

    def close(self) -> None:
        """Give staging back and leave what the sender joined."""
        self._sender.close()
        self._staging.close()


class PayloadSender:
    """Servers on this machine map the bucket: shared memory, or CUDA-IPC when staging is there."""

    alignment = ALIGNMENT
    is_joint = False

    def __init__(self, num_ranks: int = 1) -> None:
        """Each server has `num_ranks` tensor-parallel ranks, which all read whole buckets."""
        self._num_ranks = num_ranks
        self._in_flight: dict[str, Future[None]] = {}

    def connect(self, fanout: Fanout) -> None:
        """Nothing to do."""

    def start(self, fanout: Fanout, bucket: Filled) -> None:
        """Post the bucket's payload to every server."""
        self._in_flight = fanout.start(self._post_of(bucket, len(fanout.left)))

    def finish(self, fanout: Fanout) -> None:
        """Wait for the answers."""
        started, self._in_flight = self._in_flight, {}
        fanout.finish("bucket", started)

    def close(self) -> None:
        """Nothing to remove."""

    def _post_of(self, bucket: Filled, num_servers: int) -> Callable[[ServerClient, float], Any]:
        if bucket.content.is_cuda:
            # The copies must be complete before a reader starts. Nothing is needed afterwards:
            # torch waits for the reader's stream when the handle is released, before the answer.
            torch.cuda.current_stream(bucket.content.device).synchronize()

            def post_own(client: ServerClient, deadline: float) -> None:
                # Each reader of a CUDA handle holds a reference of its own.
                client.update_from_bucket([write_bucket(bucket.content, bucket.places)], deadline)

            return post_own
        num_ranks = self._num_ranks
        payload = write_bucket(bucket.content, bucket.places, num_readers=num_servers * num_ranks)

        def post(client: ServerClient, deadline: float) -> None:
            client.update_from_bucket([payload] * num_ranks, deadline)

        return post
