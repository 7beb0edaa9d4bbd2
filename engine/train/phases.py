"""Which phase each trainer rank is in, so that a hang or a death has a name.

Owns: the ranks' places on the rendezvous store, and the error when a rank does not come. Does not
own: the phases' work, the deadline itself (the process group's). Invariant: a rank that fails says
so on the store before it ends; a rank that waited in vain names whom it waited for, and the phase.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from outloop.buffer.errors import (
    DeadlineExceeded,
    OutloopError,
    PartFailed,
    RankKilled,
    SettingsError,
)

_FAILURE = "outloop/failure"
_COLLECTIVE_WORDS = ("timed out", "timeout", "connection", "gloo", "nccl", "peer", "process group")


class Phases:
    """This rank's phases; see `enter`."""

    def __init__(self, store: Any, *, rank: int, num_ranks: int) -> None:
        """`store` is the rendezvous store; it is not used when there is one rank."""
        self._store = store
        self._rank = rank
        self._num_ranks = num_ranks
        self._count = 0

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
        began_at = time.monotonic()
        self._store.set(f"outloop/phase/{self._rank}", f"{self._count} {phase}")
        try:
            yield
        except RuntimeError as error:
            if not _is_collective(error):
                self._tell(phase, error)
                raise
            raise self._explain(phase, error, time.monotonic() - began_at) from error
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
        late = [place for rank in range(self._num_ranks) if (place := self._late(rank))]
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
        count, phase = self._store.get(key).decode().split(" ", 1)
        return f"trainer rank {rank} (in phase={phase!r})" if int(count) < self._count else ""


def _is_collective(error: Exception) -> bool:
    text = str(error).lower()
    return any(word in text for word in _COLLECTIVE_WORDS)
