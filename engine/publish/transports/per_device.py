"""Buckets that each trainer rank stages on its own device, for the server ranks on that device.

Every trainer rank holds every bucket for a moment, so that each rank of a server, of any
tensor-parallel size, reads it where it is: over CUDA-IPC nothing leaves a GPU but what other
trainer ranks hold of a tensor. At most two buckets are held on each device.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import torch

from outloop.buffer.errors import PublishFailed
from outloop.engine.publish.buckets.plan import ALIGNMENT, Bucket, largest, plan_buckets
from outloop.engine.publish.sending.sending_rank import refuse_repeats
from outloop.engine.publish.sending.sent import Sent
from outloop.engine.publish.server_client import ServerClient
from outloop.engine.publish.server_fanout import Fanout
from outloop.engine.publish.tensor_source import DeviceSource, TensorSource
from outloop.engine.publish.verification.accounts import Account, accounts_for


class PerDevice:
    """Hands each server's ranks the payloads of the trainer ranks beside them."""

    is_joint = False

    def __init__(
        self, *, bucket_bytes: int, dtype: torch.dtype, num_ranks: int, is_gpu: bool = False
    ) -> None:
        """Each server has `num_ranks` tensor-parallel ranks; `is_gpu`: on GPUs."""
        self._is_gpu = is_gpu
        self._accounts: dict[str, Account] = {}
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._num_ranks = num_ranks
        self._source: DeviceSource | None = None
        self._buckets: list[Bucket] = []
        self._sent = Sent()

    def prepare(self, source: TensorSource, fanout: Fanout, kinds: Sequence[str]) -> None:
        """Plan, and leave out servers on devices that no trainer rank has.

        Raises:
            PublishFailed: no tensor, one that comes twice, or no server left.
        """
        if not isinstance(source, DeviceSource):
            raise PublishFailed("these tensors are in one process, which stages on one device")
        planned = [dataclasses.replace(spec, dtype=self._dtype) for spec in source.specs]
        refuse_repeats(planned)
        self._source, self._sent = source, Sent()
        self._accounts = accounts_for(
            kinds, num_ranks=self._num_ranks, specs=planned, is_gpu=self._is_gpu
        )
        self._buckets = list(plan_buckets(planned, self._bucket_bytes, ALIGNMENT))
        for server_id in fanout.left:
            gpus = fanout.gpus_of(server_id)
            away = [gpu for gpu in gpus if gpu not in source.gpus]
            if away or len(gpus) != self._num_ranks:
                fanout.fail(
                    server_id,
                    "connect",
                    f"{server_id} has GPUs {list(gpus)}, the trainer's ranks have "
                    f"{list(source.gpus)}; each of its {self._num_ranks} needs a rank beside it. "
                    "Set server.gpus and trainer.gpus, or another publish.transport",
                )
        fanout.require_some()

    def stage(self, fanout: Fanout) -> None:
        """Nothing: servers that share the trainer's devices are asleep before it sends."""

    def send(self, fanout: Fanout) -> Sent:
        """Open the update, send every bucket, close the update."""
        assert self._source is not None
        source, sent, num_bytes = self._source, self._sent, largest(self._buckets)
        fanout.run("begin", ServerClient.begin_update)
        under_way: dict[str, Future[None]] = {}
        for index, places in enumerate(self._buckets):
            ranks = self._ranks_beside(fanout, source)
            readers = Counter(rank for beside in ranks.values() for rank in beside)
            num_readers = [readers[rank] for rank in range(len(source.gpus))]
            content, payloads = source.stage(
                places, index=index, num_bytes=num_bytes, num_readers=num_readers
            )
            for account in self._accounts.values():
                account.add(content, places)
            if index:
                fanout.finish("bucket", under_way)
            under_way = self._post(fanout, ranks, payloads)
            sent.num_bytes += sum(place.end - place.start for place in places)
        fanout.finish("bucket", under_way)
        fanout.run("end", ServerClient.end_update)
        sent.sums = {kind: account.sums() for kind, account in self._accounts.items()}
        sent.num_buckets = len(self._buckets)
        sent.bucket_bytes = num_bytes
        sent.peak_bytes = num_bytes * min(2, len(self._buckets))
        return sent

    def end(self) -> None:
        """Release what this publish staged."""
        source, self._source = self._source, None
        if source is not None:
            source.end_staging()

    def release(self) -> None:
        """No memory is held between publishes."""

    def close(self) -> None:
        """The ranks remove their staging when they end."""

    def _ranks_beside(self, fanout: Fanout, source: DeviceSource) -> dict[str, list[int]]:
        """For each server that is left, the trainer rank on the GPU of each of its own."""
        rank_of = {gpu: rank for rank, gpu in enumerate(source.gpus)}
        return {
            server_id: [rank_of[gpu] for gpu in fanout.gpus_of(server_id)]
            for server_id in fanout.left
        }

    def _post(
        self,
        fanout: Fanout,
        ranks: Mapping[str, Sequence[int]],
        payloads: Sequence[Sequence[str]],
    ) -> dict[str, Future[None]]:
        """Give each server its payloads; each payload has one reader."""
        unread = [iter(of_rank) for of_rank in payloads]
        mine = {
            server_id: [next(unread[rank]) for rank in beside]
            for server_id, beside in ranks.items()
        }
        return fanout.start(
            lambda client, deadline: client.update_from_bucket(mine[client.server_id], deadline)
        )
