"""Who changed what through the router: lines of its log, if `router.audit_log` asks for them."""

from __future__ import annotations

import structlog

_log = structlog.get_logger()


class AuditLog:
    """One router's; without `is_on` it writes nothing."""

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on

    def note(self, act: str, by: str, **what: str | float | bool | None) -> None:
        """Log an act that was done; `by` is the name of a key."""
        if self._is_on:
            _log.info("audit", act=act, by=by, **what)
