"""The door to a terminal for tables, progress and coloured lines, which rich draws.

rich reads `[/b]` in a string as its own markup, and passes escape sequences on. Text that goes
through this module is shown as it is written, and the terminal obeys nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import Task, TextColumn
from rich.table import Table
from rich.text import Text

from outloop.buffer.foreign_text import one_line, printable


def plain(text: str, style: str = "") -> Text:
    """The text for rich, without markup, emoji names and colours for numbers."""
    return Text(printable(text), style)


def show(console: Console, text: str, *, style: str = "") -> None:
    """Write a line, which is not broken at the terminal's width."""
    console.print(plain(text, style), soft_wrap=True)


def show_table(console: Console, table: PlainTable, *, width: int | None = None) -> None:
    """Draw a table."""
    console.print(table, width=width)


class PlainTable(Table):
    """A table of texts; nothing in them is markup."""

    def __init__(self, *, title: str = "", **options: Any) -> None:
        shown = plain(one_line(title), "table.title") if title else None
        super().__init__(title=shown, **options)

    def add_plain_column(self, heading: str, **options: Any) -> None:
        """Add a column; `options` are those of rich."""
        self.add_column(plain(heading), **options)

    def add_plain_row(self, cells: Sequence[str]) -> None:
        """Add a row, one text for each column."""
        self.add_row(*map(plain, cells))


class LabelColumn(TextColumn):
    """The description of a progress bar."""

    def __init__(self) -> None:
        super().__init__("", markup=False)

    def render(self, task: Task) -> Text:
        """Draw the description as it is written."""
        return plain(task.description)
