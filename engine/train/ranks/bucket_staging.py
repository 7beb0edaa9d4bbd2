"""This rank's own copy of a bucket, for the servers on its device to read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outloop.engine.publish.buckets.plan import Place
from outloop.engine.publish.buckets.staging import DeviceBuffer, SharedBuffer, Staging
from outloop.engine.publish.flattened_bucket import write_bucket
from outloop.engine.train.megatron.export_weights import Exports


class BucketStaging:
    """Two buffers, in shared memory or on the device, that are filled in turn."""

    def __init__(self, exports: Exports, *, is_on_device: bool) -> None:
        """`is_on_device`: for CUDA-IPC; such memory lives for one publish."""
        self._exports = exports
        if is_on_device:
            device = torch.device("cuda", torch.cuda.current_device())
            self._staging = Staging(*(DeviceBuffer(device, is_exported=True) for _ in range(2)))
        else:
            self._staging = Staging(SharedBuffer(), SharedBuffer())
        self.content = torch.empty(0, dtype=torch.uint8)
        """The last bucket as it lies here, uint8 [bytes]."""

    def fill(
        self, places: Sequence[Place], *, index: int, num_bytes: int, num_readers: int
    ) -> list[str]:
        """Have bucket `index` here, in room for `num_bytes`; all ranks together.

        Returns a payload for each of this rank's readers.
        """
        self.content = self._staging.reserve(index, num_bytes)[: places[-1].end]
        targets = [place.view_of(self.content) for place in places]
        self._exports.spread([place.spec.name for place in places], targets)
        if self.content.is_cuda:
            torch.cuda.current_stream(self.content.device).synchronize()
            # Each reader of a CUDA handle holds a reference of its own.
            return [write_bucket(self.content, places) for _ in range(num_readers)]
        if not num_readers:
            return []
        return [write_bucket(self.content, places, num_readers=num_readers)] * num_readers

    def end(self) -> None:
        """The publish is over."""
        self.content = torch.empty(0, dtype=torch.uint8)
        self._staging.end()

    def close(self) -> None:
        """Give the memory back."""
        self.end()
        self._staging.close()
