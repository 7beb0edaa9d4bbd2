"""Orders of rank 0's publishing thread for a thread of every other rank, beside the training.

They travel over the store on which the ranks met: collectives are the training threads' alone,
which would wait for each other in another order.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import structlog
import torch
import torch.distributed as dist

from outloop.buffer.errors import DeadlineExceeded, OutloopError, PartFailed
from outloop.engine.machine.memory_shortage import is_memory_shortage

_LOOK_S = 0.5
"""How often it is looked whether the training thread has lost a rank; the store cannot tell."""
_FOLLOW_S = 60.0
"""How long the store is asked for the next order at once."""
_CLOSE_S = 5.0
_log = structlog.get_logger()


class _Answer(msgspec.Struct, frozen=True):
    content: bytes = b""
    failure: str = ""


class OrderChannel:
    """One end of it; every rank makes its own on the same store."""

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        num_ranks: int,
        timeout_s: float,
        is_broken: Callable[[], bool],
    ) -> None:
        """`timeout_s`: for the answers to an order; `is_broken`: whether a rank is lost, so that
        none will come."""
        # A connection of its own: the training thread may wait on its one.
        self._store = store.clone() if num_ranks > 1 else None
        self._rank = rank
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._is_broken = is_broken
        self._number = 0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def ask(self, order: bytes, own: Callable[[bytes], bytes]) -> list[bytes]:
        """Rank 0: have every rank carry out an order, this one by `own`; their answers.

        Raises:
            DeadlineExceeded: a rank did not answer.
            PartFailed: a rank failed, or is lost.
        """
        if self._store is None:
            return [own(order)]
        self._number += 1
        self._store.set(self._order_key(self._number), order)
        answers = [own(order)]
        keys = [self._answer_key(self._number, rank) for rank in range(1, self._num_ranks)]
        self._wait_for(keys)
        for rank, key in enumerate(keys, start=1):
            answer = msgspec.msgpack.decode(self._store.get(key), type=_Answer)
            self._store.delete_key(key)
            if answer.failure:
                raise PartFailed(f"trainer rank {rank} failed in a publish: {answer.failure}")
            answers.append(answer.content)
        self._store.delete_key(self._order_key(self._number))
        return answers

    def follow(self, carry_out: Callable[[bytes], bytes]) -> None:
        """Other ranks: carry out, in a thread, what rank 0 asks for, until `close`."""
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def run() -> None:
            if device is not None:
                torch.cuda.set_device(device)
            self._follow(carry_out)

        self._thread = threading.Thread(target=run, name="publishing", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask and follow no more; what is under way is waited for a while."""
        self._closed.set()
        if self._store is not None and not self._rank:
            with contextlib.suppress(RuntimeError):
                self._store.set(self._order_key(self._number + 1), b"")
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _follow(self, carry_out: Callable[[bytes], bytes]) -> None:
        assert self._store is not None
        number = 1
        while not self._closed.is_set():
            try:
                self._store.wait([self._order_key(number)], timedelta(seconds=_FOLLOW_S))
                order = self._store.get(self._order_key(number))
            except dist.DistStoreError:
                # None came.
                continue
            except RuntimeError:
                # The store ended with the run.
                return
            if not order:
                return
            try:
                answer = _Answer(content=carry_out(order))
            except Exception as error:  # sent to rank 0, which fails by it
                if is_memory_shortage(error):
                    # This rank is lost, which the others see.
                    raise
                _log.exception("order_failed")
                text = str(error) if isinstance(error, OutloopError) else repr(error)
                answer = _Answer(failure=text or repr(error))
            self._store.set(self._answer_key(number, self._rank), msgspec.msgpack.encode(answer))
            number += 1

    def _wait_for(self, keys: list[str]) -> None:
        assert self._store is not None
        began_at = time.monotonic()
        while True:
            try:
                self._store.wait(keys, timedelta(seconds=_LOOK_S))
                return
            except dist.DistStoreError as error:
                waited_s = time.monotonic() - began_at
                if self._is_broken() or self._closed.is_set():
                    raise PartFailed("a trainer rank was lost during a publish") from error
                if waited_s >= self._timeout_s:
                    silent = [key.rpartition("/")[2] for key in keys if not self._has(key)]
                    raise DeadlineExceeded(
                        who="trainer rank 0",
                        phase="publish beside training",
                        peer=f"trainer rank {', '.join(silent)}",
                        after_s=waited_s,
                    ) from error

    def _has(self, key: str) -> bool:
        assert self._store is not None
        return bool(self._store.check([key]))

    def _order_key(self, number: int) -> str:
        return f"outloop/order/{number}"

    def _answer_key(self, number: int, rank: int) -> str:
        return f"outloop/answer/{number}/{rank}"
