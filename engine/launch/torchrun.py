"""The trainer's ranks on one machine, started by torchrun.

The first failure of a rank becomes the exit code and the sentence of the whole. When `run_ranks`
returns or raises, no rank that it started is left. For several machines see docs/trainer.md.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog

from outloop.buffer.errors import (
    RANK_KILLED_EXIT_CODE,
    SETTINGS_EXIT_CODE,
    PartFailed,
    RankKilled,
    SettingsError,
)
from outloop.buffer.owned_folder import OwnedFolder
from outloop.buffer.whole_file import whole_file
from outloop.engine.machine.parent_death import die_with_parent

_log = structlog.get_logger()
_STOP_TIMEOUT_S = 55
"""Within the launcher's own deadline for the trainer."""


def run_ranks(run_dir: Path, *, num_ranks: int) -> None:
    """Run `outloop trainer` as `num_ranks` ranks until they end, or until SIGTERM stops them.

    Raises:
        SettingsError: a rank refused its settings; its sentence.
        RankKilled: a rank was ended by a signal that was not ours, or asks to be started again.
        PartFailed: a rank failed.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # torchrun's own folder, where ranks leave their errors, would stay at every start.
    folder = OwnedFolder("outloop-ranks")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.2,
        start_method="spawn",
        shutdown_timeout=_STOP_TIMEOUT_S,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder.path)),
    )
    command = ("-P", "-u", "-m", "outloop.cli", "trainer", "--run", str(run_dir))
    try:
        elastic_launch(config, sys.executable)(*command)
    except SignalException:
        # The launcher or a person stopped it: rank 0 has written its checkpoint by now.
        return
    except ChildFailedError as error:
        raise cause_of_failure(list(error.failures.items())) from None
    finally:
        folder.close()


@contextmanager
def as_rank() -> Iterator[None]:
    """Around the life of one rank: it ends with torchrun, and leaves its error for it to read."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return
    die_with_parent(signal.SIGKILL)
    try:
        yield
    except Exception as error:
        leave_error(error)
        raise


def leave_error(error: Exception) -> None:
    """Have torchrun read it when this process has ended; nothing without torchrun.

    The file is there whole or not at all: torch's own handler leaves a part where the disk is full
    or the process is killed, which torchrun ends at, and with it what the other ranks said.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    about = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
    told = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": about}}
    try:
        with whole_file(Path(path)) as writing:
            writing.write_text(json.dumps(told))
    except OSError as failure:
        _log.warning("error_not_left", error=str(error), reason=str(failure))


def cause_of_failure(failures: Sequence[tuple[int, Any]]) -> Exception:
    """The first cause among the ranks that failed: the others fail because of it."""
    for rank, failure in failures:
        if failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM:
            return RankKilled(
                f"trainer rank {rank} was ended by {failure.signal_name()}; "
                "the run goes on from its last checkpoint when it is started again"
            )
    reported = [(rank, f) for rank, f in failures if f.exitcode > 0] or list(failures)
    rank, first = min(reported, key=lambda item: (item[1].exitcode != SETTINGS_EXIT_CODE, item[0]))
    message = first.message
    if isinstance(message, dict):
        message = message["message"]
    elif first.exitcode > 0:
        message = "it could not say why; its log may"
    kind, _, sentence = str(message).partition(": ")
    if first.exitcode == SETTINGS_EXIT_CODE:
        return SettingsError(sentence or kind)
    if first.exitcode == RANK_KILLED_EXIT_CODE:
        return RankKilled(sentence or kind)
    return PartFailed(f"trainer rank {rank} ended with exit_code={first.exitcode}: {message}")
