"""One request on its way: who waits for it, and what came of it.

Owns: joining of retries, the deltas of a streamed turn, delivery. Does not own: drawing and
recording (service). Invariant: a job has one outcome, results or a refusal, however many requests
joined it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from outloop.router.refusals import Refusal
from outloop.router.turns import Delta, TurnResult


class TurnJob:
    """A turn being served; requests attach to it while their client is there."""

    def __init__(self, turn_ids: tuple[str, ...], started_at: float) -> None:
        self.turn_ids = turn_ids
        self.started_at = started_at
        self.num_prompt_tokens = 0
        self.is_delivered = False
        self.task: asyncio.Task[None] | None = None
        self.deltas: list[Delta] = []
        self._num_listeners = 0
        self._progress = asyncio.Event()
        self._attached = asyncio.Event()
        self._results: tuple[TurnResult, ...] = ()
        self._refusal: Refusal | None = None
        self.is_over = False
        self.is_drawn = False

    @property
    def has_listener(self) -> bool:
        """True while some client waits for the answer."""
        return self._num_listeners > 0

    @property
    def is_abandoned(self) -> bool:
        """True if nobody waits and nobody has the answer: an identical request is a retry."""
        return not self.has_listener and not self.is_delivered

    @property
    def has_failed(self) -> bool:
        """True if it was refused; a retry of it is a new attempt."""
        return self._refusal is not None

    def attach(self) -> None:
        """A client waits for this job."""
        self._num_listeners += 1
        self._attached.set()

    def detach(self) -> None:
        """That client has gone, or has its answer."""
        self._num_listeners -= 1
        if not self._num_listeners:
            self._attached.clear()

    def settle(self) -> None:
        """Let a job that waits for a client to come back go on without one."""
        self._attached.set()

    async def wait_for_client(self, timeout_s: float) -> bool:
        """True as soon as a client waits; False when none came back in time."""
        if not self.has_listener:
            try:
                await asyncio.wait_for(self._attached.wait(), timeout_s)
            except TimeoutError:
                return False
        return self.has_listener

    def push(self, delta: Delta) -> None:
        """Hand a piece on to streaming clients."""
        self.deltas.append(delta)
        self._wake()

    def finish(self, results: tuple[TurnResult, ...]) -> None:
        """The turn is recorded."""
        self._results = results
        self.is_over = True
        self._wake()

    def fail(self, refusal: Refusal) -> None:
        """The turn will not be answered."""
        self._refusal = refusal
        self.is_over = True
        self._wake()

    async def results(self) -> tuple[TurnResult, ...]:
        """The recorded answer, one result per choice.

        Raises:
            Refusal: it was refused.
        """
        while not self.is_over:
            await self._progress.wait()
        if self._refusal is not None:
            raise self._refusal
        return self._results

    async def stream(self) -> AsyncIterator[Delta]:
        """Every delta from the first on, until the turn is over."""
        index = 0
        while True:
            while index < len(self.deltas):
                yield self.deltas[index]
                index += 1
            if self.is_over:
                return
            await self._progress.wait()

    def _wake(self) -> None:
        waiting, self._progress = self._progress, asyncio.Event()
        waiting.set()
