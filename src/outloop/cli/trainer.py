"""`outloop trainer`."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import click

from outloop.buffer.errors import RANK_KILLED_EXIT_CODE, PartFailed, RankKilled
from outloop.cli.options import RUN
from outloop.cli.parts import open_as

HANG_EXIT_CODE = 3
"""Exit code of a trainer without progress for trainer.hang_timeout_s."""


@click.command()
@RUN
def trainer(run_dir: Path) -> None:
    """Train the policy of a run; starts torchrun when trainer.num_ranks asks for several."""
    import warnings

    # megatron-core announces at import what it does without Transformer Engine and Apex.
    warnings.filterwarnings("ignore", module="megatron")
    rank = os.environ.get("RANK")
    run = open_as("trainer" if rank is None else f"trainer-{rank}", run_dir)
    num_ranks = run.settings.trainer.num_ranks
    if num_ranks > 1 and rank is None:
        from outloop.engine.launch.torchrun import run_ranks

        run_ranks(run_dir, num_ranks=num_ranks)
        return
    from outloop.engine.launch.stop_signals import stop_on_signals
    from outloop.engine.launch.torchrun import as_rank
    from outloop.engine.machine.network_interface import name_network

    threading.excepthook = end_without_memory
    with as_rank(), stop_on_signals() as stop:
        name_network(run.settings)
        from outloop.engine.train.main import train as train_policy

        train_policy(run, stop=stop, on_hang=end_process)


def end_process(error: PartFailed) -> None:
    """End this process at once: the call that hangs never returns. The exit code says whether it
    may be started again."""
    from outloop.engine.launch.torchrun import leave_error

    try:
        sys.stderr.write(f"outloop: {error}\n")
        sys.stderr.flush()
        leave_error(error)
    finally:
        os._exit(RANK_KILLED_EXIT_CODE if isinstance(error, RankKilled) else HANG_EXIT_CODE)


def end_without_memory(ended: threading.ExceptHookArgs) -> None:
    """For `threading.excepthook`: a thread that got no memory ends the process, since others may
    wait for it; one that ends by anything else is shown."""
    from outloop.engine.machine.memory_shortage import is_memory_shortage

    if ended.exc_value is None or not is_memory_shortage(ended.exc_value):
        threading.__excepthook__(ended)
        return
    name = "a thread" if ended.thread is None else f"thread {ended.thread.name!r}"
    rank = os.environ.get("RANK", "0")
    end_process(RankKilled(f"the system gave {name} of trainer rank {rank} no more memory"))
