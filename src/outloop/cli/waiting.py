"""Showing that a command still works."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show `text` and the seconds since it began, on a terminal alone; gone at the end."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

    from outloop.buffer.rich_terminal import LabelColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    columns = (SpinnerColumn(), LabelColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(text, total=None)
        yield
