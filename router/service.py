"""A turn from request to record.

Owns: the order of things: retry or fresh, plan, sample, draw, parse, record, answer. Does not own:
any of the steps. Invariant: results are handed out only after the buffer has their turns; what
the client did not get is recorded without loss.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass

import numpy as np
import structlog

from outloop.buffer.errors import Gone, OutloopError
from outloop.buffer.records import FinishReason, Sampling, Turn
from outloop.buffer.settings import Settings
from outloop.router.answers import AnswerReader
from outloop.router.branches import Plan
from outloop.router.generation import Drawn, Generator
from outloop.router.governance import decide, loss_spans
from outloop.router.jobs import TurnJob
from outloop.router.metrics import RouterMetrics
from outloop.router.port import EpisodeBuffer
from outloop.router.refusals import Refusal, as_refusal
from outloop.router.rendering import Answer, PolicyRenderer
from outloop.router.sessions import Episodes, EpisodeSession
from outloop.router.turns import Delta, TurnRequest, TurnResult

_RETURN_GRACE_S = 10.0
"""A client that left may come back with a retry this long; then its turn is recorded as masked."""
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Recording:
    """What the choices of one request share."""

    job: TurnJob
    session: EpisodeSession
    request: TurnRequest
    retry_key: str
    plan: Plan
    sampling: Sampling
    is_delivered: bool


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
    ) -> None:
        self._settings = settings
        self._buffer = buffer
        self._renderer = renderer
        self._reader = AnswerReader(renderer)
        self._episodes = episodes
        self._generator = generator
        self._metrics = metrics
        self._jobs: set[asyncio.Task[None]] = set()

    @property
    def num_running(self) -> int:
        """Turns that are not over."""
        return len(self._jobs)

    async def submit(
        self, session: EpisodeSession, request: TurnRequest, *, retry_key: str, is_retry: bool
    ) -> TurnJob:
        """Start a turn, or join the one that this request repeats; the caller attaches to it.

        Raises:
            Refusal: the episode has ended, a budget is spent, or the router is full.
        """
        session.check_open()
        earlier = _repeated(session.jobs.get(retry_key, ()), is_retry)
        if earlier is None and is_retry:
            earlier = await self._recorded(session, request, retry_key)
        if earlier is not None:
            self._metrics.replays.inc()
            return earlier
        self._check_budgets(session, request)
        job = TurnJob(
            tuple(secrets.token_hex(12) for _ in range(request.num_choices)),
            time.time(),
        )
        session.jobs.setdefault(retry_key, []).append(job)
        session.num_turns += request.num_choices
        job.task = asyncio.create_task(self._run(job, session, request, retry_key))
        self._jobs.add(job.task)
        job.task.add_done_callback(self._jobs.discard)
        return job

    async def end(self, session: EpisodeSession) -> None:
        """Finish what an episode that is being closed has running: record or abandon it."""
        tasks = []
        for jobs in session.jobs.values():
            for job in jobs:
                if job.task is not None and not job.is_over:
                    job.settle()
                    if not job.is_drawn:
                        job.task.cancel()
                    tasks.append(job.task)
        if tasks:
            await asyncio.wait(tasks)

    async def close(self) -> None:
        """Abandon every running turn."""
        for task in self._jobs:
            task.cancel()
        if self._jobs:
            await asyncio.wait(self._jobs)
        await self._generator.close()

    def _check_budgets(self, session: EpisodeSession, request: TurnRequest) -> None:
        limit = self._settings.router.max_turns_per_episode
        if session.opening is not None and session.num_turns + request.num_choices > limit:
            raise Refusal(
                403,
                "turn_budget_spent",
                f"episode {session.episode_id} has used its router.max_turns_per_episode={limit} "
                "turns; end the episode, or raise the limit",
            )
        if self.num_running >= self._settings.router.max_queued_turns:
            raise Refusal(
                503,
                "router_full",
                f"{self.num_running} turns are under way "
                f"(router.max_queued_turns={self._settings.router.max_queued_turns}); wait",
                retry_after_s=1.0,
            )

    async def _run(
        self, job: TurnJob, session: EpisodeSession, request: TurnRequest, retry_key: str
    ) -> None:
        try:
            results = await self._serve(job, session, request, retry_key)
        except asyncio.CancelledError:
            self._drop(job, session, retry_key)
            job.fail(Refusal(410, "episode_closed", "the episode ended while its turn was drawn"))
        except OutloopError as error:
            self._drop(job, session, retry_key)
            if isinstance(error, Gone):
                session.is_closed = True
            job.fail(as_refusal(error))
        except Exception:  # noqa: BLE001 - a task is a boundary: the client gets a 500, we the trace
            self._drop(job, session, retry_key)
            _log.exception("turn_failed", episode_id=session.episode_id, turn_ids=job.turn_ids)
            job.fail(
                Refusal(500, "internal_error", "the router failed on this turn", retry_after_s=1.0)
            )
        else:
            job.finish(results)
            self._metrics.latency.observe(time.time() - job.started_at)

    def _drop(self, job: TurnJob, session: EpisodeSession, retry_key: str) -> None:
        """A turn that came to nothing is no turn; its retry starts afresh."""
        session.num_turns -= len(job.turn_ids)
        jobs = session.jobs.get(retry_key, [])
        if job in jobs:
            jobs.remove(job)

    async def _serve(
        self, job: TurnJob, session: EpisodeSession, request: TurnRequest, retry_key: str
    ) -> tuple[TurnResult, ...]:
        plan = await self._plan(session, request)
        ids = [i for piece in session.tree.path_ids(plan.parent) for i in piece.tolist()]
        ids += plan.prompt_ids
        room = self._settings.model.max_context_tokens - len(ids)
        if room < 1:
            raise Refusal(
                400,
                "context_length_exceeded",
                f"the conversation has {len(ids)} tokens and model.max_context_tokens="
                f"{self._settings.model.max_context_tokens}; shorten it, or raise the limit",
                param="messages",
            )
        sampling = decide(request, session.opening, self._settings.sampling, room=room)
        job.num_prompt_tokens = len(ids)
        drawn = await asyncio.gather(
            *(
                self._draw(job, session, request, index, ids, plan, sampling)
                for index in range(request.num_choices)
            )
        )
        job.is_drawn = True
        is_delivered = await job.wait_for_client(_RETURN_GRACE_S)
        if not is_delivered:
            self._metrics.undelivered.inc()
        common = _Recording(job, session, request, retry_key, plan, sampling, is_delivered)
        return tuple([await self._record(common, index, one) for index, one in enumerate(drawn)])

    async def _plan(self, session: EpisodeSession, request: TurnRequest) -> Plan:
        def plan() -> Plan:
            if request.prompt is not None:
                return session.tree.plan_prompt(request.prompt)
            return session.tree.plan(request.messages, request.tools)

        found = plan()
        has_history = request.prompt is not None or any(
            message.role == "assistant" for message in request.messages
        )
        # Another router process may have recorded the turn that this continues.
        if found.is_root and has_history and await self._episodes.refresh(session):
            found = plan()
        return found

    async def _draw(
        self,
        job: TurnJob,
        session: EpisodeSession,
        request: TurnRequest,
        index: int,
        ids: list[int],
        plan: Plan,
        sampling: Sampling,
    ) -> Drawn:
        read = self._reader.stream(request, plan, sampling)

        def show(new: list[int]) -> None:
            reasoning, text = read(new) if read is not None else ("", "")
            if reasoning:
                job.push(Delta(choice_index=index, text=reasoning, is_reasoning=True))
            if text:
                job.push(Delta(choice_index=index, text=text))

        drawn, session.last_server = await self._generator.draw(
            ids,
            sampling,
            self._renderer.stop_ids,
            rid=job.turn_ids[index],
            preferred=session.last_server,
            policy_version=request.policy_version,
            on_tokens=show if request.stream else None,
        )
        return drawn

    async def _record(self, common: _Recording, index: int, drawn: Drawn) -> TurnResult:
        job, session, request, plan = common.job, common.session, common.request, common.plan
        matched = drawn.matched if isinstance(drawn.matched, str) else None
        answer = self._reader.read(
            request, drawn.ids, plan.prompt_ids, job.turn_ids[index], matched
        )
        turn = self._turn(common, index, drawn, answer)
        if session.opening is not None:
            await self._buffer.append_turn(turn)
            session.tree.add(
                turn,
                plan=plan,
                messages=request.messages if request.prompt is None else None,
                answer=answer.message if request.prompt is None else None,
                tools=request.tools,
            )
            self._count(turn, plan)
        return self._reader.result(request, turn, plan, answer.message, matched)

    def _turn(self, common: _Recording, index: int, drawn: Drawn, answer: Answer) -> Turn:
        session, plan, sampling = common.session, common.plan, common.sampling
        finish: FinishReason = "length" if drawn.finish == "length" else "stop"
        if answer.message.tool_calls:
            finish = "tool_calls"
        spans, reason = loss_spans(
            num_output=len(drawn.ids),
            num_until_stop=self._renderer.num_until_stop(drawn.ids),
            undelivered_from=answer.undelivered_from,
            is_delivered=common.is_delivered,
            is_behavior_known=sampling.is_plain and drawn.known_logprobs,
            purpose=session.opening.purpose if session.opening is not None else "eval",
        )
        logprobs = drawn.logprobs if drawn.known_logprobs else [0.0] * len(drawn.ids)
        return Turn(
            turn_id=common.job.turn_ids[index],
            episode_id=session.episode_id,
            parent_turn_id=plan.parent.turn.turn_id if plan.parent is not None else None,
            choice_index=index,
            prompt_ids=np.asarray(plan.prompt_ids, dtype=np.int32),
            output_ids=np.asarray(drawn.ids, dtype=np.int32),
            behavior_logprobs=np.asarray(logprobs, dtype=np.float32),
            version_spans=tuple(drawn.spans),
            loss_spans=spans,
            mask_reason=reason,
            sampling=sampling,
            finish_reason=finish,
            branch_cause=plan.cause if index == 0 else "choice",
            retry_key=common.retry_key,
            started_at=common.job.started_at,
            finished_at=time.time(),
        )

    def _count(self, turn: Turn, plan: Plan) -> None:
        self._metrics.turns.labels(turn.finish_reason).inc()
        self._metrics.tokens.labels("prompt").inc(len(turn.prompt_ids))
        self._metrics.tokens.labels("output").inc(len(turn.output_ids))
        if plan.is_break:
            self._metrics.breaks.labels(plan.cause).inc()

    async def _recorded(
        self, session: EpisodeSession, request: TurnRequest, retry_key: str
    ) -> TurnJob | None:
        """The finished job of a turn that another process recorded under `retry_key`."""
        await self._episodes.refresh(session)
        nodes = [n for n in session.tree.nodes.values() if n.turn.retry_key == retry_key]
        if not nodes:
            return None
        started_at = nodes[-1].turn.started_at
        nodes = [node for node in nodes if node.turn.started_at == started_at]
        if len(nodes) != request.num_choices:
            return None
        job = TurnJob(tuple(node.turn.turn_id for node in nodes), started_at)
        results = []
        for node in nodes:
            prompt_ids = node.turn.prompt_ids.tolist()
            plan = Plan(parent=node.parent, said_after=None, prompt_ids=prompt_ids, cause="root")
            results.append(self._reader.again(request, node.turn, plan))
        job.num_prompt_tokens = results[0].num_prompt_tokens
        job.finish(tuple(results))
        session.jobs.setdefault(retry_key, []).append(job)
        return job


def _repeated(jobs: list[TurnJob] | tuple[()], is_retry: bool) -> TurnJob | None:
    """The job that an identical request repeats, None when it is a fresh sample."""
    abandoned = next((job for job in jobs if job.is_abandoned and not job.has_failed), None)
    if abandoned is not None or not is_retry:
        return abandoned
    running = next((job for job in jobs if not job.is_over), None)
    return running if running is not None else (jobs[-1] if jobs else None)
