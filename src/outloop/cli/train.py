"""`outloop train`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Literal

import click

from outloop.cli.options import CONFIG, ENGINES, SET


@click.command()
@CONFIG
@SET
@click.option(
    "--rollout-function-path",
    metavar="PACKAGE.MODULE:FUNCTION",
    help="Your `async def play(task, episode) -> reward`.",
)
@click.option("--agent-command", metavar="'PROGRAM {task_file}'", help="In place of a function.")
@click.option("--verifier", metavar="MODULE:FUNCTION or COMMAND", help="Scores an agent command.")
@click.option("--single-process", is_flag=True, help="All parts in this process, for a debugger.")
@click.option(
    "--on",
    type=ENGINES,
    default="here",
    show_default=True,
    help="ray: on the nodes of a Ray cluster; slurm: inside a job of `outloop submit slurm`.",
)
def train(
    config: Path,
    overrides: tuple[str, ...],
    rollout_function_path: str | None,
    agent_command: str | None,
    verifier: str | None,
    single_process: bool,
    on: Literal["here", "slurm", "ray"],
) -> None:
    """Train the policy of CONFIG: starts every part on this machine and watches them."""
    import outloop
    from outloop.buffer.settings import load_settings
    from outloop.buffer.telemetry import configure_logging
    from outloop.engine.launch.stop_signals import stop_on_signals

    for name, value in (
        ("rollout_function_path", rollout_function_path),
        ("agent_command", agent_command),
        ("verifier", verifier),
    ):
        if value is not None:
            # JSON's strings are TOML's.
            overrides = (*overrides, f"env.{name}={json.dumps(value)}")
    settings = load_settings(config, overrides)
    configure_logging("launcher", settings.telemetry.log_level)
    with stop_on_signals() as stop:
        run = outloop.train(settings, single_process=single_process, stop=stop, on=on)
    sys.exit(run.exit_code)
