"""Ranks as threads of one process: what is exchanged over a group of a few."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

Result = TypeVar("Result")


def in_parts(part: Callable[[int, dist.ProcessGroup], Result], num_parts: int) -> list[Result]:
    """Call `part` in one thread for each rank, each with a gloo group of its own."""
    store = dist.HashStore()
    results: dict[int, Result] = {}

    def run(rank: int) -> None:
        group = dist.ProcessGroupGloo(store, rank, num_parts, timedelta(seconds=60))
        results[rank] = part(rank, group)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_parts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    return [results[rank] for rank in range(num_parts)]
