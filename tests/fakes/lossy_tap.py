"""A tap in front of a server that makes it hold other weights than were acknowledged."""

import json
import urllib.request
from collections.abc import Mapping

import torch
from torch import Tensor

from fakes.tap import Tap
from outloop.engine.publish.buckets.plan import TensorSpec, plan_buckets
from outloop.engine.publish.buckets.staging import SharedBuffer
from outloop.engine.publish.flattened_bucket import write_bucket

_BUCKET = "/update_weights_from_tensor"


class LossyTap(Tap):
    """Answers for the `lost`-th bucket in the server's place, or slips in other tensors."""

    def __init__(
        self,
        target: str,
        *,
        lost: int | None = None,
        slipped_in: Mapping[str, Tensor] | None = None,
        num_ranks: int = 1,
    ) -> None:
        self.calls: list[str] = []
        self._lost = lost
        self._slipped_in = dict(slipped_in or {})
        self._num_ranks = num_ranks
        super().__init__(target)

    def on_call(self, path: str) -> bytes | None:
        """Lose a bucket, or write others before the update ends."""
        if path == _BUCKET and self.calls.count(_BUCKET) == self._lost:
            self.calls.append(path)
            return b'{"success": true, "message": "Succeeded to update parameter online."}'
        if path == "/end_weight_update" and _BUCKET in self.calls and self._slipped_in:
            self._slip_in()
        self.calls.append(path)
        return None

    def _slip_in(self) -> None:
        specs = [
            TensorSpec(name=name, shape=tuple(t.shape), dtype=t.dtype)
            for name, t in self._slipped_in.items()
        ]
        (bucket,) = plan_buckets(specs, 2**30)
        buffer = SharedBuffer()
        content = buffer.reserve(bucket[-1].end)
        for place, tensor in zip(bucket, self._slipped_in.values(), strict=True):
            content[place.start : place.end] = tensor.reshape(-1).view(torch.uint8)
        payload = write_bucket(content, bucket, num_readers=self._num_ranks)
        body = {
            "serialized_named_tensors": [payload] * self._num_ranks,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        request = urllib.request.Request(
            self.target + _BUCKET, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.loads(response.read())["success"]
        del content
        buffer.close()
