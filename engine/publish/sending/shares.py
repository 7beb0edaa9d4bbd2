"""Which trainer rank sends which tensors.

A tensor leaves from a rank that holds a part of it, so that no pipeline stage's weights go through
another's ranks. The tensors of a layer leave from one rank: servers fuse some of them, and the
checksum of a fused parameter is computed in one place.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from outloop.engine.publish.buckets.plan import TensorSpec

_LAYER = re.compile(r".*\.layers\.\d+(?=\.)")
Shares = tuple[tuple[TensorSpec, ...], ...]
"""For each rank the tensors that it sends, in the order of `specs`; none for some ranks."""


def share_out(
    specs: Sequence[TensorSpec],
    holders: Mapping[str, Collection[int]],
    *,
    num_ranks: int,
    among: Collection[int],
) -> Shares:
    """Shares of about equal size among the holders of the same layers.

    Args:
        holders: for each tensor the ranks that hold its parts, each part once.
        among: the ranks that may send; a layer that none of them holds is shared out among all.
    """
    units: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        layer = _LAYER.match(spec.name)
        units.setdefault(layer[0] if layer else spec.name, []).append(spec)
    num_bytes = [0] * num_ranks
    shares: list[list[TensorSpec]] = [[] for _ in range(num_ranks)]
    for unit in units.values():
        holding = {rank for spec in unit for rank in holders[spec.name]}
        able = sorted(holding.intersection(among) or among)
        rank = min(able, key=num_bytes.__getitem__)
        num_bytes[rank] += sum(spec.num_bytes for spec in unit)
        shares[rank] += unit
    return tuple(map(tuple, shares))
