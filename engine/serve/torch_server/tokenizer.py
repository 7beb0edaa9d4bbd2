"""Text of token ids, where a folder has a tokenizer.

Owns: encoding prompts, decoding answers, stop strings. Does not own: chat templates (router).
Invariant: ids are the truth; text is only ever derived from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from outloop.engine.serve.torch_server.sampling import BadRequest, SamplingParams


class Text:
    """The tokenizer of a model folder; without one, text is empty and stop strings are refused."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / "tokenizer.json"
        self._tokenizer: Tokenizer | None = None
        if path.is_file():
            self._tokenizer = Tokenizer.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt.

        Raises:
            BadRequest: the model folder has no tokenizer.
        """
        return self._required("text").encode(text).ids

    def check_stops(self, stops: Sequence[str]) -> None:
        """Refuse stop strings that could never be seen.

        Raises:
            BadRequest: the model folder has no tokenizer.
        """
        if stops:
            self._required("stop")

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """Text of `ids`; empty without a tokenizer."""
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special)

    def match_stop(self, ids: Sequence[int], stops: Sequence[str]) -> str | None:
        """The stop string that the last of `ids` completes, if any."""
        # A token adds at least a byte, so a stop string cannot start before this tail.
        num_tail = max(len(stop.encode()) for stop in stops) + 1
        tail = self.decode(ids[-num_tail:], skip_special=False)
        return next((stop for stop in stops if stop in tail), None)

    def answer(self, ids: Sequence[int], params: SamplingParams, matched: int | str | None) -> str:
        """The answer's text, cut before what stopped it unless `no_stop_trim`."""
        if isinstance(matched, int) and not params.no_stop_trim and ids and ids[-1] == matched:
            ids = ids[:-1]
        found = self.decode(ids, skip_special=params.skip_special_tokens)
        if isinstance(matched, str) and not params.no_stop_trim and matched in found:
            found = found[: found.rindex(matched)]
        return found

    def _required(self, what: str) -> Tokenizer:
        if self._tokenizer is None:
            raise BadRequest(
                f"{what} needs a tokenizer, and the model folder holds no tokenizer.json; "
                "send input_ids and stop_token_ids"
            )
        return self._tokenizer
