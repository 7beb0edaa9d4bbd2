"""One line of what `outloop doctor` answers."""

from __future__ import annotations

from dataclasses import dataclass

from rich.markup import escape


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What was looked at and found; a missing required thing makes the exit code 1.

    `what`, `found` and `advice` are rich's markup.
    """

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
    """Something that a run needs and that is there; plain text."""
    return Finding(what=escape(what), found=escape(found), is_ok=True, is_required=True)


def bad(what: str, found: str, advice: str, *, is_required: bool = True) -> Finding:
    """Something that is not as it should be, and what to do; plain text."""
    return Finding(
        what=escape(what),
        found=escape(found),
        is_ok=False,
        is_required=is_required,
        advice=escape(advice),
    )
