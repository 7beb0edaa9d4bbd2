"""Constrained decoding: which ids `json_schema` allows next, by `llguidance`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from outloop.engine.serve.torch_server.sampling import BadRequest, SamplingParams


class Grammar:
    """The grammar's state for one sequence; `take` gets every id that is sampled."""

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
        """The grammar of the request's JSON schema; None without one.

        Raises:
            BadRequest: the schema cannot be read, the library is not installed, or the folder has
                no tokenizer.
        """
        source = params.json_schema
        if source is None:
            return None
        stops = frozenset(stop for stop in stop_ids if stop < self._vocab_size)
        if not stops:
            raise BadRequest("json_schema needs an id that ends the answer; send stop_token_ids")
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise BadRequest(
                "json_schema needs llguidance; install outloop[train], or use SGLang"
            ) from error
        try:
            schema = json.loads(source) if isinstance(source, str) else source
            text = LLMatcher.grammar_from_json_schema(schema)
        except (ValueError, TypeError, RecursionError) as error:
            raise BadRequest(f"json_schema cannot be read: {error}") from error
        matcher = LLMatcher(self._tokenizer(stops), text, log_level=0)
        if matcher.is_error():
            raise BadRequest(f"json_schema is not supported: {matcher.get_error()[:500]}")
        return Grammar(matcher, self._vocab_size, stops)

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
