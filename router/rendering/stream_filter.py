"""Which part of a turn may be streamed while it is generated.

The finished ids are parsed once, and that is what is recorded. Invariant: the deltas of a turn,
concatenated, are a prefix of its parsed content; no text is shown that may become a tool call or a
stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from typing import NamedTuple

from outloop.router.rendering.tokenizer import PolicyTokenizer
from outloop.router.rendering.tool_calls import CallPiece, CallReader

_MARKERS = ("<tool_call", "<think>", "</think>", "<function", "[TOOL_CALLS]", "<|")


class Shown(NamedTuple):
    """What may be shown now."""

    reasoning: str = ""
    text: str = ""
    calls: Sequence[CallPiece] = ()


_NOTHING = Shown()


class ContentStream:
    """Text and calls of a turn, as far as they may be shown."""

    def __init__(
        self, tokenizer: PolicyTokenizer, stop: tuple[str, ...], calls: CallReader | None = None
    ) -> None:
        self._added_ids = tokenizer.added_ids
        self._detokenizer = tokenizer.detokenizer()
        self._markers = (*_MARKERS, *stop)
        self._calls = calls
        self._held = ""
        self._region = "text"
        """text; calls: by tokens; body: the text is a call; parser: nothing more is shown."""
        self._shown = StringIO()

    @property
    def shown(self) -> str:
        """The text that was shown, or that the client wrote itself."""
        return self._shown.getvalue()

    def begin_after(self, ids: list[int]) -> None:
        """Take the ids of a prefill, before any other: the client knows them, so none is shown."""
        self._shown.write(self._detokenizer.add(ids).lstrip())

    def add(self, ids: list[int]) -> Shown:
        """Take new ids; returns what to show now."""
        if self._region == "parser":
            return _NOTHING
        if self._region == "calls":
            assert self._calls is not None
            return Shown(calls=self._calls.add(ids))
        border = next((i for i, token in enumerate(ids) if token in self._added_ids), len(ids))
        text = self._detokenizer.add(ids[:border])
        shown = self._read_body(text) if self._region == "body" else self._read_text(text)
        if border == len(ids):
            return shown
        if self._region == "text" and self._calls is not None and self._calls.begins(ids[border]):
            # Text that was held back as the possible start of a marker is text after all.
            self._region = "calls"
            rest = self._held.rstrip()
            self._shown.write(rest)
            return Shown(text=shown.text + rest, calls=self._calls.add(ids[border:]))
        # A stop id, or reasoning: the rest is shown when the whole answer is parsed.
        self._region = "parser"
        return shown

    def _read_text(self, text: str) -> Shown:
        self._held += text
        if not self._shown.tell():
            self._held = self._held.lstrip()
            if self._calls is not None and self._calls.is_body and self._held.startswith("{"):
                self._region, held = "body", self._held
                return self._read_body(held)
        end = _safe_length(self._held, self._markers)
        if end < len(self._held) and _has_marker(self._held[end:], self._markers):
            self._region = "parser"
        # White space at the end is stripped if the content ends here, which is not known yet.
        end = len(self._held[:end].rstrip())
        piece, self._held = self._held[:end], self._held[end:]
        self._shown.write(piece)
        return Shown(text=piece)

    def _read_body(self, text: str) -> Shown:
        assert self._calls is not None
        return Shown(calls=self._calls.add_text(text))


class ReasonedStream:
    """Reasoning, then text and calls, as far as they may be shown."""

    def __init__(
        self,
        tokenizer: PolicyTokenizer,
        stop: tuple[str, ...],
        reasoning_ids: tuple[int, int],
        *,
        begins_in_reasoning: bool,
        calls: CallReader | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._begin_id, self._end_id = reasoning_ids
        self.content = ContentStream(tokenizer, stop, calls)
        self._detokenizer = tokenizer.detokenizer()
        self._region = "reasoning" if begins_in_reasoning else "start"
        self._waiting: list[int] = []
        self._held = ""
        self._has_reasoned = False

    def begin_after(self, ids: list[int]) -> None:
        """Take the ids of a prefill; the answer is past its reasoning then."""
        self._region = "content"
        self.content.begin_after(ids)

    def add(self, ids: list[int]) -> Shown:
        """Take new ids; returns what to show now."""
        if self._region == "content":
            return self.content.add(ids)
        if self._region == "start":
            ids = self._leave_start(ids)
        reasoning = ""
        if self._region == "reasoning":
            reasoning, ids = self._reason(ids)
        if self._region != "content":
            return Shown(reasoning)
        return self.content.add(ids)._replace(reasoning=reasoning)

    def _leave_start(self, ids: list[int]) -> list[int]:
        """The ids after an opening marker of reasoning, or all; white space decides nothing."""
        ids, self._waiting = [*self._waiting, *ids], []
        border = ids.index(self._begin_id) if self._begin_id in ids else len(ids)
        if self._tokenizer.decode(ids[:border]).strip():
            self._region = "content"
            return ids
        if border == len(ids):
            self._waiting = ids
            return []
        self._region = "reasoning"
        return ids[border + 1 :]

    def _reason(self, ids: list[int]) -> tuple[str, list[int]]:
        """Reasoning to show, and the ids that come after it."""
        plain, rest = ids, list[int]()
        for index, token in enumerate(ids):
            if token in self._tokenizer.added_ids:
                # Any other marker inside reasoning is left to the parser.
                self._region = "content" if token == self._end_id else "parser"
                plain, rest = ids[:index], ids[index + 1 :]
                break
        self._held += self._detokenizer.add(plain)
        if not self._has_reasoned:
            self._held = self._held.lstrip()
        end = len(self._held.rstrip())
        piece, self._held = self._held[:end], self._held[end:]
        self._has_reasoned = self._has_reasoned or bool(piece)
        return piece, rest


class RawStream:
    """A raw completion, as far as it may be shown: all but what may become a stop string."""

    def __init__(
        self, tokenizer: PolicyTokenizer, stop: tuple[str, ...], stop_ids: tuple[int, ...]
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._stop = stop
        self._stop_ids = frozenset(stop_ids)
        self._held = ""
        self._is_new = True
        self._is_over = False

    def add(self, ids: list[int]) -> Shown:
        """Take new ids; returns what to show now."""
        if self._is_over:
            return _NOTHING
        end = next((i for i, token in enumerate(ids) if token in self._stop_ids), len(ids))
        self._is_over = end < len(ids)
        if self._is_new and end:
            self._is_new = False
            self._held = self._tokenizer.space_before(ids[0])
        self._held += self._detokenizer.add(ids[:end])
        if not self._stop:
            piece, self._held = self._held, ""
            return Shown(text=piece)
        safe = _safe_length(self._held, self._stop)
        if _has_marker(self._held[safe:], self._stop):
            self._is_over = True
        piece, self._held = self._held[:safe], self._held[safe:]
        return Shown(text=piece)


def _safe_length(text: str, markers: tuple[str, ...]) -> int:
    """Length of the part of `text` that neither is nor may become a marker."""
    found = [position for m in markers if (position := text.find(m)) >= 0]
    if found:
        return min(found)
    longest = max(map(len, markers))
    for start in range(max(0, len(text) - longest + 1), len(text)):
        tail = text[start:]
        if any(marker.startswith(tail) for marker in markers):
            return start
    return len(text)


def _has_marker(text: str, markers: tuple[str, ...]) -> bool:
    return any(text.startswith(marker) for marker in markers)
