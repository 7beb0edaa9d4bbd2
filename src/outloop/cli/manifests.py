"""`outloop manifests`."""

from __future__ import annotations

from pathlib import Path

import click

from outloop.buffer.terminal import echo
from outloop.cli.options import CONFIG, SET


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
def k8s(
    config: Path,
    overrides: tuple[str, ...],
    out: Path,
) -> None:
    """Kubernetes: a folder for `kubectl apply -k`, with the trainer as a JobSet."""
    from outloop.buffer.settings import load_settings
    from outloop.engine.launch.deploy.files import write_files
    from outloop.engine.launch.deploy.kubernetes import kubernetes_files

    settings = load_settings(config, overrides)
    for path in write_files(out, kubernetes_files(settings, config, overrides)):
        echo(path)


@manifests.command()
@CONFIG
@SET
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="Left out: standard output."
)
def sky(
    config: Path,
    overrides: tuple[str, ...],
    out: Path | None,
) -> None:
    """SkyPilot: a job group for `sky jobs launch`, with servers and runners on spot machines."""
    from outloop.buffer.settings import load_settings
    from outloop.engine.launch.deploy.skypilot import job_group

    settings = load_settings(config, overrides)
    text = job_group(settings, config, overrides)
    if out is None:
        echo(text, nl=False)
        return
    out.write_text(text)
    echo(out)
