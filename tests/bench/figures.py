"""How a benchmark tells what it does, and then what it measured.

A line for each thing while it goes on; at the end a table and runs/bench/NAME.json, with date and
machine.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

OUT = Path(__file__).resolve().parents[2] / "runs" / "bench"


def machine() -> str:
    """The machine in words."""
    words = [platform.machine(), f"{os.cpu_count()} cores", platform.system()]
    return ", ".join([*words, f"Python {platform.python_version()}"])


def say(words: str) -> None:
    """What is measured now, on stderr at once and with the time of day."""
    print(f"{time.strftime('%H:%M:%S')}  {words}", file=sys.stderr, flush=True)


def known(name: str) -> dict[str, float]:
    """The figures of benchmark `name` so far, for one that is made in parts; empty: none."""
    path = OUT / f"{name}.json"
    if not path.is_file():
        return {}
    figures: dict[str, float] = json.loads(path.read_text())["figures"]
    return figures


def tell(name: str, figures: Mapping[str, float], *, on: str = "") -> Path:
    """Print the table of benchmark `name` and write its JSON, whose path is returned.

    `on` adds an accelerator to the machine's description.
    """
    table = Table(title=f"bench-{name}", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for figure, value in figures.items():
        table.add_row(figure, f"{value:.3f}")
    Console().print(table)
    report: dict[str, Any] = {
        "name": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": ", ".join(filter(None, [machine(), on])),
        "figures": dict(figures),
    }
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"{name}.json"
    path.write_text(json.dumps(report, indent=1))
    return path
