"""How long a text may be before it cannot fit a number of tokens.

Owns: the bound, and which tokenizers have one. Does not own: encoding. Invariant: a text beyond the
bound has more tokens than allowed, whatever it says; a tokenizer of which that is not certain has
no bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_COMPOSED = 4
"""A character that Unicode's composition makes stands for at most so many (UAX 15)."""
_UNICODE_FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
_KEEPING = frozenset({"ByteLevel", "Digits", "Metaspace", "Sequence", "Split"})
"""Pre-tokenizers that drop nothing of a text, but for `Split` where it is told to."""


def max_chars_per_token(tokenizer: Mapping[str, Any], longest_token: int) -> int | None:
    """The most characters that one token may stand for; None: there is no limit that is known.

    Args:
        tokenizer: a tokenizer.json.
        longest_token: characters of the longest entry of its vocabulary, added ones included.
    """
    model = tokenizer.get("model") or {}
    if model.get("type") != "BPE":
        return None
    if model.get("unk_token") is not None and not model.get("byte_fallback"):
        # One token stands for any number of unknown characters.
        return None
    added = tokenizer.get("added_tokens") or ()
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        # It takes any number of spaces beside it with it.
        return None
    shrinking = 1
    for step in steps(tokenizer.get("normalizer"), "normalizers"):
        if step["type"] in _UNICODE_FORMS:
            shrinking = _COMPOSED
        elif step["type"] == "Replace":
            if len(step.get("pattern", {}).get("String", "")) != 1 or not step.get("content"):
                return None
        elif step["type"] not in ("Prepend", "Lowercase"):
            return None
    for step in steps(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        if step["type"] not in _KEEPING or step.get("behavior") == "Removed":
            return None
    return longest_token * shrinking


def steps(one: Any, name: str) -> Iterator[Mapping[str, Any]]:
    """A step of a tokenizer.json, or those of a sequence."""
    if one is None:
        return
    if one["type"] == "Sequence":
        for inner in one[name]:
            yield from steps(inner, name)
    else:
        yield one
