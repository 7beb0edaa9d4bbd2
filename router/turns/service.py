"""One turn from request to record: plan, sampling, generate, record.

Owns: the order of these steps, and in-flight turns. Does not own: any of the steps. Invariant:
results are handed out only after the buffer has their turns; what the client did not get is
recorded without loss.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any, TypeVar

import structlog
from msgspec.structs import replace

from outloop.buffer.errors import Gone, OutloopError
from outloop.buffer.records import Sampling
from outloop.buffer.routed_experts import replayed_shape
from outloop.buffer.settings import Settings
from outloop.buffer.writer import BufferWriter
from outloop.router.buffer_retry import BufferRetry
from outloop.router.dialects.base import TurnRequest, TurnResult
from outloop.router.episodes.budgets import Budgets
from outloop.router.episodes.episode import Episodes, LiveEpisode
from outloop.router.episodes.in_flight import InFlightTurn
from outloop.router.episodes.replay import generated_before
from outloop.router.errors import (
    CONTEXT_LENGTH_EXCEEDED,
    Refusal,
    as_refusal,
    context_length_exceeded,
    episode_closed,
    stopping,
)
from outloop.router.metrics import RouterMetrics
from outloop.router.peers.turn_locator import TurnLocator
from outloop.router.rendering.renderer import PolicyRenderer
from outloop.router.servers.generate_api import (
    NO_OPTIONS,
    GenerateOptions,
    Prompt,
    WantedRoutes,
)
from outloop.router.servers.generation import Generator
from outloop.router.servers.pool import VersionGone, version_away
from outloop.router.timings import DEFAULT_TIMINGS, Timings
from outloop.router.turns.answer_reader import AnswerReader
from outloop.router.turns.delivery import Delivery
from outloop.router.turns.planner import Planner
from outloop.router.turns.recorder import GeneratedChoice, Recorder
from outloop.router.turns.retries import Retries, repeated
from outloop.router.turns.sampling import decide, sampling_of_choice

_CLIENT_CHECK_S = 0.2
_TURN_ID_BYTES = 12
_log = structlog.get_logger()
T = TypeVar("T")


class TurnService:
    """Serves turns of all episodes."""

    def __init__(
        self,
        settings: Settings,
        buffer: BufferWriter,
        renderer: PolicyRenderer,
        episodes: Episodes,
        generator: Generator,
        metrics: RouterMetrics,
        locator: TurnLocator,
        buffer_retry: BufferRetry,
        tasks: asyncio.TaskGroup,
        long_texts: Executor,
        timings: Timings = DEFAULT_TIMINGS,
    ) -> None:
        """`tasks`: turns run in it; each handles its own failure, so that none ends the group.
        `long_texts`: one thread for what would hold up the event loop."""
        self._settings = settings
        self._routing = replayed_shape(settings)
        self._renderer = renderer
        self._episodes = episodes
        self._buffer_retry = buffer_retry
        self._generator = generator
        self._metrics = metrics
        self._tasks = tasks
        self._reader = AnswerReader(renderer)
        self._delivery = Delivery(locator, metrics, return_grace_s=timings.return_grace_s)
        self._recorder = Recorder(
            buffer,
            renderer,
            self._reader,
            metrics,
            buffer_retry,
            self._delivery,
            log_turns=settings.router.log_turns,
            max_support_ids=settings.sampling.max_support_ids,
        )
        self._planner = Planner(renderer, episodes, settings.sampling, long_texts)
        self._retries = Retries(episodes, self._planner, self._reader, locator)
        self.budgets = Budgets(settings.router, buffer)
        self._turns: set[InFlightTurn] = set()
        self.is_draining = False

    @property
    def num_running(self) -> int:
        """Turns that are not over."""
        return len(self._turns)

    async def submit(
        self, episode: LiveEpisode, request: TurnRequest, *, retry_key: str, is_retry: bool
    ) -> InFlightTurn:
        """The turn of a request: a new one, which has begun, or the one that this repeats.

        Raises:
            Refusal: the episode has ended, a budget is spent, or the router is full.
        """
        try:
            await self._count_all_turns(episode, request)
            return self._submit(episode, request, retry_key, is_retry=is_retry)
        except Refusal as refusal:
            _log.info("turn_refused", episode_id=episode.episode_id, code=refusal.code)
            await self.budgets.note(episode, refusal)
            raise

    async def count_tokens(self, episode: LiveEpisode, request: TurnRequest) -> int:
        """How many ids a conversation has, rendered in full.

        Raises:
            Refusal: the episode has ended, has asked for this too often, or is too long.
        """
        episode.check_open()
        self.budgets.count(episode)
        return await self._planner.count(request)

    async def end(self, episode: LiveEpisode) -> None:
        """Finish what an episode that is being closed has running: record or abandon it."""
        running = [turn for turns in episode.turns.values() for turn in turns if not turn.is_over]
        for turn in running:
            turn.abandon_unless_generated()
        for turn in running:
            await turn.over()

    async def drain(self, timeout_s: float) -> None:
        """Take no new turns and finish the running ones; after `timeout_s` they are given up.

        Who waits for a turn that is given up is told to come back. A turn that nobody waits for is
        recorded if it is generated, and else given up at once: its retry asks another process.
        """
        self.is_draining = True
        deadline = time.monotonic() + timeout_s
        while self._turns and (remaining := deadline - time.monotonic()) > 0:
            for turn in self._turns:
                if not turn.has_client:
                    turn.abandon_unless_generated()
            with suppress(TimeoutError):
                # A client that leaves wakes nobody.
                async with asyncio.timeout(min(remaining, _CLIENT_CHECK_S)):
                    await self._all_over()
        await self.close()

    async def close(self) -> None:
        """Abandon every running turn; who waits for one is told to come back."""
        self.is_draining = True
        self._buffer_retry.end()
        for turn in self._turns:
            turn.cancel()
        await self._all_over()

    async def _all_over(self) -> None:
        while self._turns:
            await next(iter(self._turns)).over()

    async def _count_all_turns(self, episode: LiveEpisode, request: TurnRequest) -> None:
        """Read turns that the buffer counts and this process does not know, where they would spend
        the budget: some may be of its own turns, of which it has not heard yet."""
        if self.budgets.may_count_twice(episode, request.num_choices):
            await self._episodes.refresh(episode)

    def _submit(
        self, episode: LiveEpisode, request: TurnRequest, retry_key: str, *, is_retry: bool
    ) -> InFlightTurn:
        # Nothing is awaited between the look for an equal turn and the entry of this one: an
        # identical retry would pass in between.
        episode.check_open()
        earlier = repeated(episode.turns.get(retry_key, ()), is_retry)
        if earlier is not None:
            self._metrics.replays.inc()
            return earlier
        is_retry = is_retry or episode.meets_undelivered(retry_key)
        turn = InFlightTurn(episode, request, retry_key, is_retry=is_retry)
        if not is_retry:
            self._admit(turn)
        episode.turns.setdefault(retry_key, []).append(turn)
        episode.num_asked += 1
        self._turns.add(turn)
        turn.task = self._tasks.create_task(self._run(turn))
        turn.task.add_done_callback(lambda _: self._settle(turn))
        return turn

    def _settle(self, turn: InFlightTurn) -> None:
        """A turn whose task was cancelled before it began has an outcome too."""
        self._turns.discard(turn)
        if not turn.is_over:
            turn.episode.remove(turn)
            turn.fail(stopping() if self.is_draining else _closed())

    def _admit(self, turn: InFlightTurn) -> None:
        """Give a turn its ids, where the episode and this process have room for one more."""
        if self.is_draining:
            raise stopping()
        num_choices = turn.request.num_choices
        self.budgets.check(turn.episode, num_choices)
        settings = self._settings.router
        limit = -(-settings.max_queued_turns // settings.num_processes)
        num_others = self.num_running - (turn in self._turns)
        if num_others >= limit:
            raise Refusal(
                503,
                "router_full",
                f"{num_others} turns are in flight in this router process "
                f"(router.max_queued_turns={settings.max_queued_turns} over "
                f"router.num_processes={settings.num_processes}); wait",
                retry_after_s=1.0,
            )
        turn.turn_ids = tuple(secrets.token_hex(_TURN_ID_BYTES) for _ in range(num_choices))

    async def _run(self, turn: InFlightTurn) -> None:
        """Bring a turn to its outcome. It never raises: that would end every other turn too."""
        episode = turn.episode
        refusal: Refusal | None = None
        try:
            turn.finish(await self._find(turn) or await self._serve(turn))
            self._metrics.turn_seconds.observe(time.time() - turn.started_at)
        except asyncio.CancelledError:
            has_ended = episode.is_closed or not self.is_draining
            refusal = _closed() if has_ended else stopping()
        except OutloopError as error:
            refusal = as_refusal(error)
            if isinstance(error, Gone):
                episode.is_closed = True
                refusal = episode_closed(str(error))
            _log.info(
                "turn_failed",
                episode_id=episode.episode_id,
                turn_ids=turn.turn_ids,
                code=refusal.code,
                error=str(error),
            )
        except Exception:  # noqa: BLE001 - a task is a boundary: the client gets a 500, we the trace
            _log.exception("turn_crashed", episode_id=episode.episode_id, turn_ids=turn.turn_ids)
            refusal = Refusal(
                500, "internal_error", "the router failed on this turn", retry_after_s=1.0
            )
        try:
            if refusal is not None:
                await self._refuse(turn, refusal)
        finally:
            self._turns.discard(turn)

    async def _refuse(self, turn: InFlightTurn, refusal: Refusal) -> None:
        """A turn that came to nothing is no turn: its retry starts afresh."""
        turn.episode.remove(turn)
        if refusal.code == CONTEXT_LENGTH_EXCEEDED:
            # It has cost what a turn costs here, and might be repeated without end.
            turn.episode.num_too_long += 1
        try:
            await self.budgets.note(turn.episode, refusal)
        except asyncio.CancelledError:
            refusal = stopping()
        finally:
            turn.fail(refusal)

    async def _find(self, turn: InFlightTurn) -> tuple[TurnResult, ...]:
        """The recorded answer of a retry; (): it is a turn of its own."""
        if not turn.is_retry:
            return ()
        found = await self._retries.find(turn)
        if found:
            self._metrics.replays.inc()
            turn.turn_ids = tuple(result.turn.turn_id for result in found)
            turn.started_at = found[-1].turn.started_at
            turn.num_prompt_tokens = found[0].num_prompt_tokens
            turn.sampling = found[0].turn.sampling
            return found
        await self._count_all_turns(turn.episode, turn.request)
        turn.episode.check_open()
        self._admit(turn)
        return ()

    async def _serve(self, turn: InFlightTurn) -> tuple[TurnResult, ...]:
        episode = turn.episode
        request, plan = await self._planner.plan(episode, turn.request)
        turn.set_plan(request, plan)
        prompt = episode.tree.prompt(plan)
        self._decide_sampling(turn, prompt)
        assert turn.sampling is not None
        samplings = [
            sampling_of_choice(turn.sampling, index) for index in range(turn.request.num_choices)
        ]
        turn.replayed = episode.recorded.pop(prompt, samplings, turn.request.policy_version)
        if turn.replayed:
            turn.turn_ids = tuple(one.turn_id for one in turn.replayed)
        try:
            choices = await _all_of(
                [self._generate(turn, prompt, index) for index in range(turn.request.num_choices)]
            )
            turn.is_generated = True
            await self._delivery.wait_for_client(turn)
            return tuple([await self._recorder.record(turn, choice) for choice in choices])
        except BaseException:
            episode.recorded.give_back(prompt, turn.replayed)
            raise

    def _decide_sampling(self, turn: InFlightTurn, prompt: Prompt) -> None:
        """Set what the turn is sampled with, within what the context and its budget leave.

        Raises:
            Refusal: 400, the context is full or the run rejects what was asked; or the tokens of
                the episode are spent.
        """
        limit, request, plan = self._settings.model.max_context_tokens, turn.request, turn.plan
        assert plan is not None
        room = limit - prompt.num_ids
        if room < 1:
            raise context_length_exceeded(prompt.num_ids, limit)
        sampling = decide(request, turn.episode.opening, self._settings.sampling, room=room)
        left = self.budgets.room(turn.episode, len(plan.prompt_ids), request.num_choices)
        if left is not None and left < sampling.max_new_tokens:
            sampling = replace(sampling, max_new_tokens=left)
        turn.num_prompt_tokens, turn.sampling = prompt.num_ids, sampling

    async def _generate(self, turn: InFlightTurn, prompt: Prompt, index: int) -> GeneratedChoice:
        """One choice, generated now or, where a lost attempt had recorded it, as it was then."""
        request, plan = turn.request, turn.plan
        assert plan is not None
        assert turn.sampling is not None
        live = self._reader.live(request, plan)

        def show(new: list[int]) -> None:
            if live is not None:
                turn.show(index, live.add(new))

        if plan.num_forced and not request.prefill:
            show(plan.forced_ids)
        if turn.replayed:
            recorded = turn.replayed[index]
            generated = generated_before(recorded, self._reader.stop_text(recorded))
            show(generated.ids)
        else:
            sampling = sampling_of_choice(turn.sampling, index)
            try:
                generated, turn.episode.last_server = await self._generator.generate(
                    prompt,
                    sampling,
                    self._renderer.stop_ids,
                    rid=turn.turn_ids[index],
                    preferred=turn.episode.last_server,
                    affinity=turn.episode.affinity,
                    policy_version=request.policy_version,
                    on_tokens=show if request.stream else None,
                    options=self._options(turn, prompt, sampling),
                )
            except VersionGone as gone:
                asked = request.policy_version
                if asked is None or not self._settings.server.keeps(asked):
                    raise
                raise version_away(asked) from gone
        return GeneratedChoice(index, generated, live.shown_calls if live is not None else None)

    def _options(self, turn: InFlightTurn, prompt: Prompt, sampling: Sampling) -> GenerateOptions:
        """What the turn asks of a server beyond its sampling."""
        request, routes = turn.request, self._wanted_routes(turn, prompt)
        constrained = bool(sampling.constraint)
        wants_support = (
            sampling.has_support
            and _may_be_trained(turn)
            and self._settings.records_support(sampling)
        )
        if not (
            constrained
            or request.num_top_logprobs
            or request.traceparent
            or routes
            or wants_support
        ):
            return NO_OPTIONS
        return GenerateOptions(
            json_schema=request.json_schema if constrained else None,
            num_top_logprobs=request.num_top_logprobs,
            trace=tuple(
                (name, value)
                for name in ("traceparent", "tracestate")
                if (value := getattr(request, name)) is not None
            ),
            routes=routes,
            wants_support=wants_support,
        )

    def _wanted_routes(self, turn: InFlightTurn, prompt: Prompt) -> WantedRoutes | None:
        """Of a turn that may be trained: from the last token of its parent on."""
        plan = turn.plan
        if self._routing is None or not _may_be_trained(turn):
            return None
        assert plan is not None
        start = plan.parent.end - 1 if plan.parent is not None else 0
        return WantedRoutes(self._routing, start, prompt.num_ids)


def _may_be_trained(turn: InFlightTurn) -> bool:
    """True if it belongs to an episode of training and names no version."""
    opening = turn.episode.opening
    is_trained = opening is not None and opening.purpose == "train"
    return is_trained and turn.request.policy_version is None


async def _all_of(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What all of it returns; where one fails, the others are cancelled before that is raised."""
    if len(work) == 1:
        # One choice is the rule, and a task for it would be one more switch for every turn.
        return [await work[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def _closed() -> Refusal:
    return episode_closed("the episode ended while its turn was generated")
