"""Encoding a text word by word, each word once.

Owns: cutting text where a tokenizer cuts it before it encodes, remembering what words are. Does not
own: the ids of a word (`tokenizers`). Invariant: same text, same ids as the tokenizer; a tokenizer
or a text of which this is not certain is left to it.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import chain, product
from typing import Any

from tokenizers import Tokenizer

MAX_WORDS = 32_768
_MAX_WORD_CHARS = 64
"""A longer word is encoded anew each time: it will hardly come again."""
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What `ByteLevel` cuts by unless it is told not to."""
_PLAIN_FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
"""Normal forms, all of which leave ASCII as it is."""
_ASCII = tuple(map(chr, range(128)))
_PROPERTY = re.compile(r"\\p\{(\w\w?)\}")
_ELEMENT = re.compile(
    r"""\\p\{\w\w?\} | \\[sSdDwWrnt] | \\\W
    | \[\^?(?:\\p\{\w\w?\} | \\[sSdDwWrnt] | \\\W | &(?!&) | [^\[\]\\&])+\]
    | \(\?(?:i:|:|!|=) | [)|] | [?*+] | \{\d+(?:,\d*)?\}(?!\+)
    | [^\\\[\](){}.^$|?*+]""",
    re.VERBOSE,
)
"""What patterns may consist of: what Oniguruma and `re` read alike, and properties."""


Pattern = re.Pattern[str]


class WordEncoder:
    """Encodes ASCII text for one tokenizer; safe to use from several threads."""

    def __init__(
        self, tokenizer: Tokenizer, patterns: Sequence[Pattern], *, max_words: int = MAX_WORDS
    ) -> None:
        """`patterns` cut a text one after the other, as the tokenizer's own do; see `of`."""
        self._max_words = max_words
        self._tokenizer = tokenizer
        self._patterns = patterns
        added = (token.content for token in tokenizer.get_added_tokens_decoder().values())
        marks = sorted(mark for mark in added if mark.isascii())
        self._marks = re.compile("|".join(map(re.escape, marks)) or r"(?!)")
        self._ids: dict[str, Sequence[int]] = {}

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> WordEncoder | None:
        """An encoder for `tokenizer`; None where it does more than to cut a text into words and to
        encode each on its own, or where that is not known to be done here in the same way."""
        patterns = _patterns_of(tokenizer)
        if patterns is None:
            return None
        encoder = cls(tokenizer, patterns)
        if not all(map(encoder.is_right, _samples())):
            return None
        encoder._ids.clear()
        return encoder

    def encode(self, text: str) -> list[int] | None:
        """Ids of `text` without special tokens added; None: the tokenizer must be asked."""
        if not text.isascii() or self._marks.search(text):
            return None
        words = self._cut(text)
        try:
            return list(chain.from_iterable(map(self._ids.__getitem__, words)))
        except KeyError:
            return list(chain.from_iterable(map(self._learned(words).__getitem__, words)))

    @property
    def num_known(self) -> int:
        """Words that are remembered."""
        return len(self._ids)

    def is_right(self, text: str) -> bool:
        """True if `text` has the tokenizer's own ids here, or is left to it."""
        ids = self.encode(text)
        return ids is None or ids == self._tokenizer.encode(text, add_special_tokens=False).ids

    def _cut(self, text: str) -> list[str]:
        words = [text]
        for pattern in self._patterns:
            words = [piece for word in words for piece in _pieces(pattern, word)]
        return words

    def _learned(self, words: Sequence[str]) -> dict[str, Sequence[int]]:
        """Ids of each of these words, the new ones encoded now."""
        known = self._ids
        found = {word: known.get(word, ()) for word in words}
        missing = [word for word, ids in found.items() if not ids]
        encodings = self._tokenizer.encode_batch_fast(missing, add_special_tokens=False)
        for word, encoding in zip(missing, encodings, strict=True):
            found[word] = tuple(encoding.ids)
            if len(word) <= _MAX_WORD_CHARS:
                if len(known) >= self._max_words:
                    known.clear()
                known[word] = found[word]
        return found


def _pieces(pattern: Pattern, text: str) -> list[str]:
    """Every match, and all that stands between two, in order."""
    # The whole pattern is a group, so that splitting keeps what it matches.
    return list(filter(None, pattern.split(text)))


def _patterns_of(tokenizer: Tokenizer) -> list[Pattern] | None:
    """What `tokenizer` cuts by, one after the other, for ASCII text; None: that is not known."""
    if tokenizer.truncation is not None or tokenizer.padding is not None:
        return None
    if getattr(tokenizer.model, "dropout", None):
        return None
    if any(part["type"] not in _PLAIN_FORMS for part in _parts(tokenizer.normalizer)):
        return None
    *steps, last = _parts(tokenizer.pre_tokenizer) or [{"type": ""}]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    patterns = [_split_by(step) for step in steps]
    if last["use_regex"]:
        patterns.append(_GPT2_WORDS)
    translated = [in_ascii(pattern) if pattern else None for pattern in patterns]
    known = [pattern for pattern in translated if pattern is not None]
    return known if known and len(known) == len(patterns) else None


def _parts(component: Any) -> list[dict[str, Any]]:
    """The parts of a normalizer or a pre-tokenizer as tokenizer.json describes them."""
    if component is None:
        return []
    described = json.loads(component.__getstate__())
    if described["type"] != "Sequence":
        return [described]
    return list(described.get("pretokenizers") or described.get("normalizers") or ())


def _split_by(step: dict[str, Any]) -> str | None:
    """The pattern of a step that cuts out what matches; None: it does something else."""
    if step["type"] != "Split" or step["behavior"] != "Isolated" or step["invert"]:
        return None
    pattern: str | None = step["pattern"].get("Regex")
    return pattern


def in_ascii(pattern: str) -> Pattern | None:
    """A pattern of `tokenizers` (Oniguruma's syntax) as one that finds the same in ASCII text.

    It is one group. None where the pattern has what the two may read differently.
    """
    elements = _ELEMENT.findall(pattern)
    if "".join(elements) != pattern:
        return None
    written = [
        _PROPERTY.sub(_characters, one if one.startswith("[") else one.replace("\\p", r"[\p") + "]")
        if "\\p{" in one
        else one
        for one in elements
    ]
    try:
        return re.compile(f"({''.join(written)})", re.ASCII)
    except re.error:
        return None


def _characters(found: re.Match[str]) -> str:
    """The ASCII characters of a Unicode property, as they stand in a class."""
    name = found.group(1)
    chars = [char for char in _ASCII if unicodedata.category(char).startswith(name)]
    # A class must not be empty: then it has what no ASCII text has.
    return "".join(map(re.escape, chars)) or "\uffff"


def _samples() -> Iterator[str]:
    """Texts with each character beside many others, as short as may be."""
    for char in _ASCII:
        yield f"{char}a{char} {char}\n{char}1{char}.{char}{char}A{char}'{char}s  {char}\r\n\t{char}"
    for first in "aZ9 \n'/":
        yield "".join(first + "".join(pair) for pair in product("aB0 \n\r'/", repeat=2))
