"""How long weights and gradients travel.

Owns: times by formula, from bytes and bandwidth. Latencies are left out: bytes are gigabytes.

* Broadcast: a chain passes each bucket on as the next one comes. The first server has all after M /
  W seconds (M bytes at W bytes a second), each further one a bucket later: (M + (n - 1) b) / W.
  Servers in a tree are log2 n deep in place of n - 1 (Thakur, Rabenseifner and Gropp 2005,
  "Optimization of Collective Communication Operations in MPICH", sections 4.2 and 4.3, for
  broadcasts of long messages).
* One by one: the trainer sends to each, n M / W.
* Gradients: a ring all-reduce of d ranks sends 2 (d - 1) / d of M over each link (Patarasu and Yuan
  2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations").
"""

from __future__ import annotations

import math


def broadcast_s(
    num_bytes: float, *, servers: int, bandwidth: float, bucket_bytes: float = 128e6
) -> float:
    """Seconds until the last of `servers` has `num_bytes`, passed down a tree in buckets."""
    depth = math.ceil(math.log2(servers + 1))
    return (num_bytes + (depth - 1) * min(bucket_bytes, num_bytes)) / bandwidth


def one_by_one_s(num_bytes: float, *, servers: int, bandwidth: float) -> float:
    """Seconds until the trainer has sent `num_bytes` to each of `servers`."""
    return servers * num_bytes / bandwidth


def all_reduce_s(num_bytes: float, *, ranks: int, bandwidth: float) -> float:
    """Seconds of a ring all-reduce of `num_bytes` over `ranks`."""
    return 2.0 * (ranks - 1) / ranks * num_bytes / bandwidth
