"""From what was drawn to the record of a turn.

Owns: the fields of a turn, writing it to the buffer and into the episode's tree. Does not own:
drawing, parsing. Invariant: a result is made of a turn that the buffer has; what the client did not
get is recorded without loss.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import numpy as np
import structlog
from msgspec.structs import replace

from outloop.buffer.errors import BufferUnavailable, Conflict
from outloop.buffer.records import FinishReason, Sampling, Turn
from outloop.buffer.store.budget_notes import EpisodeUsage
from outloop.router.buffer_protocol import EpisodeBuffer
from outloop.router.dialects.base import TurnRequest, TurnResult
from outloop.router.episodes.episode import EpisodeSession
from outloop.router.episodes.turn_tree import Plan
from outloop.router.metrics import RouterMetrics
from outloop.router.rendering.parsing import Answer, ShownCalls
from outloop.router.rendering.renderer import PolicyRenderer
from outloop.router.servers.generation import Drawn
from outloop.router.turns.answer_reader import AnswerReader
from outloop.router.turns.buffer_retry import Patience
from outloop.router.turns.in_flight import TurnJob
from outloop.router.turns.sampling import loss_spans, sampling_of_choice

_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_log = structlog.get_logger()


class Recording(msgspec.Struct, frozen=True):
    """What the choices of one request share."""

    job: TurnJob
    session: EpisodeSession
    request: TurnRequest
    retry_key: str
    plan: Plan
    sampling: Sampling
    again: tuple[Turn, ...] = ()
    """What a lost attempt had recorded and is now replayed, by choice; (): it was drawn now."""


class _Choice:
    """One choice of a request: what was drawn, and what it says, read when it is first needed."""

    def __init__(
        self,
        reader: AnswerReader,
        common: Recording,
        index: int,
        drawn: Drawn,
        said_ids: list[int],
        shown: ShownCalls | None,
    ) -> None:
        """`said_ids` are those before the first stop id."""
        self._reader = reader
        self._shown_calls = shown
        self.common, self.index, self.drawn = common, index, drawn
        self.num_until_stop = min(len(said_ids) + 1, len(drawn.ids))
        """Output ids up to and including the first stop id."""
        self._stop_text = drawn.matched if isinstance(drawn.matched, str) else None
        self._answer: Answer | None = None
        self._result: TurnResult | None = None

    @property
    def answer(self) -> Answer:
        """What it says."""
        if self._answer is None:
            self._answer = self._reader.read(
                self.common.request,
                self.drawn.ids,
                self.common.plan,
                self.common.job.turn_ids[self.index],
                self._stop_text,
                self._shown_calls,
            )
        return self._answer

    def result(self, turn: Turn) -> TurnResult:
        """What the client is told, `turn` being its record."""
        if self._result is None:
            self._result = self._reader.result(
                self.common.request,
                turn,
                self.common.plan,
                self.answer.message,
                self._stop_text,
                self.drawn.tops,
            )
        return self._result if self._result.turn is turn else replace(self._result, turn=turn)

    def draft(self, turn: Turn) -> None:
        """Make that now, and, of an only choice, the client's answer."""
        result = self.result(turn)
        if self.common.request.num_choices == 1:
            self.common.job.draft((result,))


