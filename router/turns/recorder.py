"""From what was generated to the record of a turn.

Owns: the fields of a turn, writing it to the buffer and into the episode's tree. Does not own:
generating, parsing. Invariant: a result is made of a turn that the buffer has; what the client did
not get is recorded without loss.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import structlog
from msgspec.structs import replace

from outloop.buffer.errors import BufferUnavailable, Conflict
from outloop.buffer.records import FinishReason, Sampling, Turn
from outloop.buffer.routed_experts import RoutedExperts
from outloop.buffer.sampling_support import SamplingSupport
from outloop.buffer.store.refusal_notes import EpisodeUsage
from outloop.buffer.writer import BufferWriter
from outloop.router.buffer_retry import BufferRetry
from outloop.router.dialects.base import TurnResult
from outloop.router.episodes.episode import without_side_data
from outloop.router.episodes.in_flight import InFlightTurn
from outloop.router.episodes.turn_tree import Plan
from outloop.router.metrics import RouterMetrics
from outloop.router.rendering.parsing import Answer, ShownCalls
from outloop.router.rendering.renderer import PolicyRenderer
from outloop.router.servers.generation import Generated
from outloop.router.turns.answer_reader import AnswerReader
from outloop.router.turns.delivery import Delivery
from outloop.router.turns.sampling import loss_spans, sampling_of_choice

_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class GeneratedChoice:
    """One choice of a turn, as a server generated it."""

    index: int
    generated: Generated
    shown_calls: ShownCalls | None
    """The tool calls that a stream has shown of it; None: none."""

    @property
    def stop_text(self) -> str | None:
        """The stop string that ended it."""
        matched = self.generated.matched
        return matched if isinstance(matched, str) else None


class Recorder:
    """Records turns of all episodes."""

    def __init__(
        self,
        buffer: BufferWriter,
        renderer: PolicyRenderer,
        reader: AnswerReader,
        metrics: RouterMetrics,
        buffer_retry: BufferRetry,
        delivery: Delivery,
        *,
        log_turns: bool,
        max_support_ids: int,
    ) -> None:
        self._buffer = buffer
        self._renderer = renderer
        self._reader = reader
        self._metrics = metrics
        self._buffer_retry = buffer_retry
        self._delivery = delivery
        self._log_turns = log_turns
        self._max_support_ids = max_support_ids
        level = logging.INFO if log_turns else logging.DEBUG
        # To gather the fields of a line costs more than most of what is done for a turn.
        self._is_logged = bool(_log.is_enabled_for(level))

    async def record(self, turn: InFlightTurn, choice: GeneratedChoice) -> TurnResult:
        """Write one choice down; what is returned is in the buffer, except of unkeyed traffic."""
        assert turn.plan is not None
        episode, request, plan = turn.episode, turn.request, turn.plan
        generated = choice.generated
        answer = self._reader.read(
            request,
            generated.ids,
            plan,
            turn.turn_ids[choice.index],
            choice.stop_text,
            choice.shown_calls,
        )
        record = self._record(turn, choice, answer)
        if episode.opening is not None:
            try:
                usage = await self._buffer.append_turn(record)
            except BufferUnavailable:
                # What was generated, and perhaps shown, is not thrown away because Redis is
                # restarted.
                record, usage = await self._append_late(turn, choice, answer, record)
            episode.note_usage(usage)
            record = without_side_data(record)
            knows_messages = request.prompt is None and plan.knows_messages
            async with episode.tree_lock:
                episode.tree.add(
                    record,
                    plan=plan,
                    messages=request.messages if knows_messages else None,
                    answer=answer.message if knows_messages else None,
                    tools=request.tools,
                )
            self._metrics.count(record, is_break=plan.is_break, is_replayed=bool(turn.replayed))
        if self._is_logged:
            self._log_turn(turn, record)
        return self._reader.result(
            request, record, plan, answer.message, choice.stop_text, generated.tops
        )

    async def _append_late(
        self, turn: InFlightTurn, choice: GeneratedChoice, answer: Answer, first: Turn
    ) -> tuple[Turn, EpisodeUsage]:
        """Record a turn that Redis did not take at first, and return the record that it has.

        Who asked for it may leave meanwhile: each time it is sent as what it is by then.
        """

        async def append() -> tuple[Turn, EpisodeUsage]:
            await self._delivery.wait_for_client(turn)
            now = replace(self._record(turn, choice, answer), finished_at=first.finished_at)
            try:
                return now, await self._buffer.append_turn(now)
            except Conflict:
                # An attempt before this one was taken, but its answer lost: that record stands.
                return first, await self._buffer.append_turn(first)

        return await self._buffer_retry.call(append)

    def _log_turn(self, turn: InFlightTurn, record: Turn) -> None:
        log = _log.info if self._log_turns else _log.debug
        log(
            "turn_recorded",
            episode_id=turn.episode.episode_id,
            turn_id=record.turn_id,
            parent_turn_id=record.parent_turn_id,
            branch_cause=record.branch_cause,
            finish_reason=record.finish_reason,
            num_prompt_ids=len(record.prompt_ids),
            num_output_ids=len(record.output_ids),
            policy_versions=[span.policy_version for span in record.version_spans],
            server_id=turn.episode.last_server,
            is_delivered=not turn.is_given_up,
            duration_s=round(record.finished_at - record.started_at, 4),
            traceparent=turn.request.traceparent,
        )

    def _record(self, turn: InFlightTurn, choice: GeneratedChoice, answer: Answer) -> Turn:
        assert turn.plan is not None
        assert turn.sampling is not None
        episode, plan, generated, index = turn.episode, turn.plan, choice.generated, choice.index
        sampling = sampling_of_choice(turn.sampling, index)
        finish: FinishReason = "length" if generated.finish == "length" else "stop"
        if answer.message.tool_calls and not (answer.is_cut and finish == "length"):
            finish = "tool_calls"
        is_known = _are_known(generated.logprobs)
        logprobs = generated.logprobs if is_known else [0.0] * len(generated.ids)
        num_before_stop = len(self._renderer.until_stop(generated.ids))
        support = self._support(generated, sampling)
        spans, reason = loss_spans(
            num_output=len(generated.ids),
            num_until_stop=min(num_before_stop + 1, len(generated.ids)),
            undelivered_from=answer.undelivered_from,
            is_delivered=not turn.is_given_up,
            is_behavior_known=is_known and (sampling.is_plain or support is not None),
            support=support,
            is_frozen=turn.request.policy_version is not None,
            purpose=episode.opening.purpose if episode.opening is not None else "eval",
        )
        before = turn.replayed[index] if turn.replayed else None
        return Turn(
            turn_id=turn.turn_ids[index],
            episode_id=episode.episode_id,
            parent_turn_id=plan.parent.turn.turn_id if plan.parent is not None else None,
            choice_index=index,
            prompt_ids=np.asarray(plan.prompt_ids, np.int32),
            output_ids=np.asarray(generated.ids, np.int32),
            behavior_logprobs=np.asarray(logprobs, np.float32),
            version_spans=tuple(generated.spans),
            loss_spans=spans,
            mask_reason=reason,
            sampling=sampling,
            finish_reason=finish,
            branch_cause=plan.cause if index == 0 else "choice",
            retry_key=turn.retry_key,
            started_at=before.started_at if before is not None else turn.started_at,
            finished_at=before.finished_at if before is not None else time.time(),
            routed_experts=_routes(generated, plan),
            support=support,
        )

    def _support(self, generated: Generated, sampling: Sampling) -> SamplingSupport | None:
        """Among which ids the tokens of a turn were sampled, if a server told of each; of a token
        that had more than a record holds it is not known."""
        if not sampling.has_support or len(generated.supports) != len(generated.ids):
            return None
        kept = [
            ids if len(ids) <= self._max_support_ids and token in ids else ()
            for token, ids in zip(generated.ids, generated.supports, strict=True)
        ]
        return SamplingSupport.of(kept) if any(kept) else None


def _routes(generated: Generated, plan: Plan) -> RoutedExperts | None:
    """The experts of a turn's tokens, if they are known of all."""
    is_root = plan.parent is None
    due = len(plan.prompt_ids) + len(generated.ids) - is_root
    routes = generated.routes
    return routes if routes is not None and routes.num_rows == due else None


def _are_known(logprobs: Sequence[float | None]) -> bool:
    """True if each is a number that float32 has."""
    return None not in logprobs and sum(map(abs, logprobs)) < _MAX_FLOAT32  # type: ignore[arg-type]
