"""Messages to token ids and back: the only user of the tokenizer and of `renderers`.

Owns: rendering, bridging, parsing, stop ids. Does not own: which turn a request continues
(episodes), what is recorded (turns). Invariant: a bridge keeps sampled ids verbatim or is None;
parsing never raises, whatever the policy wrote: a malformed call stays text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from renderers import create_renderer
from renderers.base import ParsedResponse, ParsedToolCall
from renderers.configs import config_from_name
from renderers.reasoning import prompt_ends_in_reasoning

from outloop.buffer.chat_format import OWN_TEMPLATE, chat_format_of, end_ids_of
from outloop.buffer.errors import SettingsError
from outloop.buffer.model_ids import refuse_ids_without_rows
from outloop.buffer.settings import ModelSettings
from outloop.router.dialects.base import Message, ToolCall
from outloop.router.errors import Refusal
from outloop.router.rendering.own_template import OwnTemplateRenderer
from outloop.router.rendering.parsing import (
    Answer,
    MessageBuilder,
    ShownCalls,
    arguments_of,
    start_of,
    text_before,
)
from outloop.router.rendering.tokenizer import PolicyTokenizer
from outloop.router.rendering.tool_calls import FORMS, CallForm

_MAX_CACHED_PROMPT_END = 32
# What a renderer may raise on a conversation or on a policy's wildest output: json.loads alone
# raises ValueError on huge integers and RecursionError on deep nesting.
_RENDERER_ERRORS = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)


class PolicyRenderer:
    """Renders for one model folder.

    Raises:
        SettingsError: no tokenizer.json, ids that the model has no row for, an unknown
            `model.renderer`, or options it refuses.
    """

    def __init__(self, model: ModelSettings) -> None:
        self.tokenizer = PolicyTokenizer(model.path, max_tokens=model.max_context_tokens)
        if (model.path / "config.json").is_file():
            refuse_ids_without_rows(model.path, self.tokenizer.get_vocab())
        self._renderer = _make_renderer(self.tokenizer, model)
        own_stops = self._renderer.get_stop_token_ids()
        self._own_stops = frozenset(own_stops)
        eos = self.tokenizer.eos_token_id
        others = [*([eos] if eos is not None else []), *end_ids_of(model.path)]
        # Servers end an answer at the last ones too, whatever they are asked.
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys([*own_stops, *others]))
        self._stop_set = frozenset(self.stop_ids)
        self.reasoning_ids = self._find_reasoning_ids()
        self.call_form: CallForm | None = None
        self.call_form = self._find_form()
        self._forced_cached = lru_cache(maxsize=1024)(self._forced)
        self._reasons_cached = lru_cache(maxsize=256)(self._ends_in_reasoning)

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """Ids of the whole conversation up to where the assistant's answer begins.

        Raises:
            Refusal: 400, the format cannot express the conversation.
        """
        return self._render(messages, tools, add_generation_prompt=True)

    def check_ids(self, ids: Sequence[int]) -> None:
        """Refuse ids that the policy does not have: a server may die of them.

        Raises:
            Refusal: 400, one is out of range.
        """
        limit = self.tokenizer.num_ids
        for index, token in enumerate(ids):
            if not 0 <= token < limit:
                raise Refusal(
                    400,
                    "invalid_value",
                    f"prompt[{index}]={token}; allowed: 0 to {limit - 1}, the policy's ids",
                    param="prompt",
                )

    def bridge(
        self,
        prompt_ids: list[int],
        output_ids: list[int],
        new: Sequence[Message],
        tools: Sequence[dict[str, Any]],
    ) -> list[int] | None:
        """Ids to append after a turn's `prompt_ids` + `output_ids` to add the messages `new`.

        Only the turn's own ids are needed, not those before it. None when the format cannot
        continue the ids verbatim.
        """
        try:
            bridged = self._renderer.bridge_to_next_turn(
                prompt_ids, output_ids, [_as_dict(m) for m in new], tools=list(tools) or None
            )
        except _RENDERER_ERRORS:
            return None
        if bridged is None:
            return None
        num_before = len(prompt_ids) + len(output_ids)
        ids: list[int] = bridged.token_ids
        # The package promises this prefix; exactness must not rest on a promise.
        if ids[: len(prompt_ids)] != prompt_ids or ids[len(prompt_ids) : num_before] != output_ids:
            return None
        return ids[num_before:]

    def parse(
        self,
        output_ids: list[int],
        *,
        prompt_ids: list[int],
        tools: Sequence[dict[str, Any]],
        call_prefix: str,
        with_calls: bool = True,
        parallel: bool = True,
        stop_text: str | None = None,
        shown: ShownCalls | None = None,
    ) -> Answer:
        """The assistant's message in `output_ids`; tool calls get ids `{call_prefix}{index}`.

        Args:
            stop_text: the stop string that ended generation; the message ends before it.
            shown: the calls that a streaming client was shown. One that turns out malformed stays
                a call, whose arguments end where it was shown to.
        """
        ids = self.until_stop(output_ids)
        whole = output_ids[: len(ids) + 1]
        try:
            # With its stop id: in harmony it is what closes a call. One that the format does not
            # know would be text.
            parsed = self._renderer.parse_response(
                whole if whole[-1:] and whole[-1] in self._own_stops else ids,
                tools=list(tools) or None,
                prompt_ids=prompt_ids,
            )
        except _RENDERER_ERRORS:
            reasoning, rest = self._split_reasoning(ids, prompt_ids)
            text = self._text(rest, stop_text)
            parsed = ParsedResponse(content=text, reasoning_content=reasoning)
            return MessageBuilder(call_prefix, shown).build(parsed, stop_text)
        builder = MessageBuilder(call_prefix, shown)
        for attempt in parsed.tool_calls:
            arguments = arguments_of(attempt, self.call_form) if with_calls else None
            if not builder.add(attempt, arguments, parallel=parallel):
                return builder.build(parsed, stop_text, undelivered_from=start_of(attempt))
            if arguments is None and shown is None:
                builder.texts.append(text_before(self._raw(ids, attempt), stop_text))
        return builder.build(parsed, stop_text)

    def complete(
        self,
        before: Sequence[Message],
        answer: Message,
        tools: Sequence[dict[str, Any]],
    ) -> list[int]:
        """Ids that the policy would generate after `render(before)` to answer `answer`, stop id
        included.

        Raises:
            Refusal: 400, no output of the policy is read back as `answer`.
        """
        prompt = self._render(before, tools, add_generation_prompt=True)
        full = self._render([*before, answer], tools, add_generation_prompt=False)
        if full[: len(prompt)] == prompt:
            ids = full[len(prompt) :]
        else:
            # Tokens may merge across the border between prompt and answer. In what the policy
            # generates the border is fixed, so the answer is encoded on its own.
            prompt_text, text = self.tokenizer.decode(prompt), self.tokenizer.decode(full)
            ids = (
                self.tokenizer.encode(text[len(prompt_text) :])
                if text.startswith(prompt_text)
                else []
            )
        end = next((i for i, token in enumerate(ids) if token in self._stop_set), None)
        if end is None:
            raise _not_renderable(answer, "its rendering does not continue the generation prompt")
        completion = ids[: end + 1]
        parsed = self.parse(completion, prompt_ids=prompt, tools=tools, call_prefix="").message
        if not _is_same(parsed, answer):
            raise _not_renderable(answer, f"its ids are parsed as {parsed.text[:200]!r}")
        return completion

    def forced_ids(self, tools: Sequence[dict[str, Any]], choice: str) -> list[int]:
        """Ids with which every call that `choice` allows begins: up to where the policy decides.

        Raises:
            Refusal: 400, the format gives calls no common beginning.
        """
        names = tuple(tool["function"]["name"] for tool in tools)
        kind, _, name = choice.partition(":")
        return list(self._forced_cached((name,) if kind == "function" else names))

    def _forced(self, names: tuple[str, ...]) -> tuple[int, ...]:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        starts = []
        for name in names:
            for arguments in ("{}", '{"q": 1}', '{"zz": "-"}'):
                call = Message("assistant", tool_calls=(ToolCall("call-0", name, arguments),))
                starts.append(self.complete([Message("user", "-")], call, tools))
        shared = starts[0]
        for start in starts[1:]:
            same = enumerate(zip(shared, start, strict=False))
            shared = shared[: next((i for i, (a, b) in same if a != b), len(start))]
        if not shared:
            raise Refusal(
                400,
                "unsupported_parameter",
                "tool_choice: calls have no common beginning in the policy's chat format, so none "
                "can be forced; leave it out",
                param="tool_choice",
            )
        return tuple(shared)

    def begins_in_reasoning(self, prompt_ids: list[int]) -> bool:
        """True if the prompt ends inside a reasoning region, which the policy continues."""
        # Only the ids after the last stop id matter, and they are most often the same.
        rest = prompt_ids[self._last_stop(prompt_ids) + 1 :]
        if len(rest) > _MAX_CACHED_PROMPT_END:
            return self._ends_in_reasoning(rest)
        return self._reasons_cached(tuple(rest))

    def until_stop(self, output_ids: list[int]) -> list[int]:
        """`output_ids` before the first stop id."""
        *before, last = output_ids or [-1]
        if self._stop_set.isdisjoint(before):
            return before if last in self._stop_set else output_ids
        found = [output_ids.index(token) for token in self.stop_ids if token in output_ids]
        return output_ids[: min(found)] if found else output_ids

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool,
    ) -> list[int]:
        try:
            return list(
                self._renderer.render_ids(
                    [_as_dict(m) for m in messages],
                    tools=list(tools) or None,
                    add_generation_prompt=add_generation_prompt,
                )
            )
        except _RENDERER_ERRORS as error:
            raise Refusal(
                400,
                "invalid_value",
                f"messages cannot be rendered in the policy's chat format: {error}",
                param="messages",
            ) from error

    def _last_stop(self, ids: Sequence[int]) -> int:
        """The index of the last stop id; -1: there is none."""
        at = len(ids) - 1
        while at >= 0 and ids[at] not in self._stop_set:
            at -= 1
        return at

    def _ends_in_reasoning(self, rest: Sequence[int]) -> bool:
        ids = list(rest)
        return bool(prompt_ends_in_reasoning(self.tokenizer, ids, stop_ids=self._stop_set))

    def _find_reasoning_ids(self) -> tuple[int, int] | None:
        """The ids around reasoning, None where the format has no such pair."""
        begin, end = self.tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
        if begin is None or end is None:
            return None
        ids = [begin, *self.tokenizer.encode("a"), end, *self.tokenizer.encode("b")]
        parsed = self.parse(ids, prompt_ids=[], tools=(), call_prefix="").message
        return (begin, end) if (parsed.reasoning, parsed.text) == ("a", "b") else None

    def _find_form(self) -> CallForm | None:
        """How this chat format writes calls; None: in none of `FORMS`."""
        for form in FORMS:
            ids = self.tokenizer.encode(form.example)
            if None in self.tokenizer.convert_tokens_to_ids(list(form.tokens)):
                continue
            parsed = self.parse(ids, prompt_ids=[], tools=(), call_prefix="").message
            if [(c.name, c.arguments) for c in parsed.tool_calls] == [("f", '{"a": 1}')]:
                return form
        return None

    def _split_reasoning(self, ids: list[int], prompt_ids: list[int]) -> tuple[str, list[int]]:
        """Reasoning, and the ids after it, of an answer on which the format's parser failed."""
        if self.reasoning_ids is None or self.reasoning_ids[1] not in ids:
            return "", ids
        begin, end = self.reasoning_ids
        border = ids.index(end)
        before = ids[:border]
        if begin in before and not self.tokenizer.decode(before[: before.index(begin)]).strip():
            before = before[before.index(begin) + 1 :]
        elif not self.begins_in_reasoning(prompt_ids):
            return "", ids
        return self.tokenizer.decode(before).strip(), ids[border + 1 :]

    def _raw(self, ids: list[int], attempt: ParsedToolCall) -> str:
        if attempt.token_span is None:
            return str(attempt.raw)
        start, end = attempt.token_span
        return self.tokenizer.decode(ids[start:end])

    def _text(self, ids: list[int], stop_text: str | None) -> str:
        return text_before(self.tokenizer.decode(ids), stop_text).strip()


