"""Commands that run one side of a run alone, or one step again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outloop.buffer.terminal import echo
from outloop.cli.options import CONFIG, SET, check_writable
from outloop.cli.waiting import waiting

if TYPE_CHECKING:
    from outloop.buffer.settings import Settings

_NEVER_STALE = ("buffer.max_staleness=1000000000", "eval.every=0")
"""A recording gets older with every step, and there is no runner for evaluations."""


@click.command("train-recorded")
@CONFIG
@click.argument("file", type=click.Path(path_type=Path, exists=True))
@SET
def train_recorded(config: Path, file: Path, overrides: tuple[str, ...]) -> None:
    """Train on the groups of FILE alone: no Redis, router, server or runner.

    FILE is one of `outloop buffer export` or `outloop rollout`, or the folder of a run, whose
    archived groups are taken by slot. Nothing in it counts as stale.
    """
    from outloop.buffer.settings import load_settings

    _train_on(load_settings(config, (*_NEVER_STALE, *overrides)), file)


def _train_on(settings: Settings, file: Path) -> None:
    """Train on the groups of `file` in the run folder that `settings` name."""
    import warnings

    warnings.filterwarnings("ignore", module="megatron")
    from outloop.buffer.run import create_run
    from outloop.buffer.telemetry import configure_logging, read_metrics
    from outloop.engine.launch.model_folder import with_model_folder
    from outloop.engine.launch.stop_signals import stop_on_signals
    from outloop.engine.train.main import train_from_recording

    settings = with_model_folder(settings)
    configure_logging("trainer", settings.telemetry.log_level)
    run = create_run(settings, (settings.run.dir / settings.run.name).absolute(), "")
    with stop_on_signals() as stop, waiting(f"training on {file}"):
        train_from_recording(run, file, stop=stop)
    rows = [row for row in read_metrics(run.dir) if "train/loss" in row]
    echo(f"trained {len(rows)} steps; metrics.jsonl and checkpoints/ are in {run.dir}")


@click.command()
@CONFIG
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
@SET
def rollout(config: Path, out: Path, overrides: tuple[str, ...]) -> None:
    """Play the groups of a first step with the weights of model.path, and write them to OUT.

    No trainer is started. A step has trainer.groups_per_step groups.
    """
    from outloop.buffer.settings import load_settings
    from outloop.buffer.telemetry import configure_logging
    from outloop.engine.launch.collect_rollouts import play_once
    from outloop.engine.launch.model_folder import with_model_folder
    from outloop.engine.launch.settings_checks import check_before_start
    from outloop.engine.launch.stop_signals import stop_on_signals

    check_writable(out, "--out")
    one_step = ("buffer.max_staleness=0", "buffer.over_provision=1")
    settings = with_model_folder(load_settings(config, (*one_step, *overrides)))
    configure_logging("launcher", settings.telemetry.log_level)
    check_before_start(settings)
    with stop_on_signals() as stop, waiting("playing the groups of a first step"):
        num_written = play_once(settings, out, stop=stop)
    echo(f"wrote {num_written} episodes to {out}")


@click.command("replay")
@click.argument("run_dir", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option("--step", type=int, required=True, help="Which step; 1 is the first.")
@SET
def replay(run_dir: Path, step: int, overrides: tuple[str, ...]) -> None:
    """Make a step of a run again, from its kept trajectories and the checkpoint before it.

    Compares the gradients with those of the run: bit by bit, or to rounding where several ranks
    made them. With --set the step is made with other settings, and what came before it as it was.
    Exit code 0: equal, or made with other settings; 1: not equal.
    """
    import warnings

    warnings.filterwarnings("ignore", module="megatron")
    from outloop.buffer.run import load_run_settings
    from outloop.buffer.telemetry import configure_logging
    from outloop.engine.train.debug.replay_run import replay_run
    from outloop.engine.train.main import train_recorded_steps

    configure_logging("trainer", load_run_settings(run_dir).telemetry.log_level)
    with waiting(f"making step {step} of {run_dir} again"):
        found = replay_run(run_dir, step, overrides, train_steps=train_recorded_steps)
    if found.first_step < step:
        echo(f"made steps {found.first_step} to {step - 1} again to come to step {step}")
    for line in found.lines():
        echo(line)
    if found.has_other_settings:
        echo(f"now: with {', '.join(overrides)}")
        return
    many = found.then.num_ranks > 1
    echo(("equal to rounding" if many else "equal") if found.is_equal else "NOT equal")
    sys.exit(0 if found.is_equal else 1)
