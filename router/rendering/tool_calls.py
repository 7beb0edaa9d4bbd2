"""Name and arguments of tool calls while they are generated, in chat formats that write JSON.

Whether a finished call is well formed is for the renderer to say. Invariant: the result does not
depend on how the ids were cut into pieces; a call's pieces concatenate to JSON text as the policy
wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from outloop.router.dialects.base import ToolCall
from outloop.router.rendering.tokenizer import Detokenizer, PolicyTokenizer

_MAX_HEAD_CHARS = 1024
"""A call whose arguments start later than this is shown when it is complete."""
_MAX_TAIL_CHARS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class CallForm:
    """How calls are written in a chat format: tokens around them, text around their arguments."""

    begin: str
    """The token before a call; empty where an answer that begins with `{` is a call."""
    end: str
    around: tuple[str, ...] = ()
    """Tokens that may stand between calls."""
    within: tuple[str, ...] = ()
    """Tokens that may stand in a call before its arguments."""
    head: re.Pattern[str]
    """From the call's beginning to its arguments; group 1 is the name."""
    tail: re.Pattern[str]
    """From the end of the arguments to that of the call."""
    example: str
    """A call of `f` with `{"a": 1}`."""

    @property
    def tokens(self) -> Sequence[str]:
        """What must be tokens."""
        return [token for token in (self.begin, self.end) if token]

    def arguments_in(self, text: str) -> str | None:
        """The arguments of a finished call as they are written; None when they stand elsewhere."""
        head = self.head.match(text)
        if head is None:
            return None
        scan = _ObjectScan()
        end = head.end() + scan.take(text[head.end() :])
        if not scan.is_complete or self.tail.fullmatch(text[end:]) is None:
            return None
        return text[head.end() : end]


_JSON_TAIL = re.compile(r"\s*\}\s*")
_BAR, _BLANK = "\uff5c", "\u2581"


def _deepseek(name: str) -> str:
    return f"<{_BAR}{name.replace(' ', _BLANK)}{_BAR}>"


