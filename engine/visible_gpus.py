"""Which GPUs this process was given, by the names that its starter gave them."""

from __future__ import annotations

import os
from collections.abc import Mapping

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES names, in its order; empty where it is not set."""
    return tuple(name.strip() for name in environment.get(VISIBLE, "").split(",") if name.strip())


def own_gpu(environment: Mapping[str, str] = os.environ) -> str:
    """The one of this rank of torchrun's; empty where none is known."""
    gpus, rank = visible_gpus(environment), int(environment.get("LOCAL_RANK", "0"))
    return gpus[rank] if rank < len(gpus) else ""
