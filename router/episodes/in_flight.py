"""A turn between its request and its record: what is known of it, who waits for it, its outcome.

Owns: joining of retries, the deltas of a streamed turn, delivery. Does not own: generating and
recording (service). Invariant: a turn has one outcome, results or a refusal, however many requests
joined it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from outloop.buffer.records import Sampling, Turn
from outloop.router.dialects.base import CallPlace, Delta, TurnRequest, TurnResult, call_id_of
from outloop.router.episodes.episode import LiveEpisode
from outloop.router.episodes.turn_tree import Plan
from outloop.router.errors import Refusal
from outloop.router.rendering.stream_filter import Shown

_NUM_AT_ONCE = 1024
"""Deltas after which the event loop serves other turns."""


class Client(Protocol):
    """Whoever waits for an answer."""

    @property
    def is_gone(self) -> bool:
        """True if it has left."""


class InFlightTurn:
    """A turn being served; requests attach to it while their client is there."""

    __slots__ = (
        "_clients",
        "_is_over",
        "_is_settled",
        "_refusal",
        "_results",
        "_waiting",
        "deltas",
        "episode",
        "is_delivered",
        "is_generated",
        "is_given_up",
        "is_retry",
        "num_prompt_tokens",
        "plan",
        "replayed",
        "request",
        "retry_key",
        "sampling",
        "started_at",
        "task",
        "turn_ids",
    )

    def __init__(
        self, episode: LiveEpisode, request: TurnRequest, retry_key: str, *, is_retry: bool
    ) -> None:
        self.episode = episode
        self.request = request
        """As it was asked; with its whole conversation once it is planned."""
        self.retry_key = retry_key
        self.is_retry = is_retry
        """It may turn out to be a turn that is recorded already."""
        self.started_at = time.time()
        self.turn_ids: tuple[str, ...] = ()
        """One for each choice, once it is admitted."""
        self.plan: Plan | None = None
        self.num_prompt_tokens = 0
        self.sampling: Sampling | None = None
        """In force, once that is known."""
        self.replayed: tuple[Turn, ...] = ()
        """What a lost attempt had recorded of it, by choice; (): it is generated now."""
        self.task: asyncio.Task[None] | None = None
        self.deltas: list[Delta] = []
        self.is_delivered = False
        self.is_generated = False
        self.is_given_up = False
        """Whoever asked for it left and did not come back in time: it is recorded without loss."""
        self._clients: list[Client] = []
        self._is_over = asyncio.Event()
        self._waiting: list[asyncio.Future[bool]] = []
        """Woken at every change: results, a delta, a client that attaches."""
        self._is_settled = False
        self._results: tuple[TurnResult, ...] = ()
        self._refusal: Refusal | None = None

    @property
    def is_over(self) -> bool:
        """True once it has its outcome."""
        return self._is_over.is_set()

    @property
    def num_clients(self) -> int:
        """How many clients wait for the answer."""
        return sum(not client.is_gone for client in self._clients)

    @property
    def has_client(self) -> bool:
        """True while some client waits for the answer."""
        return self.num_clients > 0

    @property
    def is_abandoned(self) -> bool:
        """True if nobody waits and nobody has the answer: an identical request is a retry."""
        return not self.is_delivered and not self.has_client

    @property
    def has_failed(self) -> bool:
        """True if it was refused; a retry of it is a new attempt."""
        return self._refusal is not None

    def attach(self, client: Client) -> None:
        """A client waits for this turn."""
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
        """Let a turn that waits for a client to come back go on without one."""
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

    def finish(self, results: Sequence[TurnResult]) -> None:
        """The turn is recorded."""
        self._results = tuple(results)
        self._is_over.set()
        self._wake()

    def fail(self, refusal: Refusal) -> None:
        """The turn will not be answered."""
        self._refusal = refusal
        self._is_over.set()
        self._wake()

    async def results(self) -> tuple[TurnResult, ...]:
        """The recorded answer, one result per choice.

        Raises:
            Refusal: it was refused.
        """
        await self.over()
        if self._refusal is not None:
            raise self._refusal
        return self._results

    async def stream(self, silence_s: float) -> AsyncIterator[Delta | None]:
        """Every delta from the first on, until the turn is over; None after each `silence_s` in
        which there was none."""
        index = 0
        while True:
            while index < len(self.deltas):
                yield self.deltas[index]
                index += 1
                if not index % _NUM_AT_ONCE:
                    await asyncio.sleep(0)
            if self.is_over:
                return
            if not await self._change(silence_s):
                yield None

    async def planned(self) -> None:
        """Return when the turn's prompt is known, or it has its outcome."""
        while self.plan is None and not self.is_over:
            await self._change()

    def set_plan(self, request: TurnRequest, plan: Plan) -> None:
        """What the server is to be given; `request` has the whole conversation."""
        self.request, self.plan = request, plan
        self._wake()

    async def over(self) -> None:
        """Return when the turn has its outcome."""
        await self._is_over.wait()

    def cancel(self) -> None:
        """Give the turn up; its task ends soon after."""
        if self.task is not None and not self.is_over:
            self.task.cancel()

    def abandon_unless_generated(self) -> None:
        """Nobody is to be waited for any more: record what is generated, else give the turn up."""
        self.settle()
        if not self.is_generated:
            self.cancel()

    async def _change(self, timeout_s: float | None = None) -> bool:
        """Wait for something to be new; False: nothing was for `timeout_s`."""
        loop = asyncio.get_running_loop()
        change: asyncio.Future[bool] = loop.create_future()
        self._waiting.append(change)
        if timeout_s is None:
            return await change
        # Cheaper than asyncio.timeout, once for each delta.
        handle = loop.call_later(timeout_s, _resolve, change, False)
        try:
            return await change
        finally:
            handle.cancel()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for change in waiting:
            _resolve(change, True)


def _resolve(change: asyncio.Future[bool], is_new: bool) -> None:
    if not change.done():
        change.set_result(is_new)
