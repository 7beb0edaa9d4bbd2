"""Ids of a text from those of its words, each of which is encoded once.

Owns: where a text may be cut, for which tokenizers, and the ids of words met lately. Does not own:
encoding. Invariant: the ids are those of the whole text. A text is cut only where every pattern
named here ends one piece and begins the next, whatever stands around it, and a byte-level BPE
encodes such pieces apart; any other tokenizer gets whole texts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain
from typing import Any

from tokenizers import Tokenizer

from outloop.router.rendering.text_bound import steps

_CUT = re.compile(r"(?<=[!-~])(?= [A-Za-z])|(?<=[A-Za-z])(?=[0-9])|(?<=[A-Za-z0-9])(?=[,.;:!?])")
"""Before the one space that leads a word, after letters, and before punctuation that is not the
apostrophe of a contraction. Both sides are ASCII, so that no normal form of Unicode joins them."""
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CASED = (r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]")
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_PATTERNS = frozenset(
    {
        # Qwen 2 and 3; Llama 3; GPT-OSS. GPT-2's is part of `ByteLevel`.
        rf"{_CONTRACTION}|{_WORD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
        rf"{_CONTRACTION}|{_WORD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
        rf"{_WORD}{_CASED[0]}*{_CASED[1]}+{_CONTRACTION}?|"
        rf"{_WORD}{_CASED[0]}+{_CASED[1]}*{_CONTRACTION}?|"
        rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
    }
)
_MAX_WORDS = 16_384
_MAX_WORD_CHARS = 32


class WordIds:
    """Encodes texts word by word; safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """`tokenizer`: one of which `encodes_words_apart` is true."""
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of `text`."""
        words = _CUT.split(text)
        known = self._known
        found = {word: known.get(word) for word in words}
        new = [word for word, ids in found.items() if ids is None]
        if new:
            encodings = self._tokenizer.encode_batch_fast(new, add_special_tokens=False)
            for word, encoding in zip(new, encodings, strict=True):
                found[word] = encoding.ids
                if len(word) <= _MAX_WORD_CHARS:
                    known[word] = encoding.ids
            if len(known) > _MAX_WORDS:
                known.clear()
        return tuple(chain.from_iterable(map(found.__getitem__, words)))  # type: ignore[arg-type]


def encodes_words_apart(tokenizer: Mapping[str, Any]) -> bool:
    """True if a text may be cut at `_CUT`, by what its tokenizer.json says."""
    model = tokenizer.get("model") or {}
    if model.get("type") != "BPE" or model.get("dropout"):
        return False
    if tokenizer.get("truncation") or tokenizer.get("padding"):
        return False
    for token in tokenizer.get("added_tokens") or ():
        reaches_out = any(token.get(name) for name in ("lstrip", "rstrip", "single_word"))
        if reaches_out or _CUT.search(token["content"]):
            return False
    if any(step["type"] != "NFC" for step in steps(tokenizer.get("normalizer"), "normalizers")):
        return False
    has_pattern = False
    for step in steps(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        if step["type"] == "ByteLevel" and not step.get("add_prefix_space"):
            has_pattern = has_pattern or step.get("use_regex", True)
        elif step["type"] == "Split" and step.get("behavior") == "Isolated":
            if step.get("invert") or step.get("pattern", {}).get("Regex") not in _PATTERNS:
                return False
            has_pattern = True
        elif step["type"] != "Digits":
            return False
    return has_pattern
