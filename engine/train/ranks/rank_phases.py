"""Which phase each trainer rank is in, so that a hang or a death has a name.

Owns: the ranks' places and signs of life on the rendezvous store, and the error when a rank does
not come. Does not own: the phases' work, the deadline itself (the process group's). Invariant: a
rank that fails says so on the store before it ends; a rank that waited in vain names whom it waited
for, and the phase: one that shows no sign of life, else one that is behind.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from outloop.buffer.errors import (
    DeadlineExceeded,
    OutloopError,
    PartFailed,
    RankKilled,
    SettingsError,
)

_FAILURE = "outloop/failure"
_GLOO_TRANSPORT = re.compile(r"\[\S*gloo/transport/\S+\] |Application timeout caused pair closure")
"""How gloo's errors begin, which have no type of their own."""

_NUM_BEATS = 4
"""Signs of life that a rank may miss on a busy machine before it is called silent."""


class Phases:
    """This rank's phases; see `enter`."""

    def __init__(self, store: Any, *, rank: int, num_ranks: int, beat_s: float = 0.0) -> None:
        """Begin before the first phase.

        Args:
            store: the rendezvous store; it is not used when there is one rank.
            beat_s: seconds between signs of life, given by a thread; 0: none are given.
        """
        self._store = store
        self._rank = rank
        self._num_ranks = num_ranks
        self._count = 0
        self._num_ticks = 0
        self._phase = ""
        self._beat_s = beat_s if num_ranks > 1 else 0.0
        self._is_closed = threading.Event()
        if self._beat_s:
            # A connection of its own: the main thread may wait on its one.
            threading.Thread(
                target=self._beat, args=(store.clone(),), name="signs of life", daemon=True
            ).start()

    def close(self) -> None:
        """Give no more signs of life."""
        self._is_closed.set()

    def tick(self) -> None:
        """Part of a phase is done: a microbatch."""
        if self._num_ranks > 1:
            self._num_ticks += 1
            self._say_place()

    @contextmanager
    def enter(self, phase: str) -> Iterator[None]:
        """Work in which the ranks wait for each other.

        Raises:
            DeadlineExceeded: another rank did not come; names it and where it is.
            RankKilled: another rank ended.
            PartFailed, SettingsError: another rank failed first; its sentence.
        """
        if self._num_ranks == 1:
            yield
            return
        self._count += 1
        self._num_ticks = 0
        self._phase = phase
        began_at = time.monotonic()
        self._say_place()
        try:
            yield
        except RuntimeError as error:
            if not _is_collective(error):
                self._tell(phase, error)
                raise
            raise self._explain(phase, error, time.monotonic() - began_at) from error
        except FloatingPointError:
            # A refused update: every rank came to it, and goes on.
            raise
        except Exception as error:
            self._tell(phase, error)
            raise

    def _tell(self, phase: str, error: Exception) -> None:
        kind = "settings" if isinstance(error, SettingsError) else "part"
        text = str(error) if isinstance(error, OutloopError) else repr(error)
        self._store.compare_set(_FAILURE, "", f"{self._rank}\n{kind}\n{phase}\n{text}")

    def _explain(self, phase: str, error: Exception, waited_s: float) -> OutloopError:
        """What became of the rank that did not come."""
        if self._store.check([_FAILURE]):
            rank, kind, where, text = self._store.get(_FAILURE).decode().split("\n", 3)
            if kind == "settings":
                return SettingsError(text)
            return PartFailed(f"trainer rank {rank} failed in phase={where!r}: {text}")
        late = self._silent() or [
            place for rank in range(self._num_ranks) if (place := self._late(rank))
        ]
        if "timed out" in str(error).lower() or "timeout" in str(error).lower():
            return DeadlineExceeded(
                who=f"trainer rank {self._rank}",
                phase=phase,
                peer=", ".join(late) or "a trainer rank that is in the same phase",
                after_s=waited_s,
            )
        last = str(error).splitlines()[-1][:200]
        return RankKilled(
            f"trainer rank {self._rank} lost another rank in phase={phase!r} ("
            f"{', '.join(late) or 'all ranks were in the same phase'}): {last}. "
            "The run goes on from its last checkpoint when it is started again"
        )

    def _late(self, rank: int) -> str:
        """A rank that is behind this one, and where it is."""
        key = f"outloop/phase/{rank}"
        if rank == self._rank:
            return ""
        if not self._store.check([key]):
            return f"trainer rank {rank} (not started)"
        place, phase = self._store.get(key).decode().split(" ", 1)
        count, ticks = map(int, place.split("."))
        is_behind = (count, ticks) < (self._count, self._num_ticks)
        return f"trainer rank {rank} (in phase={phase!r})" if is_behind else ""

    def _say_place(self) -> None:
        self._store.set(
            f"outloop/phase/{self._rank}", f"{self._count}.{self._num_ticks} {self._phase}"
        )

    def _beat(self, store: Any) -> None:
        """Count, until closed; a stopped process stops counting, one that waits does not."""
        count = 0
        while not self._is_closed.wait(self._beat_s):
            count += 1
            try:
                store.set(f"outloop/alive/{self._rank}", str(count))
            except RuntimeError:
                # The store ended with the run.
                return

    def _silent(self) -> list[str]:
        """The ranks that give no sign of life, and where they are."""
        if not self._beat_s:
            return []
        before = self._signs()
        self._is_closed.wait(_NUM_BEATS * self._beat_s)
        after = self._signs()
        return [
            f"trainer rank {rank} (no sign of life, in phase={self._phase_of(rank)!r})"
            for rank in range(self._num_ranks)
            if rank != self._rank and before[rank] == after[rank]
        ]

    def _signs(self) -> list[bytes]:
        keys = [f"outloop/alive/{rank}" for rank in range(self._num_ranks)]
        return [self._store.get(key) if self._store.check([key]) else b"" for key in keys]

    def _phase_of(self, rank: int) -> str:
        key = f"outloop/phase/{rank}"
        if not self._store.check([key]):
            return "not started"
        return str(self._store.get(key).decode().split(" ", 1)[1])


def _is_collective(error: Exception) -> bool:
    """Whether a collective failed because another rank did not take part."""
    return isinstance(error, dist.DistError) or bool(_GLOO_TRANSPORT.match(str(error)))
