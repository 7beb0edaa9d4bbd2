"""The process groups that this server has joined to receive weights.

The engine's thread never waits for another process. A group that failed is left only when it is
destroyed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outloop.buffer.errors import PublishFailed
from outloop.engine.publish.buckets.plan import PACKED, Bucket, TensorSpec, plan_buckets
from outloop.engine.publish.process_group import BACKENDS, Group, join_group
from outloop.engine.serve.torch_server.schemas import FromGroupBody
from outloop.engine.serve.torch_server.weight_update import UpdateRefused

_TIMEOUT_S = 300.0
"""A publisher that ends frees its members at once; this is for one that does not."""


class UpdateGroups:
    """Groups by name. Its methods block; call them through `in_thread`."""

    def __init__(self, device: torch.device) -> None:
        """`device`: where the weights are, which is where NCCL receives."""
        self._device = device
        self._groups: dict[str, Group] = {}

    def join(
        self, host: str, port: int, *, rank: int, world_size: int, name: str, backend: str
    ) -> None:
        """Join; returns when every member has.

        Raises:
            UpdateRefused: a name in use, an unknown backend, or a group that did not form.
        """
        if name in self._groups or not name:
            raise UpdateRefused(f"group_name={name!r} is empty or already joined; choose another")
        known = next((b for b in BACKENDS if b == backend), None)
        if known is None:
            raise UpdateRefused(f"backend={backend!r}; allowed: {', '.join(BACKENDS)}")
        try:
            self._groups[name] = join_group(
                host,
                port,
                rank=rank,
                world_size=world_size,
                name=name,
                backend=known,
                timeout_s=_TIMEOUT_S,
            )
        except PublishFailed as error:
            raise UpdateRefused(str(error)) from error

    def leave(self, name: str) -> None:
        """Leave.

        Raises:
            UpdateRefused: no such group.
        """
        group = self._groups.pop(name, None)
        if group is None:
            raise UpdateRefused(f"group_name={name!r} was not joined")
        group.close()

    def receive(self, body: FromGroupBody) -> list[tuple[str, Tensor]]:
        """Take part in the broadcast of one bucket, packed without gaps.

        Raises:
            UpdateRefused: no such group, lists that do not fit, or a broadcast that broke.
        """
        group = self._groups.get(body.group_name)
        if group is None:
            raise UpdateRefused(f"group_name={body.group_name!r} was not joined")
        if body.load_format != "flattened_bucket":
            raise UpdateRefused(
                f'load_format={body.load_format!r}; the torch server takes "flattened_bucket"'
            )
        bucket = lay_out(body.names, body.dtypes, body.shapes)
        is_here = group.device_type == self._device.type
        device = self._device if is_here else torch.device(group.device_type)
        content = torch.empty(bucket[-1].end, dtype=torch.uint8, device=device)
        try:
            group.broadcast(content, timeout_s=_TIMEOUT_S)
        except PublishFailed as error:
            raise UpdateRefused(f"weights were not received: {error}") from error
        return [(place.spec.name, place.view_of(content)) for place in bucket]


def lay_out(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[list[int]]) -> Bucket:
    """Where the tensors of a bucket without gaps lie.

    Raises:
        UpdateRefused: lists of unequal length, unknown dtypes, negative sizes, unaligned starts.
    """
    if not (len(names) == len(dtypes) == len(shapes) > 0):
        raise UpdateRefused(
            f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes; equally many are "
            "needed, and at least one"
        )
    specs: list[TensorSpec] = []
    for name, text, shape in zip(names, dtypes, shapes, strict=True):
        dtype = getattr(torch, text, None)
        if not isinstance(dtype, torch.dtype) or any(size < 0 for size in shape):
            raise UpdateRefused(f"name={name!r} has dtype={text!r} shape={shape}")
        specs.append(TensorSpec(name=name, shape=tuple(shape), dtype=dtype))
    (bucket,) = plan_buckets(specs, sum(spec.num_bytes for spec in specs), PACKED)
    for place in bucket:
        if place.start % place.spec.dtype.itemsize:
            raise UpdateRefused(f"name={place.spec.name!r} would start at byte {place.start}")
    return bucket
