"""What this rank is doing, and a report when it does nothing for too long.

Owns: the phase of a rank, its file beside those of the other ranks, the hang report. Does not own:
deadlines of single waits, which raise where they wait. Invariant: a rank that makes no progress for
`timeout_s` says so with its phase, the other ranks' phases and where its threads stand, though the
call that hangs never returns.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import structlog

_WRITE_INTERVAL_S = 1.0
_log = structlog.get_logger()


class Progress:
    """Marks of one rank, watched by a thread of its own."""

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        timeout_s: float,
        on_hang: Callable[[str], None] | None = None,
    ) -> None:
        """Watch from now on.

        Args:
            folder: shared by the ranks of a run; `rank_R.json` and `hang_rank_R.txt` go there.
            on_hang: gets the sentence after the report is written; it may end the process. It is
                called once for a hang, again only after a further mark.
        """
        self._folder = folder
        self._rank = rank
        self._timeout_s = timeout_s
        self._on_hang = on_hang
        self._phase = "start"
        self._marked_at = time.monotonic()
        self._written_at = float("-inf")
        self._is_reported = False
        self._changed = threading.Condition()
        self._is_closed = False
        folder.mkdir(parents=True, exist_ok=True)
        self._write()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)
        self._thread.start()

    def mark(self, phase: str = "") -> None:
        """Progress was made; with a name, a new phase begins."""
        with self._changed:
            is_new = bool(phase) and phase != self._phase
            self._phase = phase or self._phase
            self._marked_at = time.monotonic()
            self._is_reported = False
        if is_new or self._marked_at - self._written_at > _WRITE_INTERVAL_S:
            self._write()

    def close(self) -> None:
        """Stop watching."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(5.0)

    def _write(self) -> None:
        self._written_at = time.monotonic()
        fact = {"rank": self._rank, "phase": self._phase, "at": time.time()}
        path = self._folder / f"rank_{self._rank}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(fact))
        partial.replace(path)

    def _watch(self) -> None:
        while True:
            with self._changed:
                if self._is_closed:
                    return
                idle_s = time.monotonic() - self._marked_at
                is_due = idle_s >= self._timeout_s and not self._is_reported
                if not is_due:
                    wait_s = self._timeout_s - idle_s
                    self._changed.wait(wait_s if wait_s > 0 else self._timeout_s)
                    continue
                self._is_reported = True
                phase = self._phase
            self._report(phase, idle_s)

    def _report(self, phase: str, idle_s: float) -> None:
        sentence = (
            f"trainer rank {self._rank} made no progress for {idle_s:.1f} s in phase={phase!r}; "
            f"{self._others()}. Look at hang_rank_{self._rank}.txt in {self._folder} for where its "
            "threads stand, or raise trainer.hang_timeout_s"
        )
        path = self._folder / f"hang_rank_{self._rank}.txt"
        path.write_text(f"{sentence}\n\n{_stacks()}")
        _log.error("trainer_hangs", sentence=sentence)
        if self._on_hang is not None:
            self._on_hang(sentence)

    def _others(self) -> str:
        """The other ranks' phases; the one that is behind is whom the rest wait for."""
        facts = []
        for path in sorted(self._folder.glob("rank_*.json")):
            fact = json.loads(path.read_text())
            if fact["rank"] != self._rank:
                age_s = max(0.0, time.time() - fact["at"])
                facts.append(f"rank {fact['rank']}: phase={fact['phase']!r} {age_s:.1f} s ago")
        return "; ".join(facts) or "it is the only rank"


def _stacks() -> str:
    """Where every thread of this process stands."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
