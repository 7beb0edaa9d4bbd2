"""Ranks of the trainer as processes, without torchrun: each runs a program of the tests.

Owns: the store on which they meet, their variables and what they write to stderr. Does not own:
what the program does. Invariant: none outlives the block.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist


@contextmanager
def rank_processes(
    program: Path,
    folder: Path,
    *words: str,
    num_ranks: int,
    variables: Mapping[str, str] | None = None,
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """By rank; each gets the folder and the words, and leaves rank_R.err in the folder."""
    # The store outlives every rank, as torchrun's does.
    store = dist.TCPStore("127.0.0.1", 0, num_ranks, is_master=True, wait_for_workers=False)
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(num_ranks),
        "OMP_NUM_THREADS": "1",
        **(variables or {}),
    }
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(num_ranks):
            with (folder / f"rank_{rank}.err").open("w") as err:
                env = {**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                command = [sys.executable, str(program), str(folder), *words]
                ranks.append(subprocess.Popen(command, env=env, stderr=err))
        yield ranks
    finally:
        for process in ranks:
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=30)


def errors_of(folder: Path, num_ranks: int) -> list[str]:
    """What each rank wrote to stderr."""
    return [(folder / f"rank_{rank}.err").read_text() for rank in range(num_ranks)]
