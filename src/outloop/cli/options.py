"""Arguments and options that several commands share."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click


def check_writable(path: Path, name: str) -> None:
    """Refuse a path that cannot be written, before any work is done.

    Raises:
        SettingsError: names the path, and why.
    """
    from outloop.buffer.errors import SettingsError

    folder = next(folder for folder in path.absolute().parents if folder.exists())
    try:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SettingsError(
            f"{name}={str(path)!r} cannot be written ({error}); give a path that you may write"
        ) from error


CONFIG = click.argument("config", type=click.Path(path_type=Path))
RUN = click.option(
    "--run",
    "run_dir",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder of the run.",
)
SET = click.option(
    "--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override one setting."
)
ADVERTISE = click.option(
    "--advertise",
    metavar="HOST",
    help="Name or address at which other machines reach this one.",
)
