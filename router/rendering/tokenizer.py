"""tokenizer.json as the object that `renderers` expects.

Owns: text to ids and back, over the `tokenizers` library. Does not own: chat formats. Invariant:
same text, same ids as the Hugging Face fast tokenizer of the folder, without special tokens added;
loads neither transformers nor torch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from outloop.buffer.errors import SettingsError
from outloop.router.errors import context_length_exceeded
from outloop.router.rendering.text_bound import max_chars_per_token
from outloop.router.rendering.word_ids import WordIds, encodes_words_apart

_CACHED_TEXTS = 256
_CACHED_TOKENS = 256
_MAX_CACHED_CHARS = 16384
_MAX_CACHED_IDS = 4
_BROKEN = "\ufffd"
_SPACE = "\u2581"
"""How tokenizers of SentencePiece's kind name the space before a word."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""How tokenizers with a fallback to bytes name one."""


def _byte_names() -> Mapping[str, int]:
    """Each byte by the character that stands for it in tokens of byte-level tokenizers.

    From GPT-2's encoder: printable bytes stand for themselves, the others follow from U+0100 on.
    """
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in plain]
    names = {chr(byte): byte for byte in plain}
    return names | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTES = MappingProxyType(_byte_names())


class PolicyTokenizer:
    """The policy's tokenizer; safe to use from several threads.

    A long text of more than `max_tokens` tokens is refused by `encode` without making ids of it:
    where that is certain from its length, without encoding it either.
    """

    def __init__(self, folder: Path, *, max_tokens: int | None = None) -> None:
        # It would make a pool of threads for batches; those here have one text each.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise SettingsError(
                f"model.path={str(folder)!r} holds no tokenizer.json; give a Hugging Face folder "
                "with config.json, tokenizer.json and model.safetensors"
            )
        self._tokenizer = Tokenizer.from_file(str(path))
        description = json.loads(path.read_bytes())
        self._words = WordIds(self._tokenizer) if encodes_words_apart(description) else None
        self._max_tokens = max_tokens
        self._max_chars: int | None = None
        if max_tokens is not None:
            longest = max(map(len, self.get_vocab()))
            each = max_chars_per_token(description, longest)
            self._max_chars = max_tokens * each if each is not None else None
        self.name_or_path = str(folder)
        self.unk_token_id: int | None = None
        self.eos_token_id = self._special(folder, "eos_token")
        self.pad_token_id = self._special(folder, "pad_token")
        self.added_ids = frozenset(self._tokenizer.get_added_tokens_decoder())
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        # Rendering encodes the same fragments again and again: role headers, tool preambles.
        self._encode_cached = lru_cache(maxsize=_CACHED_TEXTS)(self._encode)
        self._decode_cached = lru_cache(maxsize=_CACHED_TEXTS)(self._decode)
        # The renderers ask for the same markers at every turn.
        self._id_cached = lru_cache(maxsize=_CACHED_TOKENS)(self._tokenizer.token_to_id)

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        """Ids of `text`; markers such as `<|im_end|>` in it become their single id.

        Raises:
            Refusal: 400, it is long, and has more than `max_tokens`.
        """
        if len(text) > _MAX_CACHED_CHARS:
            return list(self._encode(text))
        return list(self._encode_cached(text))

    def decode(
        self,
        token_ids: int | Sequence[int],
        skip_special_tokens: bool = False,
        **_: Any,
    ) -> str:
        """Text of `token_ids`; bytes that are no character become U+FFFD."""
        ids = (token_ids,) if isinstance(token_ids, int) else tuple(token_ids)
        if len(ids) <= _MAX_CACHED_IDS:
            return self._decode_cached(ids, skip_special_tokens)
        return self._decode(ids, skip_special_tokens)

    def decode_on(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids` that continue others: with the space that they may begin with."""
        text = self.decode(token_ids)
        return self.space_before(token_ids[0]) + text if token_ids else text

    def detokenizer(self) -> Detokenizer:
        """A new incremental detokenizer, for one sequence."""
        return Detokenizer(self._tokenizer)

    def space_before(self, token: int) -> str:
        """The space that decoding drops where `token` begins a text; empty for most tokenizers."""
        written = self._tokenizer.id_to_token(token) or ""
        if not written.startswith(_SPACE) or token in self.added_ids:
            return ""
        alone = self.decode(token)
        # The second of two keeps its space.
        return self.decode((token, token))[len(alone) :].removesuffix(alone)

    def bytes_of(self, token: int) -> bytes:
        """The bytes of one token, also where it is only a part of a character."""
        text = self.decode(token)
        if _BROKEN not in text:
            return (self.space_before(token) + text).encode()
        written = self._tokenizer.id_to_token(token) or ""
        single = _BYTE_TOKEN.fullmatch(written)
        if single is not None:
            return bytes.fromhex(single.group(1))
        return (
            bytes(_BYTES[char] for char in written)
            if set(written) <= _BYTES.keys()
            else text.encode()
        )

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Id of a token, None when unknown; a list for a list."""
        if isinstance(tokens, str):
            return self._id_cached(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """Token of an id, None when unknown; a list for a list."""
        if isinstance(ids, int):
            return self._tokenizer.id_to_token(ids)
        return [self._tokenizer.id_to_token(i) for i in ids]

    def get_vocab(self) -> dict[str, int]:
        """Every token with its id."""
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))

    @cached_property
    def num_ids(self) -> int:
        """One more than the highest id; ids may have holes."""
        return max(self.get_vocab().values()) + 1

    def _decode(self, ids: tuple[int, ...], skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def _encode(self, text: str) -> tuple[int, ...]:
        is_long = len(text) > _MAX_CACHED_CHARS
        if is_long and self._max_chars is not None and len(text) > self._max_chars:
            assert self._max_tokens is not None
            least = self._max_tokens * len(text) // self._max_chars
            raise context_length_exceeded(least, self._max_tokens)
        if self._words is not None and not is_long:
            return self._words.encode(text)
        # A batch of one: only a batch may leave out where in the text each id stands, and lets
        # other threads go on meanwhile.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        if is_long and self._max_tokens is not None and len(encoding) > self._max_tokens:
            raise context_length_exceeded(len(encoding), self._max_tokens)
        return tuple(encoding.ids)

    def _special(self, folder: Path, name: str) -> int | None:
        path = folder / "tokenizer_config.json"
        if not path.is_file():
            return None
        token = json.loads(path.read_text()).get(name)
        if isinstance(token, dict):
            token = token.get("content")
        return self._tokenizer.token_to_id(token) if isinstance(token, str) else None


class Detokenizer:
    """Turns ids into text as they come: no character is split, and the pieces concatenate to the
    text of all ids, except for the end of a character that is not complete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=False)

    def add(self, ids: Iterable[int]) -> str:
        """The characters that are complete now."""
        pieces = (self._stream.step(self._tokenizer, token) for token in ids)
        return "".join(piece for piece in pieces if piece)
