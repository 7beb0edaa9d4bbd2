"""From a turn's output ids to the result that its client gets.

Owns: choosing between chat format and raw text, results of recorded turns. Does not own: parsing
of the chat format (rendering), recording. Invariant: the same turn gives the same result, whenever
and in whichever process it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from msgspec.structs import replace

from outloop.buffer.records import Turn
from outloop.router.dialects.base import Message, TokenLogprob, TurnRequest, TurnResult
from outloop.router.episodes.turn_tree import Plan
from outloop.router.rendering.parsing import Answer, ShownCalls
from outloop.router.rendering.renderer import PolicyRenderer
from outloop.router.rendering.stream_filter import (
    ContentStream,
    RawStream,
    ReasonedStream,
    Shown,
)
from outloop.router.rendering.tool_calls import CallReader


class LiveAnswer:
    """An answer while it is generated: what is shown of it, and which calls were."""

    def __init__(
        self,
        add: Callable[[list[int]], Shown],
        content: ContentStream | None = None,
        calls: CallReader | None = None,
    ) -> None:
        self.add = add
        """From new ids to what to show now."""
        self._content = content
        self._calls = calls

    @property
    def shown_calls(self) -> ShownCalls | None:
        """The calls that were shown; None when there were none."""
        calls = self._calls.calls if self._calls is not None else []
        if not calls or self._content is None:
            return None
        return ShownCalls(text=self._content.shown, calls=calls)


class AnswerReader:
    """Reads output ids as answers to requests."""

    def __init__(self, renderer: PolicyRenderer) -> None:
        self._renderer = renderer

    def live(self, request: TurnRequest, plan: Plan) -> LiveAnswer | None:
        """What shows an answer while it is generated; None when nothing may be shown early.

        The ids that begin a forced call are the first to be given to it.
        """
        if not request.stream:
            return None
        tokenizer, stop = self._renderer.tokenizer, request.stop
        if request.prompt is not None:
            return LiveAnswer(RawStream(tokenizer, stop, self._renderer.stop_ids).add)
        in_reasoning = self._renderer.begins_in_reasoning(plan.own_prompt_ids)
        calls = self._call_reader(request)
        reasoning_ids = self._renderer.reasoning_ids
        if reasoning_ids is None and in_reasoning:
            return None
        stream: ContentStream | ReasonedStream
        if reasoning_ids is not None:
            stream = ReasonedStream(
                tokenizer, stop, reasoning_ids, begins_in_reasoning=in_reasoning, calls=calls
            )
            content = stream.content
        else:
            stream = content = ContentStream(tokenizer, stop, calls)
        if _is_prefilled(request, plan):
            stream.begin_after(plan.forced_ids)
        return LiveAnswer(stream.add, content, calls)

    def _call_reader(self, request: TurnRequest) -> CallReader | None:
        """What reads calls as they come; None where a piece might have to be taken back."""
        form = self._renderer.call_form
        if form is None or not request.tools or request.tool_choice == "none":
            return None
        if request.stop or request.wants_logprobs:
            # A stop string may cut a call; logprobs belong to text that is not over.
            return None
        max_calls = None if request.parallel_tool_calls else 1
        return CallReader(self._renderer.tokenizer, form, max_calls=max_calls)

    def read(
        self,
        request: TurnRequest,
        output_ids: list[int],
        plan: Plan,
        turn_id: str,
        stop_text: str | None,
        shown: ShownCalls | None = None,
    ) -> Answer:
        """The message in `output_ids`; its text ends before `stop_text`.

        Args:
            shown: the calls that a streaming client was shown.
        """
        if request.prompt is not None:
            text = self._renderer.tokenizer.decode_on(self._renderer.until_stop(output_ids))
            if stop_text is not None:
                text = text.partition(stop_text)[0]
            return Answer(message=Message("assistant", text=text))
        is_prefilled = _is_prefilled(request, plan)
        answer = self._renderer.parse(
            plan.forced_ids + output_ids,
            prompt_ids=plan.own_prompt_ids,
            tools=request.tools,
            call_prefix=f"call_{turn_id}_",
            with_calls=bool(request.tools) and request.tool_choice != "none",
            parallel=request.parallel_tool_calls,
            # What the client wrote may hold a stop string, which stops nothing.
            stop_text=None if is_prefilled else stop_text,
            shown=shown,
        )
        if is_prefilled:
            message = answer.message
            text = _after(request.prefill, message.text)
            text = text if stop_text is None else text.partition(stop_text)[0].rstrip()
            text = request.prefill.lstrip() + text
            answer = replace(answer, message=replace(message, text=text))
        if plan.num_forced and answer.undelivered_from is not None:
            border = max(0, answer.undelivered_from - plan.num_forced)
            return replace(answer, undelivered_from=border)
        return answer

    def result(
        self,
        request: TurnRequest,
        turn: Turn,
        plan: Plan,
        message: Message,
        stop_text: str | None,
        tops: Sequence[Sequence[tuple[int, float]]] = (),
    ) -> TurnResult:
        """The result of a recorded turn that `plan` came before.

        Args:
            tops: the most probable ids in each id's place; they are not recorded, so that a turn
                that is read again has none.
        """
        logprobs = None
        if request.wants_logprobs and turn.behavior_logprobs is not None:
            ids = turn.output_ids.tolist()
            logprobs = tuple(
                self._logprob(token, logprob, tuple(self._logprob(*other) for other in top))
                for token, logprob, top in zip(
                    ids, turn.behavior_logprobs.tolist(), tops or ((),) * len(ids), strict=True
                )
            )
        if _is_prefilled(request, plan):
            message = replace(message, text=_after(request.prefill, message.text))
        before = plan.parent.end if plan.parent is not None else 0
        return TurnResult(
            turn=turn,
            message=message,
            num_prompt_tokens=before + len(turn.prompt_ids),
            stop_text=stop_text,
            logprobs=logprobs,
            prompt_ids=_prompt_ids(plan, turn) if request.wants_token_ids else None,
            num_reasoning_tokens=self._num_reasoning(turn) if message.reasoning else 0,
        )

    def _num_reasoning(self, turn: Turn) -> int:
        around = self._renderer.reasoning_ids
        if around is None:
            return 0
        ids = turn.output_ids.tolist()
        return ids.index(around[1]) + 1 if around[1] in ids else len(ids)

    def _logprob(
        self, token: int, logprob: float, top: tuple[TokenLogprob, ...] = ()
    ) -> TokenLogprob:
        data = self._renderer.tokenizer.bytes_of(token)
        text = data.decode(errors="replace")
        return TokenLogprob(text=text, data=data, logprob=logprob, top=top)

    def again(self, request: TurnRequest, turn: Turn, plan: Plan) -> TurnResult:
        """The result of a turn that was recorded before, by whichever process."""
        output_ids = turn.output_ids.tolist()
        stop_text = self.stop_text(turn)
        live = self.live(request, plan)
        if live is not None:
            forced_ids = [] if _is_prefilled(request, plan) else plan.forced_ids
            live.add(forced_ids + output_ids)
        shown = live.shown_calls if live is not None else None
        answer = self.read(request, output_ids, plan, turn.turn_id, stop_text, shown)
        return self.result(request, turn, plan, answer.message, stop_text)

    def stop_text(self, turn: Turn) -> str | None:
        """The stop string that ended a recorded turn, if one did."""
        if not turn.sampling.stop:
            return None
        text = self._renderer.tokenizer.decode_on(turn.output_ids.tolist())
        return next((stop for stop in turn.sampling.stop if stop in text), None)


def _prompt_ids(plan: Plan, turn: Turn) -> tuple[int, ...]:
    """Join the ids before a turn's output, from its root on."""
    before = plan.parent.path if plan.parent is not None else ()
    earlier = [ids for one in before for ids in (one.turn.prompt_ids, one.turn.output_ids)]
    return tuple(np.concatenate([*earlier, turn.prompt_ids]).tolist())


def _is_prefilled(request: TurnRequest, plan: Plan) -> bool:
    """True if the client wrote the beginning of the answer."""
    return bool(request.prefill) and plan.num_forced > 0


def _after(prefill: str, text: str) -> str:
    """What of an answer's text comes after the client's beginning."""
    start = prefill.lstrip()
    return text[len(start) :] if text.startswith(start) else ""
