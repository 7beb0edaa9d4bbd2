"""What happened to a run as a whole: `events.jsonl` in its folder, one JSON object a line."""

from __future__ import annotations

import json
import time
from io import FileIO
from pathlib import Path
from typing import Any, Literal

import structlog

from outloop.buffer.room import append_whole

_log = structlog.get_logger()

EventKind = Literal[
    "started",
    "part_restarted",
    "part_given_up",
    "redis_cannot_write",
    "redis_writes_again",
    "published",
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
        with FileIO(run_dir / "events.jsonl", "a") as file:
            append_whole(file, (json.dumps(row) + "\n").encode())
    except OSError as error:
        _log.warning("event_dropped", kind=kind, error=str(error))


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """Every complete event; none if the run recorded none."""
    path = run_dir / "events.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1] if line]
