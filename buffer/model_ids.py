"""Ids that a model folder's tokenizer may give, and rows that its model has for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from outloop.buffer.errors import SettingsError


def read_vocabulary(folder: Path) -> dict[str, int]:
    """Read every token of `tokenizer.json` with its id, added tokens included."""
    description = json.loads((folder / "tokenizer.json").read_bytes())
    entries = description.get("model", {}).get("vocab", {})
    # A Unigram model lists [token, score] in the order of ids.
    known = entries if isinstance(entries, dict) else {one[0]: i for i, one in enumerate(entries)}
    return known | {one["content"]: one["id"] for one in description.get("added_tokens", [])}


def refuse_ids_without_rows(folder: Path, vocabulary: Mapping[str, int]) -> None:
    """Refuse a tokenizer with ids that the model has no row for: a server refuses the first text
    with such a token, or dies of it.

    Raises:
        SettingsError: there are such ids.
    """
    config = json.loads((folder / "config.json").read_bytes())
    rows = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    beyond = sorted((i, token) for token, i in vocabulary.items() if rows and i >= rows)
    if not beyond:
        return
    named = ", ".join(f"{token!r} ({i})" for i, token in beyond[:3])
    raise SettingsError(
        f"model.path={str(folder)!r}: tokenizer.json has {len(beyond)} tokens beyond the model's "
        f"vocab_size={rows} of config.json: {named}. They were added without resizing the model. "
        "Resize it (transformers: model.resize_token_embeddings(len(tokenizer)), then "
        "save_pretrained), or take them out of tokenizer.json"
    )
