"""Text of a turn while it is drawn.

Owns: incremental detokenisation and what must be held back. Does not own: parsing; the finished
ids are parsed once and that is the truth. Invariant: the deltas of a turn, concatenated, are a
prefix of its parsed content; no character is split, and nothing that may become a tool call or a
stop string is handed out as text.
"""

from __future__ import annotations

from collections.abc import Iterable

from outloop.router.tokenizer import PolicyTokenizer

_BROKEN = "\ufffd"
_MARKERS = ("<tool_call", "<think>", "</think>", "<function", "[TOOL_CALLS]", "<|")


class Detokenizer:
    """Turns ids into text as they come; the pieces concatenate to the text of all ids."""

    def __init__(self, tokenizer: PolicyTokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._border = 0
        """Ids of the window that precede the newest; they are context for decoding only."""
        self._num_given = 0
        """Characters of the window's text that were handed out."""

    def add(self, ids: Iterable[int]) -> str:
        """The characters that are complete now."""
        self._window += ids
        text = self._tokenizer.decode(self._window)
        # Only the last replacement character can still become another one.
        end = len(text) - 1 if text.endswith(_BROKEN) else len(text)
        piece = text[self._num_given : end]
        self._num_given = max(end, self._num_given)
        if end == len(text) and len(self._window) > self._border:
            self._window = self._window[self._border :]
            self._border = len(self._window)
            self._num_given = len(self._tokenizer.decode(self._window))
        return piece


class ContentStream:
    """Which part of a turn's text may be shown already."""

    def __init__(self, tokenizer: PolicyTokenizer, stop: tuple[str, ...]) -> None:
        self._added_ids = tokenizer.added_ids
        self._detokenizer = Detokenizer(tokenizer)
        self._markers = (*_MARKERS, *stop)
        self._held = ""
        self._is_holding = False
        self.shown = ""

    def add(self, ids: list[int]) -> str:
        """Take new ids; returns the text to show now."""
        if self._is_holding:
            return ""
        plain = ids
        for index, token in enumerate(ids):
            if token in self._added_ids:
                # A marker: a stop, a tool call or reasoning. The parser decides about the rest.
                plain, self._is_holding = ids[:index], True
                break
        self._held += self._detokenizer.add(plain)
        if not self.shown:
            self._held = self._held.lstrip()
        end = _safe_length(self._held, self._markers)
        if end < len(self._held) and _has_marker(self._held[end:], self._markers):
            self._is_holding = True
        # Trailing white space goes when the content ends here, which is not known yet.
        end = len(self._held[:end].rstrip())
        piece, self._held = self._held[:end], self._held[end:]
        self.shown += piece
        return piece


class ReasonedStream:
    """Reasoning, then content: which part of either may be shown already."""

    def __init__(
        self,
        tokenizer: PolicyTokenizer,
        stop: tuple[str, ...],
        reasoning_ids: tuple[int, int],
        *,
        begins_in_reasoning: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._begin_id, self._end_id = reasoning_ids
        self._content = ContentStream(tokenizer, stop)
        self._detokenizer = Detokenizer(tokenizer)
        self._region = "reasoning" if begins_in_reasoning else "start"
        self._waiting: list[int] = []
        self._held = ""
        self._has_reasoned = False

    def add(self, ids: list[int]) -> tuple[str, str]:
        """Take new ids; returns the reasoning and the text to show now."""
        if self._region == "start":
            ids = self._leave_start(ids)
        reasoning = ""
        if self._region == "reasoning":
            reasoning, ids = self._reason(ids)
        return reasoning, self._content.add(ids) if self._region == "content" else ""

    def _leave_start(self, ids: list[int]) -> list[int]:
        """Ids of the region that begins; white space alone begins none."""
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
                # Any other marker inside of reasoning is the parser's to judge.
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
    """Which part of a raw completion may be shown already: all but what may become a stop."""

    def __init__(
        self, tokenizer: PolicyTokenizer, stop: tuple[str, ...], stop_ids: tuple[int, ...]
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = stop
        self._stop_ids = frozenset(stop_ids)
        self._held = ""
        self._is_over = False

    def add(self, ids: list[int]) -> str:
        """Take new ids; returns the text to show now."""
        if self._is_over:
            return ""
        end = next((i for i, token in enumerate(ids) if token in self._stop_ids), len(ids))
        self._is_over = end < len(ids)
        self._held += self._detokenizer.add(ids[:end])
        if not self._stop:
            piece, self._held = self._held, ""
            return piece
        safe = _safe_length(self._held, self._stop)
        if _has_marker(self._held[safe:], self._stop):
            self._is_over = True
        piece, self._held = self._held[:safe], self._held[safe:]
        return piece


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
