"""From a parsed answer to the message that a client gets.

Owns: which calls count, their arguments as text, what stays said because it was shown. Does not
own: parsing (renderers), ids. Invariant: a call that a client was shown is in the message, and
begins as it was shown.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
from renderers.base import ParsedResponse, ParsedToolCall, ToolCallParseStatus

from outloop.router.dialects.base import Message, ToolCall
from outloop.router.rendering.tool_calls import CallForm


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy's ids say; output ids from `undelivered_from` on were not handed out."""

    message: Message
    undelivered_from: int | None = None
    is_cut: bool = False
    """A call that was shown while it was drawn came to no good end."""


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """What a client was shown of calls while they were drawn."""

    text: str
    """All text before the first of them."""
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


class Said:
    """Puts an answer together call by call; what a client was shown of them stays said."""

    def __init__(self, call_prefix: str, begun: Begun | None) -> None:
        self._prefix = call_prefix
        self._begun = begun
        self._shown: Sequence[ToolCall] = begun.calls if begun is not None else ()
        self._calls: list[ToolCall] = []
        self._is_cut = False
        self.texts: list[str] = []

    def take(self, attempt: ParsedToolCall, arguments: str | None, *, parallel: bool) -> bool:
        """Add a call, `arguments` None: a broken one; False when it comes too late."""
        number = len(self._calls)
        if number < len(self._shown):
            shown = self._shown[number]
            if attempt.name != shown.name or not (arguments or "").startswith(shown.arguments):
                self._add(shown.name, shown.arguments, is_cut=True)
                return True
        if arguments is None:
            return self._begun is None
        if self._calls and not parallel:
            return False
        self._add(str(attempt.name), arguments)
        return True

    def answer(
        self,
        parsed: ParsedResponse,
        stop_text: str | None,
        *,
        undelivered_from: int | None = None,
    ) -> Answer:
        """All of it."""
        for shown in self._shown[len(self._calls) :]:
            self._add(shown.name, shown.arguments, is_cut=True)
        texts = [cut(parsed.content or "", stop_text).strip(), *self.texts]
        if self._begun is not None:
            texts = [self._begun.text]
        message = Message(
            "assistant",
            text="\n".join(text for text in texts if text),
            reasoning=(parsed.reasoning_content or "").strip(),
            tool_calls=tuple(self._calls),
        )
        return Answer(message=message, undelivered_from=undelivered_from, is_cut=self._is_cut)

    def _add(self, name: str, arguments: str, *, is_cut: bool = False) -> None:
        self._calls.append(ToolCall(f"{self._prefix}{len(self._calls)}", name, arguments))
        self._is_cut = self._is_cut or is_cut


def start_of(attempt: ParsedToolCall) -> int:
    """The first id of a call."""
    return attempt.token_span[0] if attempt.token_span else 0


def cut(text: str, stop_text: str | None) -> str:
    """`text` before `stop_text`."""
    return text if stop_text is None else text.partition(stop_text)[0].rstrip()
