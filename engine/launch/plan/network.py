"""How long weights and gradients travel, from bytes and bandwidth. Latencies are left out.

* Broadcast: servers form a tree and pass each bucket on while the next one arrives. The first
  server has M bytes after M / W seconds at W bytes a second; each further level of the tree, log2 n
  in all, adds one bucket (Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective
  Communication Operations in MPICH", sections 4.2 and 4.3, for broadcasts of long messages).
* One by one: the trainer sends to each server in turn, n M / W.
* Gradients: a ring all-reduce of d ranks sends 2 (d - 1) / d of M over each link (Patarasu and Yuan
  2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations").
"""

from __future__ import annotations

import math


def broadcast_s(
    num_bytes: float, *, servers: int, bandwidth: float, bucket_bytes: float = 128e6
) -> float:
    """Return the seconds until the last of `servers` has `num_bytes`, sent in buckets."""
    depth = math.ceil(math.log2(servers + 1))
    return (num_bytes + (depth - 1) * min(bucket_bytes, num_bytes)) / bandwidth


def one_by_one_s(num_bytes: float, *, servers: int, bandwidth: float) -> float:
    """Return the seconds until the trainer has sent `num_bytes` to each of `servers`."""
    return servers * num_bytes / bandwidth


def all_reduce_s(num_bytes: float, *, ranks: int, bandwidth: float) -> float:
    """Return the seconds of a ring all-reduce of `num_bytes` over `ranks`."""
    return 2.0 * (ranks - 1) / ranks * num_bytes / bandwidth
