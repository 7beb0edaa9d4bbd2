"""Constrained decoding: which ids may come next.

Owns: `json_schema` and `regex` of a request as a state, over `llguidance`. Does not own: sampling,
stopping. Invariant: a state has taken in every id sampled so far, so it belongs to one sequence.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from outloop.engine.serve.torch_server.sampling import BadRequest, SamplingParams


class Grammar:
    """What one sequence may still say; `allowed` and `take` alternate."""

    def __init__(self, matcher: Any, vocab_size: int, stop_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._stop_ids = stop_ids

    def allowed(self) -> npt.NDArray[np.bool_]:
        """For every id of the vocabulary, whether it may come next; a stop id where it may end."""
        if self._matcher.is_stopped() or self._matcher.is_error():
            return self._only_stops()
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        found = np.zeros(self._vocab_size, dtype=np.bool_)
        bits = np.unpackbits(words, bitorder="little")[: self._vocab_size].astype(np.bool_)
        found[: len(bits)] = bits
        return found if found.any() else self._only_stops()

    def take(self, token: int) -> None:
        """`token` was sampled."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)

    def _only_stops(self) -> npt.NDArray[np.bool_]:
        found = np.zeros(self._vocab_size, dtype=np.bool_)
        found[list(self._stop_ids)] = True
        return found


class Grammars:
    """Makes grammars for one model folder."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._path = folder / "tokenizer.json"
        self._vocab_size = vocab_size
        self._tokenizers: dict[frozenset[int], Any] = {}
        """By stop ids: reading a tokenizer takes longer than an answer."""

    def build(self, params: SamplingParams, stop_ids: Iterable[int]) -> Grammar | None:
        """The grammar that `params` ask for; None when they ask for none.

        Raises:
            BadRequest: the schema or the pattern cannot be read, the library is not installed, or
                the folder has no tokenizer.
        """
        name = next((n for n in ("json_schema", "regex") if getattr(params, n) is not None), None)
        if name is None:
            return None
        stops = frozenset(stop for stop in stop_ids if stop < self._vocab_size)
        if not stops:
            raise BadRequest(f"{name} needs an id that ends the answer; send stop_token_ids")
        matcher_type = self._library(name)
        try:
            source = getattr(params, name)
            if name == "json_schema":
                schema = json.loads(source) if isinstance(source, str) else source
                text = matcher_type.grammar_from_json_schema(schema)
            else:
                text = matcher_type.grammar_from_regex(source)
        except (ValueError, TypeError, RecursionError) as error:
            raise BadRequest(f"{name} cannot be read: {error}") from error
        matcher = matcher_type(self._tokenizer(stops), text, log_level=0)
        if matcher.is_error():
            raise BadRequest(f"{name} is not supported: {matcher.get_error()[:500]}")
        return Grammar(matcher, self._vocab_size, stops)

    def _library(self, name: str) -> Any:
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise BadRequest(
                f"{name} needs llguidance; install outloop[train], or use SGLang"
            ) from error
        return LLMatcher

    def _tokenizer(self, stops: frozenset[int]) -> Any:
        from llguidance import LLTokenizer

        if stops not in self._tokenizers:
            if not self._path.is_file():
                raise BadRequest(
                    "constrained decoding needs a tokenizer, and the model folder holds no "
                    "tokenizer.json"
                )
            self._tokenizers[stops] = LLTokenizer(
                self._path.read_text(), n_vocab=self._vocab_size, eos_token=sorted(stops)
            )
        return self._tokenizers[stops]
