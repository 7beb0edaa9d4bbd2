"""What happened to a run as a whole: `events.jsonl` in its folder, one JSON object a line."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Literal

import structlog

from outloop.buffer import json_lines

_log = structlog.get_logger()

EventKind = Literal[
    "started",
    "launcher_lost",
    "part_restarted",
    "part_given_up",
    "redis_cannot_write",
    "redis_writes_again",
    "published",
    "wrong_weights",
    "alarm",
    "alarm_over",
    "stopped",
    "finished",
    "failed",
]


def record_event(run_dir: Path, kind: EventKind, **fields: str | int | float) -> None:
    """Append an event with the time now; several processes may. One for which there is no room is
    dropped."""
    row = {"time": time.time(), "kind": kind, **fields}
    try:
        with json_lines.open_for_appending(run_dir / "events.jsonl") as file:
            json_lines.append_line(file, json.dumps(row).encode())
    except OSError as error:
        _log.warning("event_dropped", kind=kind, error=str(error))


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """Every complete event; none if the run recorded none."""
    return json_lines.read_rows(run_dir / "events.jsonl")
