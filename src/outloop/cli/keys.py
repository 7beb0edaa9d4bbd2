"""`outloop keys`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outloop.buffer.terminal import echo
from outloop.cli.options import RUN

if TYPE_CHECKING:
    from outloop.buffer.runner_keys import RunnerKeys


@click.group()
def keys() -> None:
    """Give runners keys of their own, take them back, and replace keys, while a run is up."""


@contextmanager
def _keys_of(run_dir: Path) -> Iterator[RunnerKeys]:
    from outloop.buffer.open_run import joined

    with joined(run_dir) as reader:
        yield reader.runner_keys


@keys.command()
@RUN
@click.argument("name")
def add(run_dir: Path, name: str) -> None:
    """Print a new runner key; it is kept nowhere, so write it into the runner's key file."""
    with _keys_of(run_dir) as known:
        echo(known.add(name))


@keys.command()
@RUN
@click.argument("name")
def revoke(run_dir: Path, name: str) -> None:
    """Refuse a key for good, within seconds; NAME run is the run's own runner key."""
    with _keys_of(run_dir) as known:
        known.revoke(name)
    echo(f"the runner key {name} is refused from now on")


@keys.command("list")
@RUN
def list_keys(run_dir: Path) -> None:
    """Names of all keys, and which are taken."""
    with _keys_of(run_dir) as known:
        for name, is_taken in known.names().items():
            echo(f"{name:<24} {'taken' if is_taken else 'revoked'}")


@keys.command("replace-admin")
@RUN
def replace_admin(run_dir: Path) -> None:
    """Put a new admin key into the run's file of keys; routers refuse the old one in seconds."""
    from outloop.buffer.run import load_run, new_admin_key

    with _keys_of(run_dir) as known:
        known.set_admin(new_admin_key(load_run(run_dir)))
    echo("the admin key is a new one; it is where the run's keys are")
