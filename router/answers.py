"""What the ids of a turn say to the client.

Owns: choosing between chat format and raw text, results of recorded turns. Does not own: parsing
of the chat format (rendering), recording. Invariant: the same turn gives the same result,
whenever and by whichever process it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from outloop.buffer.records import Sampling, Turn
from outloop.router.branches import Plan
from outloop.router.rendering import Answer, PolicyRenderer
from outloop.router.streaming import ContentStream, RawStream, ReasonedStream
from outloop.router.turns import Message, TokenLogprob, TurnRequest, TurnResult

Show = Callable[[list[int]], tuple[str, str]]
"""From new ids to the reasoning and the text to show now."""


class AnswerReader:
    """Reads output ids as answers to requests."""

    def __init__(self, renderer: PolicyRenderer) -> None:
        self._renderer = renderer

    def stream(self, request: TurnRequest, plan: Plan, sampling: Sampling) -> Show | None:
        """What shows an answer while it is drawn; None when nothing may be shown before the end."""
        if not request.stream:
            return None
        tokenizer = self._renderer.tokenizer
        if request.prompt is not None:
            raw = RawStream(tokenizer, sampling.stop, self._renderer.stop_ids)
            return lambda ids: ("", raw.add(ids))
        in_reasoning = self._renderer.begins_in_reasoning(plan.own_prompt_ids)
        if self._renderer.reasoning_ids is not None:
            return ReasonedStream(
                tokenizer,
                sampling.stop,
                self._renderer.reasoning_ids,
                begins_in_reasoning=in_reasoning,
            ).add
        if in_reasoning:
            return None
        content = ContentStream(tokenizer, sampling.stop)
        return lambda ids: ("", content.add(ids))

    def read(
        self,
        request: TurnRequest,
        output_ids: list[int],
        plan: Plan,
        turn_id: str,
        stop_text: str | None,
    ) -> Answer:
        """The message in `output_ids`; its text ends before `stop_text`."""
        if request.prompt is not None:
            text = self._renderer.tokenizer.decode(self._renderer.until_stop(output_ids))
            if stop_text is not None:
                text = text.partition(stop_text)[0]
            return Answer(message=Message("assistant", text=text))
        answer = self._renderer.parse(
            plan.forced_ids + output_ids,
            prompt_ids=plan.own_prompt_ids,
            tools=request.tools,
            call_prefix=f"call_{turn_id}_",
            with_calls=bool(request.tools) and request.tool_choice != "none",
            parallel=request.parallel_tool_calls,
            stop_text=stop_text,
        )
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
            decode = self._renderer.tokenizer.decode
            logprobs = tuple(
                TokenLogprob(
                    text=decode([token]),
                    logprob=logprob,
                    top=tuple((decode([other]), p) for other, p in top),
                )
                for token, logprob, top in zip(
                    ids, turn.behavior_logprobs.tolist(), tops or ((),) * len(ids), strict=True
                )
            )
        before = plan.parent.end if plan.parent is not None else 0
        return TurnResult(
            turn=turn,
            message=message,
            num_prompt_tokens=before + len(turn.prompt_ids),
            stop_text=stop_text,
            logprobs=logprobs,
        )

    def again(self, request: TurnRequest, turn: Turn, plan: Plan) -> TurnResult:
        """The result of a turn that was recorded before, by whichever process."""
        output_ids = turn.output_ids.tolist()
        text = self._renderer.tokenizer.decode(output_ids)
        stop_text = next((stop for stop in turn.sampling.stop if stop in text), None)
        answer = self.read(request, output_ids, plan, turn.turn_id, stop_text)
        return self.result(request, turn, plan, answer.message, stop_text)