def _as_dict(message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.reasoning:
        plain["reasoning_content"] = message.reasoning
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    if message.name:
        plain["name"] = message.name
    return plain


def _is_same(parsed: Message, expected: Message) -> bool:
    def calls(message: Message) -> Iterable[tuple[str, Any]]:
        return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]

    return (
        parsed.text.strip() == expected.text.strip()
        and parsed.reasoning.strip() == expected.reasoning.strip()
        and calls(parsed) == calls(expected)
    )


def _not_renderable(answer: Message, why: str) -> Refusal:
    return Refusal(
        400,
        "not_renderable",
        f"assistant message text={answer.text[:200]!r} with {len(answer.tool_calls)} tool calls "
        f"cannot be an answer of the policy: {why}. Check the conversation and "
        "model.renderer_options.",
        param="messages",
    )


def _make_renderer(tokenizer: PolicyTokenizer, model: ModelSettings) -> Any:
    """The renderer of `model`'s chat format.

    Raises:
        SettingsError: an unknown `model.renderer`, or options it refuses.
    """
    name = chat_format_of(model.path) if model.renderer == "auto" else model.renderer
    try:
        if name == OWN_TEMPLATE:
            return OwnTemplateRenderer(tokenizer, model.path, model.renderer_options)
        default = config_from_name(name)
        if default is None:
            raise ValueError("it names no family")
        return create_renderer(tokenizer, type(default)(**model.renderer_options))
    except (ValueError, TypeError, AssertionError, AttributeError) as error:
        raise SettingsError(
            f"model.renderer={name!r} with model.renderer_options={model.renderer_options} and the "
            f"tokenizer in {str(model.path)!r} does not work: {error}"
        ) from error
