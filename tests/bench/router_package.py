"""The calls of `renderers` that a turn needs, as the reference of `make bench-router` makes them.

Owns: the package over a tokenizer that does nothing but what `tokenizers` does, timing its calls.
Does not own: the router's own tokenizer. Invariant: texts are new at each call; nothing that is
measured as the router's is in the reference.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from renderers import create_renderer
from router_load import TOOLS, Conversation
from router_mock import FILLER_ID, NUM_GENERATED
from tokenizers import Tokenizer

NUM_TAIL = 120
"""About as many ids as a turn adds to a prompt."""


class BareTokenizer:
    """tokenizer.json for `renderers`, with nothing remembered and nothing made shorter."""

    unk_token_id = eos_token_id = pad_token_id = None

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.name_or_path = str(folder)

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        """Ids."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: int | Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        """Text."""
        several = [ids] if isinstance(ids, int) else ids
        return str(self._tokenizer.decode(several, skip_special_tokens=skip_special_tokens))

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of each."""
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]

    def get_vocab(self) -> dict[str, int]:
        """Every token."""
        return dict(self._tokenizer.get_vocab())


def bare_package(folder: Path, package: Any) -> Any:
    """A renderer like `package`, over a bare tokenizer."""
    return create_renderer(BareTokenizer(folder), package.config)


def cpu_per_turn(package: Any, stop_id: int, chats: Sequence[Conversation]) -> tuple[float, float]:
    """CPU seconds of the calls for a first turn, and for one of turns 2 to 8.

    A first turn renders the conversation and parses an answer, a later one bridges to one more
    message and parses an answer.
    """
    answer = [FILLER_ID] * (NUM_GENERATED - 1) + [stop_id]
    firsts = [[dict(message) for message in chat.messages] for chat in chats]
    before = time.process_time()
    prompts = [
        package.render_ids(messages, tools=TOOLS, add_generation_prompt=True) for messages in firsts
    ]
    first = (time.process_time() - before) / len(chats)
    for chat in chats:
        chat.messages.append({"role": "assistant", "content": "x"})
        chat.ask()
    asked = [[chat.messages[-1]] for chat in chats]
    tails = [prompt[-NUM_TAIL:] for prompt in prompts]
    gc.collect()
    before = time.process_time()
    for tail, new in zip(tails, asked, strict=True):
        package.bridge_to_next_turn(tail, answer, new, tools=TOOLS)
        package.parse_response(answer, tools=TOOLS, prompt_ids=tail)
    each = (time.process_time() - before) / len(chats)
    before = time.process_time()
    for tail in tails:
        package.parse_response(answer, tools=TOOLS, prompt_ids=tail)
    return first + (time.process_time() - before) / len(chats), each
