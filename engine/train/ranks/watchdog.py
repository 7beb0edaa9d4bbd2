"""What this rank is doing, whether it still makes progress, and who is missing when it does not.

A rank that makes no progress for `hang_timeout_s` reports its phase, the other ranks' phases and
where its threads stand, though the call that hangs never returns. On rank 0 the leases of the run
are renewed meanwhile, by a thread that does so only while the training thread makes progress: a
slow publish keeps them, a hung trainer loses them. A rank that the system gives no memory ends as
if it had been killed, also where the lack shows as a thread that never begins.
"""

from __future__ import annotations

import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import structlog
import torch.distributed as dist

from outloop.buffer.errors import (
    BufferLost,
    BufferUnavailable,
    DeadlineExceeded,
    OutloopError,
    PartFailed,
    RankKilled,
    SettingsError,
    UpdateRefused,
)
from outloop.engine.machine.memory_shortage import is_memory_shortage

_FAILURE = "outloop/failure"
_GLOO_TRANSPORT = re.compile(r"\[\S*gloo/transport/\S+\] |Application timeout caused pair closure")
"""How gloo's errors begin, which have no type of their own."""
_KINDS = {"settings": SettingsError, "killed": RankKilled}
"""Errors that are the same on every rank; any other is `PartFailed` on those that did not fail."""
_RESUMES = "The run goes on from its last checkpoint when it is started again"
_NUM_BEATS = 4
"""Beats that a rank may miss on a busy machine before it is called silent."""
_CLOSE_S = 5.0
_NUM_LOOKS = 10
"""Looks at the same thread that is being started before it is said that it will never begin."""
_log = structlog.get_logger()


