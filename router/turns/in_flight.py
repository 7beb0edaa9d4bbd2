"""One request on its way: who waits for it, and what came of it.

Owns: joining of retries, the deltas of a streamed turn, delivery. Does not own: drawing and
recording (service). Invariant: a job has one outcome, results or a refusal, however many requests
joined it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Protocol

from outloop.buffer.records import Sampling
from outloop.router.dialects.base import CallPlace, Delta, TurnResult, call_id_of
from outloop.router.errors import Refusal
from outloop.router.rendering.stream_filter import Shown


class Client(Protocol):
    """Whoever waits for an answer."""

    def is_gone(self) -> bool:
        """True if it has left."""


Encode = Callable[[Sequence[TurnResult]], bytes]
"""From results to a plain answer."""
_NUM_AT_ONCE = 1024
"""Deltas after which other turns have theirs."""
Work = Callable[["TurnJob"], Coroutine[Any, Any, None]]


class TurnJob:
    """A turn being served; requests attach to it while their client is there."""

    __slots__ = (
        "_clients",
        "_is_settled",
        "_refusal",
        "_results",
        "_waiting",
        "_work",
        "deltas",
        "drafted",
        "encode",
        "is_delivered",
        "is_drawn",
        "is_given_up",
        "is_over",
        "num_prompt_tokens",
        "sampling",
        "started_at",
        "task",
        "turn_ids",
    )

    def __init__(
        self, turn_ids: tuple[str, ...], started_at: float, work: Work | None = None
    ) -> None:
        """`work` finishes or fails the job, also when it is cancelled; whoever waits begins it."""
        self._work = work
        self.turn_ids = turn_ids
        self.started_at = started_at
        self.num_prompt_tokens = 0
        self.sampling: Sampling | None = None
        """In force, once that is known."""
        self.is_delivered = False
        self.task: asyncio.Task[None] | None = None
        self.deltas: list[Delta] = []
        self.encode: Encode | None = None
        self.drafted: bytes | None = None
        """The answer as whoever repeats the request gets it too, where it was made already."""
        self._clients: list[Client] = []
        self._waiting: list[asyncio.Future[None]] = []
        """Woken at every change: results, a delta, a client that attaches."""
        self._is_settled = False
        self._results: tuple[TurnResult, ...] = ()
        self._refusal: Refusal | None = None
        self.is_over = False
        self.is_drawn = False
        self.is_given_up = False
        """Whoever asked for it left and did not come back in time: it is recorded without loss."""

    @property
    def has_client(self) -> bool:
        """True while some client waits for the answer."""
        return any(not client.is_gone() for client in self._clients)

    @property
    def is_abandoned(self) -> bool:
        """True if nobody waits and nobody has the answer: an identical request is a retry."""
        return not self.is_delivered and not self.has_client

    @property
    def has_failed(self) -> bool:
        """True if it was refused; a retry of it is a new attempt."""
        return self._refusal is not None

    def attach(self, client: Client) -> None:
        """A client waits for this job."""
        self._clients.append(client)
        self._wake()

    def detach(self, client: Client) -> None:
        """That client has its answer, or wants none any more."""
        self._clients.remove(client)

    async def wait_for_client(self, timeout_s: float) -> bool:
        """True as soon as a client waits; False when none came back in time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not self.has_client:
            remaining = deadline - loop.time()
            if remaining <= 0 or self._is_settled:
                return False
            try:
                async with asyncio.timeout(remaining):
                    await self._change()
            except TimeoutError:
                return False
        return True

    def settle(self) -> None:
        """Let a job that waits for a client to come back go on without one."""
        self._is_settled = True
        self._wake()

    def show(self, choice_index: int, shown: Shown) -> None:
        """Hand what may be shown now on to streaming clients."""
        if shown.reasoning:
            self.deltas.append(
                Delta(choice_index=choice_index, text=shown.reasoning, is_reasoning=True)
            )
        if shown.text:
            self.deltas.append(Delta(choice_index=choice_index, text=shown.text))
        for piece in shown.calls:
            call_id = call_id_of(self.turn_ids[choice_index], piece.number)
            place = CallPlace(number=piece.number, id=call_id, name=piece.name)
            self.deltas.append(Delta(choice_index=choice_index, text=piece.arguments, call=place))
        self._wake()

    def draft(self, results: tuple[TurnResult, ...]) -> None:
        """Make the plain answer of what is about to be the outcome."""
        if self.encode is not None:
            self.drafted = self.encode(results)

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
        if self._work is not None:
            await self._do(self._work)
        await self.over()
        if self._refusal is not None:
            raise self._refusal
        return self._results

    async def stream(self) -> AsyncIterator[Delta]:
        """Every delta from the first on, until the turn is over."""
        if self._work is not None:
            work, self._work = self._work, None
            self.task = asyncio.create_task(work(self))
        index = 0
        while True:
            while index < len(self.deltas):
                yield self.deltas[index]
                index += 1
                if not index % _NUM_AT_ONCE:
                    await asyncio.sleep(0)
            if self.is_over:
                return
            await self._change()

    async def over(self) -> None:
        """Return when the job has its outcome."""
        while not self.is_over:
            await self._change()

    def cancel(self) -> None:
        """Give the turn up; its work ends soon after."""
        if self.task is not None and not self.is_over:
            self.task.cancel()

    async def _do(self, work: Work) -> None:
        """Do the work here: a task of its own would cost as much as reading the request."""
        self._work, self.task = None, asyncio.current_task()
        await work(self)

    async def _change(self) -> None:
        change = asyncio.get_running_loop().create_future()
        self._waiting.append(change)
        await change

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for change in waiting:
            if not change.done():
                change.set_result(None)
