"""The `outloop` command: one module for each subcommand.

A part's process imports only that part: modules here import it when the command runs.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import click

from outloop.buffer.errors import (
    RANK_KILLED_EXIT_CODE,
    SETTINGS_EXIT_CODE,
    OutloopError,
    RankKilled,
    SettingsError,
    WritesLost,
)
from outloop.buffer.terminal import echo
from outloop.cli.archiver import archiver
from outloop.cli.buffer import buffer
from outloop.cli.check import check
from outloop.cli.completion import completion
from outloop.cli.convert import convert
from outloop.cli.doctor import doctor
from outloop.cli.episodes import episodes
from outloop.cli.evaluations import evaluations
from outloop.cli.init import init
from outloop.cli.keys import keys
from outloop.cli.manifests import manifests
from outloop.cli.monitor import monitor
from outloop.cli.new_policy import new_policy
from outloop.cli.plan import plan
from outloop.cli.ratings import ratings
from outloop.cli.recorded import replay, rollout, train_recorded
from outloop.cli.redis import redis
from outloop.cli.reward_server import reward_server
from outloop.cli.router import router
from outloop.cli.runner import runner
from outloop.cli.serve import serve
from outloop.cli.server import server
from outloop.cli.settings import settings
from outloop.cli.status import status
from outloop.cli.submit import submit
from outloop.cli.tail import tail
from outloop.cli.tasks import tasks
from outloop.cli.tracker import tracker
from outloop.cli.train import train
from outloop.cli.trainer import trainer
from outloop.cli.trajectories import trajectories
from outloop.cli.view import view
from outloop.cli.viewer import viewer
from outloop.engine.launch.last_sentence import SentenceForLauncher

GROUPS: dict[str, tuple[click.Command, ...]] = {
    "Run": (train, serve, new_policy, convert, doctor, check, plan, settings, completion),
    "Look into a run": (
        view,
        status,
        tail,
        evaluations,
        ratings,
        episodes,
        trajectories,
        buffer,
        tasks,
        keys,
    ),
    "Start parts one by one": (
        init,
        redis,
        router,
        server,
        runner,
        trainer,
        archiver,
        monitor,
        tracker,
        viewer,
        reward_server,
    ),
    "On a cluster": (submit, manifests),
    "One side alone, for debugging": (rollout, train_recorded, replay),
}
"""Every command, as `outloop --help` shows them."""


class _Grouped(click.Group):
    def list_commands(self, context: click.Context) -> list[str]:
        return [str(command.name) for commands in GROUPS.values() for command in commands]

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(str(command.name), command.get_short_help_str(90)) for command in commands]
                )


@click.group(cls=_Grouped, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="outloop")
def cli() -> None:
    """Train agents by reinforcement learning, with the loop outside."""


for _commands in GROUPS.values():
    for _command in _commands:
        cli.add_command(_command)


def main() -> None:
    """Entry point: every outloop error becomes one sentence and exit code 2 (settings) or 1."""
    launcher = SentenceForLauncher()
    try:
        cli(prog_name="outloop")
    except SettingsError as error:
        _end(error, SETTINGS_EXIT_CODE, launcher)
    except (RankKilled, WritesLost) as error:
        _end(error, RANK_KILLED_EXIT_CODE, launcher)
    except OutloopError as error:
        _end(error, 1, launcher)
    except KeyboardInterrupt:
        sys.exit(130)


def _end(error: OutloopError, exit_code: int, launcher: SentenceForLauncher) -> NoReturn:
    sentence = f"outloop: {error}"
    launcher.tell(sentence)
    try:
        echo(sentence, err=True)
    except OSError:
        # The disk of the log is full. What the streams still hold would change the exit code.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere, stream.fileno())
    sys.exit(exit_code)