class Watchdog:
    """Watches one rank; all ranks of a run make theirs on the same store."""

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        num_ranks: int,
        hang_timeout_s: float,
        store: Any = None,
        beat_s: float = 1.0,
        start_timeout_s: float = 10.0,
        on_hang: Callable[[PartFailed], None] | None = None,
    ) -> None:
        """Watch from now on.

        Args:
            folder: `hang_rank_R.txt` is written there.
            store: the rendezvous store; it is not used when there is one rank.
            beat_s: seconds between this rank's beats on the store; 0: it gives none.
            start_timeout_s: for how long a thread may be started without beginning; counted in
                looks, so that a process that is stopped or slowed has as many of them as ever.
            on_hang: gets the error after the report is written, in a thread; it may end the
                process. It is called once for a hang, again only after further progress. The error
                is `RankKilled` where a thread never begins for want of memory.
        """
        self._folder = folder
        self._rank = rank
        self._num_ranks = num_ranks
        self._hang_timeout_s = hang_timeout_s
        self._store = store
        self._beat_s = beat_s if num_ranks > 1 else 0.0
        self._on_hang = on_hang
        self._phase = "start"
        self._num_phases = 0
        self._num_ticks = 0
        self._is_watched = True
        self._progressed_at = time.monotonic()
        self._is_reported = False
        self._lease_failure: Exception | None = None
        self.has_lost_rank = False
        """Another rank ended, or did not come before a deadline."""
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._start("watchdog", self._watch)
        if self._beat_s:
            # A connection of its own: the training thread may wait on its one.
            connection = store.clone()
            self._start("beat", lambda: self._beat(connection))
        # Made now: later there may be no memory for it.
        connection = store.clone() if num_ranks > 1 else None
        look_s = start_timeout_s / _NUM_LOOKS
        self._start("thread starts", lambda: self._watch_starts(look_s, connection))

    def close(self) -> None:
        """Stop watching, beating and renewing."""
        self._closed.set()
        for thread in self._threads:
            thread.join(_CLOSE_S)

    def progress(self, phase: str = "") -> None:
        """The training thread made progress; with a name, a phase of rank 0 alone begins.

        Raises:
            FenceExpired: the leases are lost; another trainer holds this run.
            BufferLost: Redis does not hold the run any more.
        """
        self._phase = phase or self._phase
        self._num_ticks += 1
        self._mark()
        if self._lease_failure is not None:
            raise self._lease_failure

    def renew_leases(self, renew: Callable[[], None], *, every_s: float) -> None:
        """Call `renew` from now on, in a thread, as long as the training thread makes progress.

        Args:
            renew: uses a connection that no other thread uses.
        """

        def run() -> None:
            while not self._closed.wait(every_s):
                if time.monotonic() - self._progressed_at >= self._hang_timeout_s:
                    continue
                try:
                    renew()
                except BufferLost as error:
                    self._lease_failure = error
                    return
                except BufferUnavailable as error:
                    _log.warning("leases_not_renewed", sentence=str(error))
                except Exception as error:  # noqa: BLE001 - raised by `progress`, in its thread
                    self._lease_failure = error
                    return

        self._start("leases", run)

    @contextmanager
    def enter(self, phase: str, *, is_watched: bool = True) -> Iterator[None]:
        """Work in which the ranks wait for each other; all enter the same phases in order.

        Args:
            is_watched: false where this rank waits for rank 0 for as long as that one waits.

        Raises:
            DeadlineExceeded: another rank did not come; names it and where it is.
            RankKilled: another rank ended, or the system gave this one or another no memory.
            PartFailed, SettingsError: another rank failed first; its sentence.
        """
        before, self._phase, self._is_watched = self._phase, phase, is_watched
        self._num_phases += 1
        self._num_ticks = 0
        began_at = time.monotonic()
        try:
            self._mark()
            yield
        except (FloatingPointError, UpdateRefused):
            # Every rank raises it, and continues.
            raise
        except Exception as error:
            if self._num_ranks > 1 and isinstance(error, RuntimeError) and _is_collective(error):
                raise self._explain(phase, error, time.monotonic() - began_at) from error
            failure = as_killed(error, rank=self._rank, phase=phase)
            self._record(phase, failure, self._store)
            if failure is error:
                raise
            raise failure from error
        self._phase, self._is_watched = before, True
        self._progressed_at = time.monotonic()

    def _start(self, name: str, run: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=run, name=name, daemon=True))
        self._threads[-1].start()

    def _mark(self) -> None:
        self._progressed_at = time.monotonic()
        self._is_reported = False
        if self._num_ranks > 1:
            position = f"{self._num_phases}.{self._num_ticks} {self._phase}"
            self._store.set(f"outloop/phase/{self._rank}", position)

    def _watch(self) -> None:
        """Report when the training thread has made no progress for too long."""
        wait_s = self._hang_timeout_s
        while not self._closed.wait(max(wait_s, 0.01)):
            idle_s = time.monotonic() - self._progressed_at
            wait_s = self._hang_timeout_s - idle_s
            if wait_s > 0:
                continue
            wait_s = self._hang_timeout_s
            if self._is_watched and not self._is_reported:
                self._is_reported = True
                self._report(self._phase, idle_s)

    def _report(self, phase: str, idle_s: float) -> None:
        sentence = (
            f"trainer rank {self._rank} made no progress for {idle_s:.1f} s in phase={phase!r}; "
            f"{self._others()}. Look at hang_rank_{self._rank}.txt in {self._folder} for where its "
            "threads stand, or raise trainer.hang_timeout_s"
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"hang_rank_{self._rank}.txt"
        path.write_text(f"{sentence}\n\n{_stacks()}")
        _log.error("trainer_hangs", sentence=sentence)
        if self._on_hang is not None:
            self._on_hang(PartFailed(sentence))

    def _watch_starts(self, look_s: float, connection: Any) -> None:
        """End a rank that started a thread which never begins.

        `Thread.start` waits until the thread runs, without a deadline, and a thread that the
        system gives no memory before its first line ends without a word (CPython 3.11 to 3.13).
        """
        num_looks: dict[FrameType, int] = {}
        while not self._closed.wait(look_s):
            num_looks = {frame: num_looks.get(frame, 0) + 1 for frame in _thread_starts()}
            if max(num_looks.values(), default=0) == _NUM_LOOKS:
                phase = self._phase
                failure = RankKilled(
                    f"trainer rank {self._rank} started a thread in phase={phase!r} that had not "
                    f"begun after {_NUM_LOOKS * look_s:g} s: the system gives this process no more "
                    f"memory (look at ulimit -v and its cgroup). {_RESUMES}"
                )
                _log.error("rank_without_memory", sentence=str(failure), stacks=_stacks())
                self._record(phase, failure, connection)
                if self._on_hang is not None:
                    self._on_hang(failure)

    def _others(self) -> str:
        """Where the other ranks are; the one that is silent or behind is the one waited for."""
        if self._num_ranks == 1:
            return "it is the only rank"
        try:
            store = self._store.clone()
            silent = self._silent_ranks(store)
            return "; ".join(
                f"rank {rank}: phase={self._phase_of(store, rank)!r}"
                + (", no sign of life" if rank in silent else "")
                for rank in range(self._num_ranks)
                if rank != self._rank
            )
        except RuntimeError as error:
            return f"the store on which the ranks met does not answer ({error})"

    def _record(self, phase: str, error: Exception, store: Any) -> None:
        """Leave the first failure of the run for the ranks that will miss this one."""
        if self._num_ranks > 1:
            kind = next((k for k, of in _KINDS.items() if isinstance(error, of)), "part")
            text = str(error) if isinstance(error, OutloopError) else repr(error)
            # Where rank 0 has the store, it may be gone already.
            with suppress(dist.DistError):
                store.compare_set(_FAILURE, "", f"{self._rank}\n{kind}\n{phase}\n{text}")

    def _explain(self, phase: str, error: Exception, waited_s: float) -> OutloopError:
        """The error for a collective that failed: which rank is missing and why."""
        self.has_lost_rank = True
        try:
            return self._explain_by_store(phase, error, waited_s)
        except dist.DistError as gone:
            # Where torchrun does not share its store, rank 0 has it.
            return RankKilled(
                f"trainer rank {self._rank} lost the store on which the ranks met in "
                f"phase={phase!r} ({_last_line(gone)}). {_RESUMES}"
            )

    def _explain_by_store(self, phase: str, error: Exception, waited_s: float) -> OutloopError:
        if self._store.check([_FAILURE]):
            rank, kind, where, text = self._store.get(_FAILURE).decode().split("\n", 3)
            if kind in _KINDS:
                return _KINDS[kind](text)
            return PartFailed(f"trainer rank {rank} failed in phase={where!r}: {text}")
        missing = [
            f"trainer rank {rank} (no sign of life, in phase={self._phase_of(self._store, rank)!r})"
            for rank in self._silent_ranks(self._store)
        ] or [late for rank in range(self._num_ranks) if (late := self._late(rank))]
        if "timed out" in str(error).lower() or "timeout" in str(error).lower():
            return DeadlineExceeded(
                who=f"trainer rank {self._rank}",
                phase=phase,
                peer=", ".join(missing) or "a trainer rank that is in the same phase",
                after_s=waited_s,
            )
        return RankKilled(
            f"trainer rank {self._rank} lost another rank in phase={phase!r} ("
            f"{', '.join(missing) or 'all ranks were in the same phase'}): {_last_line(error)}. "
            f"{_RESUMES}"
        )

    def _late(self, rank: int) -> str:
        """A rank that is behind this one, and where it is."""
        key = f"outloop/phase/{rank}"
        if rank == self._rank:
            return ""
        if not self._store.check([key]):
            return f"trainer rank {rank} (not started)"
        position, phase = self._store.get(key).decode().split(" ", 1)
        num_phases, num_ticks = map(int, position.split("."))
        is_behind = (num_phases, num_ticks) < (self._num_phases, self._num_ticks)
        return f"trainer rank {rank} (in phase={phase!r})" if is_behind else ""

    def _beat(self, store: Any) -> None:
        """Count until closed; a stopped process stops counting, a waiting one does not."""
        count = 0
        while not self._closed.wait(self._beat_s):
            count += 1
            try:
                store.set(f"outloop/alive/{self._rank}", str(count))
            except RuntimeError:
                # The store ended with the run.
                return

    def _silent_ranks(self, store: Any) -> list[int]:
        """The ranks whose beats have stopped; takes a few beats to find out."""
        if not self._beat_s:
            return []
        before = self._beats(store)
        self._closed.wait(_NUM_BEATS * self._beat_s)
        after = self._beats(store)
        return [
            rank
            for rank in range(self._num_ranks)
            if rank != self._rank and before[rank] == after[rank]
        ]

    def _beats(self, store: Any) -> list[bytes]:
        keys = [f"outloop/alive/{rank}" for rank in range(self._num_ranks)]
        return [store.get(key) if store.check([key]) else b"" for key in keys]

    def _phase_of(self, store: Any, rank: int) -> str:
        key = f"outloop/phase/{rank}"
        if not store.check([key]):
            return "not started"
        return str(store.get(key).decode().split(" ", 1)[1])


def as_killed(error: Exception, *, rank: int, phase: str) -> Exception:
    """`RankKilled` in place of an error that says that memory was refused; else the error."""
    if not is_memory_shortage(error):
        return error
    return RankKilled(
        f"the system gave trainer rank {rank} no more memory in phase={phase!r} "
        f"({_last_line(error) or type(error).__name__}; look at ulimit -v and its cgroup). "
        f"{_RESUMES}"
    )


def _thread_starts() -> list[FrameType]:
    """The calls of `Thread.start` that have not returned, of all threads."""
    found = []
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None:
            if frame.f_code is threading.Thread.start.__code__:
                found.append(frame)
            frame = frame.f_back
    return found


def _last_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[-1][:200]


def _is_collective(error: Exception) -> bool:
    """Whether a collective failed because another rank did not take part."""
    return isinstance(error, dist.DistError) or bool(_GLOO_TRANSPORT.match(str(error)))


def _stacks() -> str:
    """Where every thread of this process stands."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
