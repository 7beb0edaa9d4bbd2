"""From what `renderers` parses to the message that a client gets.

Invariant: a call that a client was shown while it was generated is in the message, and begins as
it was shown.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
from renderers.base import ParsedResponse, ParsedToolCall, ToolCallParseStatus

from outloop.router.dialects.base import Message, ToolCall
from outloop.router.rendering.tool_calls import CallForm


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The message in a turn's output ids."""

    message: Message
    undelivered_from: int | None = None
    """Output ids from here on were not delivered; None: all were."""
    is_cut: bool = False
    """True if a call that was shown while it was generated turned out incomplete or malformed."""


class ShownCalls(msgspec.Struct, frozen=True, kw_only=True):
    """What a streaming client was shown of a turn's calls."""

    text: str
    """All text before the first call."""
    calls: Sequence[ToolCall]


def arguments_of(attempt: ParsedToolCall, form: CallForm | None) -> str | None:
    """The call's arguments as JSON text, None when the call is not well formed.

    They are as the policy wrote them where `form` finds them, so that a call that is shown piece
    by piece is the one that is recorded.
    """
    name, arguments = attempt.name, attempt.arguments
    if attempt.status != ToolCallParseStatus.OK or not isinstance(name, str):
        return None
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict):
            return None
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + text).encode()
    except (ValueError, RecursionError):
        # NaN, nesting without end, or half a surrogate pair: no client could read it.
        return None
    return (form.arguments_in(str(attempt.raw)) if form is not None else None) or text


class MessageBuilder:
    """Builds an answer's message call by call; what was shown of a call is kept."""

    def __init__(self, call_prefix: str, shown: ShownCalls | None) -> None:
        self._prefix = call_prefix
        self._shown_calls = shown
        self._shown: Sequence[ToolCall] = shown.calls if shown is not None else ()
        self._calls: list[ToolCall] = []
        self._is_cut = False
        self.texts: list[str] = []
        """Malformed calls, which are text of the message."""

    def add(self, attempt: ParsedToolCall, arguments: str | None, *, parallel: bool) -> bool:
        """Add a call.

        Args:
            arguments: None for a malformed call.

        Returns:
            False if the client does not get this call: it asked for one at a time, or was shown
            the end of the answer before.
        """
        number = len(self._calls)
        if number < len(self._shown):
            shown = self._shown[number]
            if attempt.name != shown.name or not (arguments or "").startswith(shown.arguments):
                self._append(shown.name, shown.arguments, is_cut=True)
                return True
        if arguments is None:
            return self._shown_calls is None
        if self._calls and not parallel:
            return False
        self._append(str(attempt.name), arguments)
        return True

    def build(
        self,
        parsed: ParsedResponse,
        stop_text: str | None,
        *,
        undelivered_from: int | None = None,
    ) -> Answer:
        """The answer; its text ends before `stop_text`."""
        for shown in self._shown[len(self._calls) :]:
            self._append(shown.name, shown.arguments, is_cut=True)
        texts = [text_before(parsed.content or "", stop_text).strip(), *self.texts]
        if self._shown_calls is not None:
            texts = [self._shown_calls.text]
        message = Message(
            "assistant",
            text="\n".join(text for text in texts if text),
            reasoning=(parsed.reasoning_content or "").strip(),
            tool_calls=tuple(self._calls),
        )
        return Answer(message=message, undelivered_from=undelivered_from, is_cut=self._is_cut)

    def _append(self, name: str, arguments: str, *, is_cut: bool = False) -> None:
        self._calls.append(ToolCall(f"{self._prefix}{len(self._calls)}", name, arguments))
        self._is_cut = self._is_cut or is_cut


def start_of(attempt: ParsedToolCall) -> int:
    """The index of a call's first id."""
    return attempt.token_span[0] if attempt.token_span else 0


def text_before(text: str, stop_text: str | None) -> str:
    """`text` before `stop_text`, without the white space that stood between them."""
    return text if stop_text is None else text.partition(stop_text)[0].rstrip()
