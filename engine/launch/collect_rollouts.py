"""Playing without training: the episodes of one step's groups, written to a file.

All episodes are played by the weights of model.path. Admission ends them, so that every episode
that is played is written.
"""

from __future__ import annotations

import threading
from pathlib import Path

from outloop.buffer.settings import Settings
from outloop.engine.launch.gpu_placement import place_gpus
from outloop.engine.launch.launcher import Launcher, running
from outloop.engine.launch.serving import name_weights, start_and_wait
from outloop.engine.machine.visible_gpus import list_gpus


def play_once(settings: Settings, out: Path, *, stop: threading.Event) -> int:
    """Play trainer.groups_per_step groups and write their episodes to `out` as JSONL.

    Returns the number of episodes written, those of dropped groups that are kept included; what is
    there by then when `stop` is set.

    Raises:
        DeadlineExceeded: the parts did not come up, or the groups were not complete after
            trainer.take_timeout_s in which no attempt was in flight.
        PartFailed: a part ended that cannot be restarted.
    """
    gpus = place_gpus(settings, list_gpus(), has_trainer=False)
    with running(settings, stop, gpus=gpus) as launcher:
        start_and_wait(launcher)
        if not stop.is_set():
            name_weights(launcher, settings.server.start_timeout_s)
            for index in range(settings.env.num_runners):
                launcher.start(f"runner-{index}", "runner")
            launcher.wait_for(
                f"{settings.trainer.groups_per_step} groups",
                lambda: _stat(launcher, "ready_groups") >= settings.trainer.groups_per_step,
                settings.trainer.take_timeout_s,
                goes_on=lambda: _stat(launcher, "attempts_in_flight") > 0,
            )
        num_written, _ = launcher.reader.archive.write(out)
    return num_written


def _stat(launcher: Launcher, name: str) -> float:
    return launcher.reader.stats()[f"buffer/{name}"]
