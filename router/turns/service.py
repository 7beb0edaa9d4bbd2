"""A turn from request to record.

Owns: the order of things: retry or fresh, plan, sample, draw, parse, record, answer. Does not own:
any of the steps. Invariant: results are handed out only after the buffer has their turns; what
the client did not get is recorded without loss.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import structlog
from msgspec.structs import replace

from outloop.buffer.errors import Gone, OutloopError
from outloop.buffer.records import Sampling, Turn
from outloop.buffer.settings import Settings
from outloop.router.buffer_protocol import EpisodeBuffer
from outloop.router.dialects.base import TurnRequest, TurnResult
from outloop.router.episodes.budgets import Budgets
from outloop.router.episodes.episode import Episodes, EpisodeSession
from outloop.router.episodes.replay import drawn_before
from outloop.router.episodes.turn_tree import Plan
from outloop.router.errors import (
    Refusal,
    as_refusal,
    context_length_exceeded,
    episode_closed,
    stopping,
)
from outloop.router.metrics import RouterMetrics
from outloop.router.peers.turn_locator import Peers
from outloop.router.rendering.parsing import ShownCalls
from outloop.router.rendering.renderer import PolicyRenderer
from outloop.router.servers.generate_api import NO_WISH, Prompt, Wish
from outloop.router.servers.generation import Drawn, Generator
from outloop.router.turns.answer_reader import AnswerReader
from outloop.router.turns.buffer_retry import Patience
from outloop.router.turns.in_flight import TurnJob
from outloop.router.turns.planner import Planner
from outloop.router.turns.recorder import Recorder, Recording
from outloop.router.turns.retries import Retries, repeated
from outloop.router.turns.sampling import decide, sampling_of_choice

_RETURN_GRACE_S = 10.0
"""A client that left may come back with a retry this long; then its turn is recorded as masked."""
_CLIENT_CHECK_S = 0.2
_TURN_ID_BYTES = 12
_log = structlog.get_logger()
T = TypeVar("T")


class TurnService:
    """Serves turns of all episodes."""

    def __init__(
        self,
        settings: Settings,
        buffer: EpisodeBuffer,
        renderer: PolicyRenderer,
        episodes: Episodes,
        generator: Generator,
        metrics: RouterMetrics,
        peers: Peers,
        patience: Patience,
    ) -> None:
        self._settings = settings
        self._renderer = renderer
        self._reader = AnswerReader(renderer)
        self._episodes = episodes
        self._patience = patience
        told = settings.router.log_turns
        self._recorder = Recorder(
            buffer,
            renderer,
            self._reader,
            metrics,
            patience,
            wait_for_client=self._wait_for_client,
            log_turns=told,
        )
        self._planner = Planner(renderer, episodes, settings.sampling)
        self._peers = peers
        self._retries = Retries(episodes, self._planner, self._reader, peers)
        self.budgets = Budgets(settings.router, buffer)
        self._generator = generator
        self._metrics = metrics
        self._jobs: set[TurnJob] = set()
        self.is_draining = False

    @property
    def num_running(self) -> int:
        """Turns that are not over."""
        return len(self._jobs)

    async def submit(
        self, session: EpisodeSession, request: TurnRequest, *, retry_key: str, is_retry: bool
    ) -> TurnJob:
        """A turn's job, or that of the one which this request repeats; who attaches and waits for
        it, at once, begins it.

        Raises:
            Refusal: the episode has ended, a budget is spent, or the router is full.
        """
        try:
            await self._know_all_turns(session, request.num_choices)
            return self._start(session, request, retry_key, is_retry=is_retry)
        except Refusal as refusal:
            _log.info("turn_refused", episode_id=session.episode_id, code=refusal.code)
            await self.budgets.note(session, refusal)
            raise

    async def _know_all_turns(self, session: EpisodeSession, num_choices: int) -> None:
        """Read turns that the buffer counts and this process does not know, where they would spend
        the budget: some may be of its own turns, of which it has not heard yet."""
        if self.budgets.may_count_twice(session, num_choices):
            await self._episodes.refresh(session)

    def _start(
        self, session: EpisodeSession, request: TurnRequest, retry_key: str, *, is_retry: bool
    ) -> TurnJob:
        # No await from here on until the job is entered: an identical retry would miss it.
        session.check_open()
        earlier = repeated(session.jobs.get(retry_key, ()), is_retry)
        if earlier is not None:
            self._metrics.replays.inc()
            return earlier
        is_retry = is_retry or session.meets_undelivered(retry_key)
        # A retry is no turn yet: it may turn out to be one that is there already.
        job = TurnJob(
            (),
            time.time(),
            lambda job: self._run(job, session, request, retry_key, is_retry=is_retry),
        )
        if not is_retry:
            self._admit(job, session, request)
        session.jobs.setdefault(retry_key, []).append(job)
        self._jobs.add(job)
        return job

    async def end(self, session: EpisodeSession) -> None:
        """Finish what an episode that is being closed has running: record or abandon it."""
        running = [job for jobs in session.jobs.values() for job in jobs if not job.is_over]
        for job in running:
            job.settle()
            if not job.is_drawn:
                job.cancel()
        for job in running:
            await job.over()

    async def drain(self, timeout_s: float) -> None:
        """Take no new turns and finish the running ones; after `timeout_s` they are given up.

        Who waits for a turn that is given up is told to come back. A turn that nobody waits for is
        recorded if it is drawn, and else given up at once: its retry asks another process.
        """
        self.is_draining = True
        deadline = time.monotonic() + timeout_s
        while self._jobs and (remaining := deadline - time.monotonic()) > 0:
            for job in self._jobs:
                if not job.has_client:
                    job.settle()
                    if not job.is_drawn:
                        job.cancel()
            with suppress(TimeoutError):
                # A client that leaves wakes nobody.
                async with asyncio.timeout(min(remaining, _CLIENT_CHECK_S)):
                    await self._all_over()
        await self.close()

    async def close(self) -> None:
        """Abandon every running turn; who waits for one is told to come back."""
        self.is_draining = True
        self._patience.end()
        for job in self._jobs:
            job.cancel()
        await self._all_over()
        await self._generator.close()

    async def _all_over(self) -> None:
        while self._jobs:
            await next(iter(self._jobs)).over()

    def _admit(self, job: TurnJob, session: EpisodeSession, request: TurnRequest) -> None:
        """Make a turn of a job, where the episode and this process have room for one more."""
        if self.is_draining:
            raise stopping()
        self.budgets.check(session, request)
        settings = self._settings.router
        limit = -(-settings.max_queued_turns // settings.num_processes)
        num_others = self.num_running - (job in self._jobs)
        if num_others >= limit:
            raise Refusal(
                503,
                "router_full",
                f"{num_others} turns are under way in this router process "
                f"(router.max_queued_turns={settings.max_queued_turns} over "
                f"router.num_processes={settings.num_processes}); wait",
                retry_after_s=1.0,
            )
        job.turn_ids = tuple(secrets.token_hex(_TURN_ID_BYTES) for _ in range(request.num_choices))

    async def _run(
        self,
        job: TurnJob,
        session: EpisodeSession,
        request: TurnRequest,
        retry_key: str,
        *,
        is_retry: bool,
    ) -> None:
        try:
            results = await self._again(job, session, request, retry_key) if is_retry else ()
            results = results or await self._serve(job, session, request, retry_key)
        except asyncio.CancelledError:
            # The task may be the client's, which is told about it.
            if job.task is not None:
                job.task.uncancel()
            self._drop(job, session, retry_key)
            has_ended = session.is_closed or not self.is_draining
            job.fail(_closed() if has_ended else stopping())
        except OutloopError as error:
            self._drop(job, session, retry_key)
            refusal = as_refusal(error)
            if isinstance(error, Gone):
                session.is_closed = True
                refusal = episode_closed(str(error))
            _log.info(
                "turn_failed",
                episode_id=session.episode_id,
                turn_ids=job.turn_ids,
                code=refusal.code,
                error=str(error),
            )
            await self.budgets.note(session, refusal)
            job.fail(refusal)
        except Exception:  # noqa: BLE001 - a task is a boundary: the client gets a 500, we the trace
            self._drop(job, session, retry_key)
            _log.exception("turn_crashed", episode_id=session.episode_id, turn_ids=job.turn_ids)
            job.fail(
                Refusal(500, "internal_error", "the router failed on this turn", retry_after_s=1.0)
            )
        else:
            job.finish(results)
            self._metrics.observe_latency(time.time() - job.started_at)
        finally:
            self._jobs.discard(job)
            if not job.is_over:
                # Cancelled once more, while that was noted.
                job.fail(stopping())

    async def _again(
        self, job: TurnJob, session: EpisodeSession, request: TurnRequest, retry_key: str
    ) -> tuple[TurnResult, ...]:
        """The recorded answer of a retry; (): it is a turn now."""
        found = await self._retries.find(job, session, request, retry_key)
        if found:
            self._metrics.replays.inc()
            job.turn_ids = tuple(result.turn.turn_id for result in found)
            job.started_at = found[-1].turn.started_at
            job.num_prompt_tokens = found[0].num_prompt_tokens
            job.sampling = found[0].turn.sampling
        else:
            await self._know_all_turns(session, request.num_choices)
            session.check_open()
            self._admit(job, session, request)
        return found

    def _drop(self, job: TurnJob, session: EpisodeSession, retry_key: str) -> None:
        """A turn that came to nothing is no turn; its retry starts afresh."""
        jobs = session.jobs.get(retry_key, [])
        if job in jobs:
            jobs.remove(job)
        if not jobs:
            session.jobs.pop(retry_key, None)

    async def _serve(
        self, job: TurnJob, session: EpisodeSession, request: TurnRequest, retry_key: str
    ) -> tuple[TurnResult, ...]:
        request, plan = await self._planner.plan(session, request)
        prompt = session.tree.prompt(plan)
        room = self._settings.model.max_context_tokens - prompt.num_ids
        if room < 1:
            raise context_length_exceeded(prompt.num_ids, self._settings.model.max_context_tokens)
        sampling = decide(request, session.opening, self._settings.sampling, room=room)
        left = self.budgets.room(session, len(plan.prompt_ids), request.num_choices)
        if left is not None and left < sampling.max_new_tokens:
            sampling = replace(sampling, max_new_tokens=left)
        job.num_prompt_tokens, job.sampling = prompt.num_ids, sampling
        again = session.recorded.pop(prompt, sampling, request.num_choices, request.policy_version)
        if again:
            job.turn_ids = tuple(turn.turn_id for turn in again)
        draws = [
            self._draw(
                job,
                session,
                request,
                index,
                prompt,
                plan,
                sampling_of_choice(sampling, index),
                turn,
            )
            for index, turn in enumerate(again or (None,) * request.num_choices)
        ]
        drawn = await _all_of(draws)
        job.is_drawn = True
        if not job.has_client:
            await self._wait_for_client(job, session, retry_key)
        common = Recording(job, session, request, retry_key, plan, sampling, again)
        try:
            return tuple(
                [
                    await self._recorder.record(common, index, one, shown)
                    for index, (one, shown) in enumerate(drawn)
                ]
            )
        except BaseException:
            session.recorded.give_back(prompt, again)
            raise

    async def _wait_for_client(self, job: TurnJob, session: EpisodeSession, retry_key: str) -> None:
        """Wait until somebody has use for a drawn turn, or give up that anybody will."""
        if job.is_given_up or job.has_client:
            return
        if session.opening is not None:
            self._peers.tell_left(session, retry_key)
        if not await job.wait_for_client(_RETURN_GRACE_S):
            job.is_given_up = True
            self._metrics.undelivered.inc()

    async def _draw(
        self,
        job: TurnJob,
        session: EpisodeSession,
        request: TurnRequest,
        index: int,
        prompt: Prompt,
        plan: Plan,
        sampling: Sampling,
        again: Turn | None,
    ) -> tuple[Drawn, ShownCalls | None]:
        """One choice, drawn now or, where a lost attempt had recorded it, `again`."""
        live = self._reader.live(request, plan)

        def show(new: list[int]) -> None:
            if live is not None:
                job.show(index, live.add(new))

        if plan.num_forced and not request.prefill:
            show(plan.forced_ids)
        if again is not None:
            drawn = drawn_before(again, self._reader.stop_text(again))
            show(drawn.ids)
            return drawn, live.shown_calls if live is not None else None
        drawn, session.last_server = await self._generator.draw(
            prompt,
            sampling,
            self._renderer.stop_ids,
            rid=job.turn_ids[index],
            preferred=session.last_server,
            whose=session.whose,
            policy_version=request.policy_version,
            on_tokens=show if request.stream else None,
            wish=_wish(request, sampling),
        )
        return drawn, live.shown_calls if live is not None else None


async def _all_of(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What all of it returns; where one fails, the others are cancelled before that is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def _closed() -> Refusal:
    return episode_closed("the episode ended while its turn was drawn")


def _wish(request: TurnRequest, sampling: Sampling) -> Wish:
    if not (sampling.constraint or request.num_top_logprobs or request.traceparent):
        return NO_WISH
    return Wish(
        json_schema=request.json_schema if sampling.constraint else None,
        num_top_logprobs=request.num_top_logprobs,
        trace=tuple(
            (name, value)
            for name in ("traceparent", "tracestate")
            if (value := getattr(request, name)) is not None
        ),
    )
