"""How long a text may be before it cannot fit."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outloop.router.errors import Refusal
from outloop.router.rendering.text_bound import max_chars_per_token
from outloop.router.rendering.tokenizer import PolicyTokenizer

BPE = {"model": {"type": "BPE"}, "pre_tokenizer": {"type": "ByteLevel"}}
NFC = {"type": "NFC"}
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 7),
        ({"normalizer": NFC}, 28),
        ({"normalizer": {"type": "Sequence", "normalizers": [NFC, SPACES]}}, 28),
        ({"model": {"type": "BPE", "unk_token": "<unk>", "byte_fallback": True}}, 7),
        ({"model": {"type": "BPE", "unk_token": "<unk>"}}, None),
        ({"model": {"type": "Unigram"}}, None),
        ({"added_tokens": [{"content": "<x>", "lstrip": True}]}, None),
        ({"normalizer": {"type": "Strip"}}, None),
        ({"normalizer": {**SPACES, "content": ""}}, None),
        ({"pre_tokenizer": {"type": "Whitespace"}}, None),
        ({"pre_tokenizer": {"type": "Split", "behavior": "Removed"}}, None),
        ({"pre_tokenizer": {"type": "Split", "behavior": "Isolated"}}, 7),
    ],
)
def test_only_certain_bounds_are_given(fields: dict, expected: int | None) -> None:
    """What may drop, shorten or swallow text without bound has none."""
    assert max_chars_per_token({**BPE, **fields}, 7) == expected


@pytest.mark.medium
@settings(max_examples=20, deadline=None)
@given(st.text(max_size=40))
def test_no_text_that_fits_is_beyond_the_bound(model_folder: Path, text: str) -> None:
    """The number of tokens is never less than the bound says; a long text that has more than
    allowed is refused, one that has as many is not."""
    text = (text or "x") * (20_000 // max(1, len(text)) + 1)
    whole = PolicyTokenizer(model_folder)
    tokenizer_json = json.loads((model_folder / "tokenizer.json").read_text())
    each = max_chars_per_token(tokenizer_json, max(map(len, whole.get_vocab())))
    assert each is not None
    ids = whole.encode(text)
    assert len(ids) * each >= len(text)
    assert PolicyTokenizer(model_folder, max_tokens=len(ids)).encode(text) == ids
    for too_few in (len(ids) - 1, 1):
        with pytest.raises(Refusal, match="prompt is too long"):
            PolicyTokenizer(model_folder, max_tokens=too_few).encode(text)
