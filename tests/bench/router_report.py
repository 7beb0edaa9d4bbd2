"""What `make bench-router` is to reach, and how it says what it reached.

Owns: wanted figures, the table, the file. Does not own: measuring. Invariant: a figure that misses
what is wanted says so.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

OUT = Path(__file__).resolve().parents[2] / "runs" / "bench"
TARGETS: dict[str, tuple[Callable[[float], bool], str]] = {
    "rps_vs_sglang_router": (lambda v: v >= 0.24, ">= 0.24"),
    "rps_vs_litellm": (lambda v: v >= 15, ">= 15"),
    "added_p50_ms": (lambda v: v <= 2.5, "<= 2.5"),
    "cpu_4096_waiting_vs_64": (lambda v: v <= 1.5, "<= 1.5"),
    "episodes_lost": (lambda v: v == 0, "0"),
    "episodes_mixed": (lambda v: v == 0, "0"),
    "bytes_per_open_episode": (lambda v: v <= 65536, "<= 65536"),
    "turn128_vs_turn2": (lambda v: v <= 2, "<= 2"),
}


def report(figures: dict[str, float]) -> None:
    """Print the table."""
    table = Table(title="bench-router", title_justify="left")
    for column in ("figure", "value", "wanted", ""):
        table.add_column(column, justify="right" if column == "value" else "left")
    for name, value in figures.items():
        is_met, wanted = TARGETS.get(name, (lambda _: True, ""))
        table.add_row(name, f"{value:.3f}", wanted, "" if is_met(value) else "missed")
    Console().print(table)


def write(figures: dict[str, float]) -> None:
    """Write the file."""
    content = {
        "name": "router",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}",
        "figures": figures,
    }
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "router.json").write_text(json.dumps(content, indent=1))