_SEP = _deepseek("tool sep")
FORMS: tuple[CallForm, ...] = (
    CallForm(
        begin="<tool_call>",
        end="</tool_call>",
        head=re.compile(
            r'\s*\{\s*"name"\s*:\s*"([^"\\\x00-\x1f]+)"\s*,\s*"arguments"\s*:\s*(?=\{)'
        ),
        tail=_JSON_TAIL,
        example='<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    ),
    CallForm(
        begin=_deepseek("tool call begin"),
        end=_deepseek("tool call end"),
        around=(_deepseek("tool calls begin"), _deepseek("tool calls end")),
        within=(_SEP,),
        head=re.compile(rf"\s*function{_SEP}\s*(\S+)[ \t]*\n\s*```json\s*(?=\{{)"),
        tail=re.compile(r"\s*```\s*"),
        example=_deepseek("tool calls begin")
        + _deepseek("tool call begin")
        + f'function{_SEP}f\n```json\n{{"a": 1}}\n```'
        + _deepseek("tool call end")
        + _deepseek("tool calls end"),
    ),
    CallForm(
        begin="",
        end="",
        head=re.compile(
            r'\s*\{\s*"name"\s*:\s*"([^"\\\x00-\x1f]+)"\s*,\s*"parameters"\s*:\s*(?=\{)'
        ),
        tail=_JSON_TAIL,
        example='{"name": "f", "parameters": {"a": 1}}',
    ),
)
"""Of Qwen3 and Hermes, of DeepSeek V3, of Llama 3."""


@dataclass(frozen=True, slots=True)
class CallPiece:
    """More of the arguments of call `number`; the first piece of a call may be empty."""

    number: int
    name: str
    arguments: str


class CallReader:
    """Reads calls from ids as they come; stops for good at what only the parser can judge."""

    def __init__(
        self, tokenizer: PolicyTokenizer, form: CallForm, *, max_calls: int | None
    ) -> None:
        ids = tokenizer.convert_tokens_to_ids
        self._tokenizer = tokenizer
        self._form = form
        self._begin = ids(form.begin) if form.begin else None
        self._end = ids(form.end) if form.end else None
        self._around = frozenset(ids(list(form.around)))
        self._within = frozenset(ids(list(form.within)))
        self._max_calls = max_calls
        self._call: _OpenCall | None = None
        self._is_over = False
        self._read: list[tuple[str, list[str]]] = []

    @property
    def calls(self) -> list[ToolCall]:
        """What was read of each call so far, without ids."""
        return [ToolCall("", name, "".join(pieces)) for name, pieces in self._read]

    @property
    def is_body(self) -> bool:
        """True where an answer that begins with `{` is a call."""
        return self._begin is None

    def begins(self, token: int) -> bool:
        """True if `token` leaves the text of an answer for its calls."""
        return token == self._begin or token in self._around

    def add(self, ids: Sequence[int]) -> list[CallPiece]:
        """Take new ids; returns what they add to calls."""
        pieces: list[CallPiece] = []
        start = 0
        for index, token in enumerate(ids):
            if self._is_over:
                return pieces
            if token not in self._tokenizer.added_ids:
                continue
            self._read_ids(ids[start:index], pieces)
            start = index + 1
            self._mark(token, pieces)
        if not self._is_over:
            self._read_ids(ids[start:], pieces)
        return pieces

    def add_text(self, text: str) -> list[CallPiece]:
        """The same where a call is the answer's text."""
        pieces: list[CallPiece] = []
        if self._call is None:
            self._call = _OpenCall(self._tokenizer.detokenizer())
        self._take(self._call, text, pieces)
        return pieces

    def _mark(self, token: int, pieces: list[CallPiece]) -> None:
        call = self._call
        if call is None:
            if token == self._begin and len(self._read) != self._max_calls:
                self._call = _OpenCall(self._tokenizer.detokenizer())
            elif token not in self._around:
                self._is_over = True
        elif token in self._within and not call.name:
            self._take(call, self._tokenizer.decode([token]), pieces)
        elif token == self._end and self._is_whole(call):
            self._call = None
        else:
            self._is_over = True

    def _is_whole(self, call: _OpenCall) -> bool:
        is_short = len(call.text) <= _MAX_TAIL_CHARS
        return call.scan.is_complete and is_short and bool(self._form.tail.fullmatch(call.text))

    def _read_ids(self, ids: Sequence[int], pieces: list[CallPiece]) -> None:
        if self._call is not None and ids:
            self._take(self._call, self._call.detokenizer.add(ids), pieces)

    def _take(self, call: _OpenCall, text: str, pieces: list[CallPiece]) -> None:
        call.text += text
        if not call.name:
            head = self._form.head.match(call.text)
            if head is None or head.end() > _MAX_HEAD_CHARS:
                self._is_over = self._is_over or len(call.text) > _MAX_HEAD_CHARS
                return
            call.name, call.text = head.group(1), call.text[head.end() :]
            self._read.append((call.name, []))
            pieces.append(CallPiece(len(self._read) - 1, call.name, ""))
        if call.scan.is_complete:
            self._is_over = self._is_over or len(call.text) > _MAX_TAIL_CHARS
            return
        end = call.scan.take(call.text)
        if end:
            self._read[-1][1].append(call.text[:end])
            pieces.append(CallPiece(len(self._read) - 1, call.name, call.text[:end]))
        call.text = call.text[end:]


@dataclass(slots=True)
class _OpenCall:
    """A call that is not complete; `text` is its part that was not read yet."""

    detokenizer: Detokenizer
    text: str = ""
    name: str = ""
    scan: _ObjectScan = field(default_factory=lambda: _ObjectScan())


class _ObjectScan:
    """Finds the end of a JSON object in text that comes in pieces."""

    __slots__ = ("_depth", "_in_string", "_is_escaped", "is_complete")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self.is_complete = False

    def take(self, text: str) -> int:
        """How many characters of `text` belong to the object."""
        for index, char in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char == "{":
                self._depth += 1
            elif char == "}":
                self._depth -= 1
                if self._depth == 0:
                    self.is_complete = True
                    return index + 1
        return len(text)
