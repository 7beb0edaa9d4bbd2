"""Texts encoded word by word have the ids of the whole text."""

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as pre

from outloop.router.rendering.tokenizer import PolicyTokenizer

CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
QWEN = (
    CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CASED = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT_OSS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{CASED[0]}*{CASED[1]}+{CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{CASED[0]}+{CASED[1]}*{CONTRACTION}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT = "It's the survey of 1,024 rivers; don't cite entry-7, I'VE seen\n it. We'll go to  x = y2k. "


def split(pattern: str) -> pre.PreTokenizer:
    whole = pre.Split(Regex(pattern), "isolated")
    return pre.Sequence([whole, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


BYTES = pre.ByteLevel(add_prefix_space=False)
SPLITS = {
    "gpt2": BYTES,
    "smollm2": pre.Sequence([pre.Digits(individual_digits=True), BYTES]),
    "qwen": split(QWEN),
    "llama3": split(QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|")),
    "gpt_oss": split(GPT_OSS),
    # Of these, words may not be encoded apart.
    "whole": pre.ByteLevel(add_prefix_space=False, use_regex=False),
    "prefix": pre.ByteLevel(add_prefix_space=True),
    "metaspace": pre.Metaspace(),
    "pairs": split(r"\w+ \w+|[\s\S]"),
}
ADDED = {
    "spaced": AddedToken("of y", special=True),
    "greedy": AddedToken("<|x|>", lstrip=True, rstrip=True),
    "word": AddedToken("rivers", single_word=True),
}


@cache
def tokenizer(kind: str, added: str = "") -> Tokenizer:
    """A byte-level BPE with merges over most of `TEXT`."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC() if kind == "qwen" else None
    made.pre_tokenizer, made.decoder = SPLITS[kind], decoders.ByteLevel()
    alphabet = pre.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([TEXT * 3], trainer)
    made.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    if added:
        made.add_tokens([ADDED[added]])
    return made


@pytest.mark.parametrize(
    ("kind", "added"), [*((kind, "") for kind in SPLITS), *(("gpt2", name) for name in ADDED)]
)
def test_words_have_the_ids_of_the_whole_text(tmp_path: Path, kind: str, added: str) -> None:
    """For tokenizers that encode words apart, and for such as do not."""
    whole = tokenizer(kind, added)
    whole.save(str(tmp_path / "tokenizer.json"))
    policy = PolicyTokenizer(tmp_path)
    pieces = st.sampled_from([*"ab 1,.;'\n e\u0301<", "'s", "'LL", " of", "1,024", "<|im_end|>"])
    more = st.sampled_from(
        [
            "<|x|>",
            "of y",
            " rivers",
            "rivers1",
            " <|x|> a",
            TEXT,
            "  ",
            "\t",
            "\u00a0",
            "\u4e2d",
            "/",
        ]
    )

    @settings(max_examples=60, deadline=None)
    @given(st.lists(pieces | more | st.characters(), max_size=24).map("".join))
    def check(text: str) -> None:
        for _ in range(2):
            assert policy.encode(text) == whole.encode(text, add_special_tokens=False).ids

    check()
