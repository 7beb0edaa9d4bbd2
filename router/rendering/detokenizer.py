"""Ids to text as they come.

Owns: incremental detokenisation. Does not own: which text may be shown. Invariant: no character is
split, and the pieces concatenate to the text of all ids.
"""

from __future__ import annotations

from collections.abc import Iterable

from outloop.router.rendering.tokenizer import PolicyTokenizer

_BROKEN = "\ufffd"


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
