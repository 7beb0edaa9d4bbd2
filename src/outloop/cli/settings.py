"""`outloop settings`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from outloop.buffer.terminal import echo
from outloop.cli.options import CONFIG, SET


@click.command()
@CONFIG
@SET
@click.option("--all", "shows_all", is_flag=True, help="Defaults too.")
@click.option("--json", "as_json", is_flag=True, help="One object: name -> [value, origin].")
def settings(config: Path, overrides: tuple[str, ...], shows_all: bool, as_json: bool) -> None:
    """Print the settings that CONFIG resolves to, and where each came from.

    A file, OUTLOOP_SECTION__KEY in the environment, a flag, a recipe, or the default.
    """
    from outloop.buffer.settings import trace_settings

    _, found = trace_settings(config, overrides)
    shown = {
        name: pair for name, pair in found.items() if shows_all or as_json or pair[1] != "default"
    }
    if as_json:
        echo(json.dumps(shown, indent=1))
        return
    width = max((len(name) for name in shown), default=0)
    lines = {name: f"{name:<{width}} = {json.dumps(value)}" for name, (value, _) in shown.items()}
    column = min(72, max((len(line) for line in lines.values()), default=0))
    for name, line in lines.items():
        echo(f"{line:<{column}}  # {shown[name][1]}")
    if not shows_all:
        echo(f"and {len(found) - len(shown)} defaults; --all shows them")
