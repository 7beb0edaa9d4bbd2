"""One line of what `outloop doctor` answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What was looked at and found; a missing required thing makes the exit code 1."""

    what: str
    found: str
    is_ok: bool
    is_required: bool
    advice: str = ""
