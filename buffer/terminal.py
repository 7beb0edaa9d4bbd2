"""The door to a terminal: commands write their lines by `echo` alone.

A line may hold what a policy, an agent or a file wrote; the terminal obeys nothing of it.
"""

from __future__ import annotations

import click

from outloop.buffer.foreign_text import printable


def echo(text: object = "", *, err: bool = False, nl: bool = True, bold: bool = False) -> None:
    """Write a line to stdout, or with `err` to stderr."""
    shown = printable(str(text))
    click.echo(click.style(shown, bold=True) if bold else shown, err=err, nl=nl)