class Recorder:
    """Records turns of all episodes."""

    def __init__(
        self,
        buffer: EpisodeBuffer,
        renderer: PolicyRenderer,
        reader: AnswerReader,
        metrics: RouterMetrics,
        patience: Patience,
        *,
        wait_for_client: Callable[[TurnJob, EpisodeSession, str], Awaitable[None]],
        log_turns: bool,
    ) -> None:
        self._buffer = buffer
        self._patience = patience
        self._wait_for_client = wait_for_client
        self._renderer = renderer
        self._reader = reader
        self._metrics = metrics
        self._log_turns = log_turns
        level = logging.INFO if log_turns else logging.DEBUG
        # Gathering what a line says costs more than most of what is done for a turn.
        self._tells = bool(_log.is_enabled_for(level))

    async def record(
        self, common: Recording, index: int, drawn: Drawn, shown: ShownCalls | None
    ) -> TurnResult:
        """Write one choice down; what is returned is in the buffer, except of unkeyed traffic."""
        session, request, plan = common.session, common.request, common.plan
        said_ids = self._renderer.until_stop(drawn.ids)
        choice = _Choice(self._reader, common, index, drawn, said_ids, shown)
        turn = self._turn(choice)
        if session.opening is not None:
            # While Redis writes; nobody gets it before that is acknowledged.
            asyncio.get_running_loop().call_soon(choice.draft, turn)
            try:
                usage = await self._buffer.append_turn(turn)
            except BufferUnavailable:
                # What was drawn, and perhaps shown, is not thrown away because Redis is restarted.
                turn, usage = await self._append_late(choice, turn)
            # Other processes may have recorded turns of this episode.
            session.num_recorded = max(session.num_recorded, usage.num_turns)
            session.num_tokens = usage.num_tokens
            is_told = request.prompt is None and plan.knows_messages
            session.tree.add(
                turn,
                plan=plan,
                messages=request.messages if is_told else None,
                answer=choice.answer.message if is_told else None,
                tools=request.tools,
            )
            self._metrics.count(turn, is_break=plan.is_break, is_replayed=bool(common.again))
        if self._tells:
            self._tell_of(common, turn)
        return choice.result(turn)

    async def _append_late(self, choice: _Choice, turn: Turn) -> tuple[Turn, EpisodeUsage]:
        """Record a turn that Redis did not take at first, and say which one is recorded.

        Who asked for it may leave meanwhile: each time it is sent as what it is by then.
        """
        common = choice.common

        async def append() -> tuple[Turn, EpisodeUsage]:
            await self._wait_for_client(common.job, common.session, common.retry_key)
            now = replace(self._turn(choice), finished_at=turn.finished_at)
            try:
                return now, await self._buffer.append_turn(now)
            except Conflict:
                # An attempt before this one was taken, but its answer lost: that record stands.
                return turn, await self._buffer.append_turn(turn)

        return await self._patience.ask(append)

    def _tell_of(self, common: Recording, turn: Turn) -> None:
        session = common.session
        tell = _log.info if self._log_turns else _log.debug
        tell(
            "turn_recorded",
            episode_id=session.episode_id,
            turn_id=turn.turn_id,
            parent_turn_id=turn.parent_turn_id,
            branch_cause=turn.branch_cause,
            finish_reason=turn.finish_reason,
            num_prompt_ids=len(turn.prompt_ids),
            num_output_ids=len(turn.output_ids),
            policy_versions=[span.policy_version for span in turn.version_spans],
            server_id=session.last_server,
            is_delivered=not common.job.is_given_up,
            duration_s=round(turn.finished_at - turn.started_at, 4),
            traceparent=common.request.traceparent,
        )

    def _turn(self, choice: _Choice) -> Turn:
        common, index, drawn = choice.common, choice.index, choice.drawn
        session, plan = common.session, common.plan
        sampling = sampling_of_choice(common.sampling, index)
        finish: FinishReason = "length" if drawn.finish == "length" else "stop"
        answer = choice.answer
        if answer.message.tool_calls and not (answer.is_cut and finish == "length"):
            finish = "tool_calls"
        is_known = _are_known(drawn.logprobs)
        logprobs = drawn.logprobs if is_known else [0.0] * len(drawn.ids)
        spans, reason = loss_spans(
            num_output=len(drawn.ids),
            num_until_stop=choice.num_until_stop,
            undelivered_from=answer.undelivered_from,
            is_delivered=not common.job.is_given_up,
            is_behavior_known=sampling.is_plain and is_known,
            is_frozen=common.request.policy_version is not None,
            purpose=session.opening.purpose if session.opening is not None else "eval",
        )
        before = common.again[index] if common.again else None
        return Turn(
            turn_id=common.job.turn_ids[index],
            episode_id=session.episode_id,
            parent_turn_id=plan.parent.turn.turn_id if plan.parent is not None else None,
            choice_index=index,
            prompt_ids=np.fromiter(plan.prompt_ids, np.int32, len(plan.prompt_ids)),
            output_ids=np.fromiter(drawn.ids, np.int32, len(drawn.ids)),
            behavior_logprobs=np.fromiter(logprobs, np.float32, len(drawn.ids)),
            version_spans=tuple(drawn.spans),
            loss_spans=spans,
            mask_reason=reason,
            sampling=sampling,
            finish_reason=finish,
            branch_cause=plan.cause if index == 0 else "choice",
            retry_key=common.retry_key,
            started_at=before.started_at if before is not None else common.job.started_at,
            finished_at=before.finished_at if before is not None else time.time(),
        )


def _are_known(logprobs: Sequence[float | None]) -> bool:
    """True if each is a number that float32 has."""
    return None not in logprobs and sum(map(abs, logprobs)) < _MAX_FLOAT32  # type: ignore[arg-type]
