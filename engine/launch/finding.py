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

    @property
    def mark(self) -> str:
        """What the table shows beside it."""
        return "ok" if self.is_ok else "missing" if self.is_required else "optional"


def good(what: str, found: str) -> Finding:
    """Something that a run needs and that is there."""
    return Finding(what=what, found=found, is_ok=True, is_required=True)


def bad(what: str, found: str, advice: str, *, is_required: bool = True) -> Finding:
    """Something that is not as it should be, and what to do."""
    return Finding(
        what=what,
        found=found,
        is_ok=False,
        is_required=is_required,
        advice=advice,
    )
