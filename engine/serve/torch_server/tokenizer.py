"""Stop strings, for which token ids must become text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from outloop.engine.serve.torch_server.sampling import BadRequest


class Text:
    """The tokenizer of a model folder; without one, stop strings are refused."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / "tokenizer.json"
        self._tokenizer = Tokenizer.from_file(str(path)) if path.is_file() else None

    def check_stops(self, stops: Sequence[str]) -> None:
        """Refuse stop strings that could never be seen.

        Raises:
            BadRequest: the model folder has no tokenizer.
        """
        if stops and self._tokenizer is None:
            raise BadRequest(
                "stop needs a tokenizer, and the model folder holds no tokenizer.json; send "
                "stop_token_ids"
            )

    def match_stop(self, ids: Sequence[int], stops: Sequence[str]) -> str | None:
        """The stop string that the last of `ids` completes, if any."""
        if self._tokenizer is None:
            return None
        # A token adds at least a byte, so a stop string cannot start before this tail.
        num_tail = max(len(stop.encode()) for stop in stops) + 1
        tail = self._tokenizer.decode(ids[-num_tail:], skip_special_tokens=False)
        return next((stop for stop in stops if stop in tail), None)
