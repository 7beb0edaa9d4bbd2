"""What both ranks of `test_lost_rank` run: rank 1 is killed before it has written its shards, while
rank 0 waits for them and polls, as it does wherever it waits.

Started with torchrun's variables and a folder that holds a run; rank 0 leaves results.json.
"""

import functools
import json
import os
import signal
import sys
import time
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    # megatron-core announces at import what it falls back to without Transformer Engine.
    warnings.simplefilter("ignore")
    from outloop.buffer.errors import RankKilled
    from outloop.buffer.records import CheckpointMark
    from outloop.buffer.run import load_run
    from outloop.engine.train.checkpoint.async_writer import Shards
    from outloop.engine.train.main import join_ranks
    from outloop.engine.train.ranks.controller import RankController, follow
    from outloop.engine.train.ranks.rank_worker import RankWorker

FOLDER = Path(sys.argv[1])
MARK = CheckpointMark(fence=1, group_ids=(), next_slot=0, policy_version=0)


class DyingShards(Shards):
    """Of a rank that is killed before it writes."""

    def write(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def wait_in_vain(ranks: RankController) -> str:
    """For a save; the error."""
    saving = ranks.run(RankWorker.save, step=1, mark=MARK, reference_hash="")
    try:
        while not saving.wait(0.2):
            ranks.idle()
    except RankKilled as error:
        return str(error)
    return "the save ended"


def run_ranks() -> None:
    """Rank 0's wait, or following it."""
    run = load_run(FOLDER / "run")
    with ExitStack() as stack:
        if int(os.environ["RANK"]):
            make_worker = functools.partial(RankWorker, make_shards=DyingShards)
            follow(*join_ranks(run, stack, make_worker=make_worker))
            return
        work, watchdog = join_ranks(run, stack)
        trainer = run.settings.trainer
        ranks = RankController(
            work, watchdog, num_ranks=trainer.num_ranks, timeout_s=trainer.rank_timeout_s
        )
        ranks.run(RankWorker.build, num_updates=1)
        began_at = time.monotonic()
        sentence = wait_in_vain(ranks)
    results = {"sentence": sentence, "ended_s": time.monotonic() - began_at}
    (FOLDER / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    run_ranks()
