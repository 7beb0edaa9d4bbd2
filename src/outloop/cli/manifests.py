"""`outloop manifests`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from outloop.cli.options import CONFIG, SET

if TYPE_CHECKING:
    from outloop.buffer.settings import Settings


PLAN = click.option(
    "--plan",
    "plan_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Take the numbers of servers, ranks and runners from a file of `outloop plan`.",
)
GPUS = click.option(
    "--gpus",
    type=click.IntRange(min=2),
    help="With --plan: split so many GPUs at best, in place of the plan's own numbers.",
)


def _load(
    config: Path, overrides: tuple[str, ...], plan_file: Path | None, gpus: int | None
) -> tuple[Settings, tuple[str, ...]]:
    """The settings, and every override in them: what a person sets stands above the plan."""
    from outloop.buffer.errors import SettingsError
    from outloop.buffer.settings import load_settings

    settings = load_settings(config, overrides)
    if plan_file is None:
        if gpus is not None:
            raise SettingsError(
                f"--gpus={gpus} without --plan: how GPUs are split is computed from a plan; give "
                "its file"
            )
        return settings, overrides
    from outloop.engine.launch.plan.fleet import fleet_of
    from outloop.engine.launch.plan.inputs import load_plan

    fleet = fleet_of(load_plan(plan_file), settings, gpus=gpus)
    click.echo(fleet.sentence(), err=True)
    overrides = (*fleet.overrides(settings), *overrides)
    return load_settings(config, overrides), overrides


@click.group()
def manifests() -> None:
    """Write what a cluster's own tools start a run from."""


@manifests.command()
@CONFIG
@SET
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder for the files; those of the same names are replaced.",
)
@PLAN
@GPUS
def k8s(
    config: Path,
    overrides: tuple[str, ...],
    out: Path,
    plan_file: Path | None,
    gpus: int | None,
) -> None:
    """Kubernetes: a folder for `kubectl apply -k`, with the trainer as a JobSet."""
    from outloop.engine.launch.deploy.files import write_files
    from outloop.engine.launch.deploy.kubernetes import kubernetes_files

    settings, overrides = _load(config, overrides, plan_file, gpus)
    for path in write_files(out, kubernetes_files(settings, config, overrides)):
        click.echo(path)


@manifests.command()
@CONFIG
@SET
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="Left out: standard output."
)
@PLAN
@GPUS
def sky(
    config: Path,
    overrides: tuple[str, ...],
    out: Path | None,
    plan_file: Path | None,
    gpus: int | None,
) -> None:
    """SkyPilot: a job group for `sky jobs launch`, with servers and runners on spot machines."""
    from outloop.engine.launch.deploy.skypilot import job_group

    settings, overrides = _load(config, overrides, plan_file, gpus)
    text = job_group(settings, config, overrides)
    if out is None:
        click.echo(text, nl=False)
        return
    out.write_text(text)
    click.echo(out)
