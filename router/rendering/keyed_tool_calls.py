"""Tool calls while they are drawn, in formats that write arguments key by key and not as JSON.

Owns: showing name, then each argument as soon as its value is complete. Does not own: what a value
is (rendering; the same parser reads the finished call). Invariant: the pieces of a call concatenate
to the arguments of its finished form, or to a beginning of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outloop.router.dialects.base import ToolCall
from outloop.router.rendering.tokenizer import PolicyTokenizer
from outloop.router.rendering.tool_calls import CallPiece

Parse = Callable[[list[int]], Sequence[ToolCall]]
"""From the ids of one call, its tokens included, to that call; nothing where it is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyedForm:
    """How calls are written in a chat format, by tokens."""

    begin: str
    end: str
    key: str
    """Before a key; the name stands before the first one."""
    value_end: str
    example: str
    """A call of `f` with `{"a": 1}`."""

    @property
    def tokens(self) -> Sequence[str]:
        """What must be tokens."""
        return (self.begin, self.end, self.key, self.value_end)


KEYED_FORMS: tuple[KeyedForm, ...] = (
    KeyedForm(
        begin="<tool_call>",
        end="</tool_call>",
        key="<arg_key>",
        value_end="</arg_value>",
        example="<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    ),
)
"""Of GLM."""


class KeyedReader:
    """Reads calls out of ids as they come; gives up for good where only the parser can judge."""

    is_body = False

    def __init__(
        self, tokenizer: PolicyTokenizer, form: KeyedForm, parse: Parse, *, max_calls: int | None
    ) -> None:
        ids = tokenizer.convert_tokens_to_ids
        self._begin, self._end = ids(form.begin), ids(form.end)
        self._key, self._value_end = ids(form.key), ids(form.value_end)
        self._parse = parse
        self._max_calls = max_calls
        self._ids: list[int] | None = None
        """Of the call that is open."""
        self._is_named = False
        self._is_over = False
        self._read: list[tuple[str, str]] = []

    @property
    def calls(self) -> list[ToolCall]:
        """What was read of each call so far, without ids."""
        return [ToolCall("", name, arguments) for name, arguments in self._read]

    def begins(self, token: int) -> bool:
        """True if `token` leaves the text of an answer for its calls."""
        return token == self._begin

    def add_text(self, text: str) -> list[CallPiece]:
        """No call of these formats is text."""
        raise AssertionError(f"text={text!r} is no call")

    def add(self, ids: Sequence[int]) -> list[CallPiece]:
        """Take new ids; returns what they add to calls."""
        pieces: list[CallPiece] = []
        for token in ids:
            if self._is_over:
                break
            if self._ids is None:
                if token == self._begin:
                    self._is_over = len(self._read) == self._max_calls
                    self._ids, self._is_named = [token], False
                continue
            self._ids.append(token)
            if token == self._end:
                self._show(self._ids, pieces, is_whole=True)
                self._ids = None
            elif token == self._value_end:
                self._show([*self._ids, self._end], pieces)
            elif token == self._key and not self._is_named:
                self._show([*self._ids[:-1], self._end], pieces)
        return pieces

    def _show(self, ids: list[int], pieces: list[CallPiece], *, is_whole: bool = False) -> None:
        """Show what a call says that would end here, apart from that it ends."""
        calls = self._parse(ids)
        before = self._read[-1][1] if self._is_named else ""
        if len(calls) != 1:
            self._is_over = True
            return
        name, arguments = calls[0].name, calls[0].arguments
        if not is_whole:
            arguments = arguments.removesuffix("}")
        if not self._is_named:
            self._is_named = True
            self._read.append((name, ""))
            pieces.append(CallPiece(len(self._read) - 1, name, ""))
        if not arguments.startswith(before):
            # A key that comes twice takes back what its first value was.
            self._is_over = True
        elif arguments != before:
            self._read[-1] = (name, arguments)
            pieces.append(CallPiece(len(self._read) - 1, name, arguments[len(before) :]))
