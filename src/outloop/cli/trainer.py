"""`outloop trainer`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

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
        # Ranks bind themselves, each beside its own GPU.
        from outloop.engine.launch.torchrun import run_ranks

        run_ranks(run_dir, num_ranks=num_ranks)
        return
    from outloop.engine.launch.stop_signals import stop_on_signals
    from outloop.engine.launch.torchrun import as_rank
    from outloop.engine.machine_binding import bind

    with as_rank(), stop_on_signals() as stop:
        # Threads keep the cores that they begin with.
        bind(run.settings)
        from outloop.engine.train.main import train as train_policy

        train_policy(run, stop=stop, on_hang=end_process)


def end_process(sentence: str) -> None:
    """End this process at once: the call that hangs never returns."""
    sys.stderr.write(f"outloop: {sentence}\n")
    sys.stderr.flush()
    os._exit(HANG_EXIT_CODE)
