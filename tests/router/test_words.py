"""Text encoded word by word has the ids that the tokenizer gives it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from outloop.router.rendering import pretokenizer_cache
from outloop.router.rendering.pretokenizer_cache import WordEncoder, in_ascii

QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT_OSS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_ENDING}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
FORMATS: dict[str, Sequence[str]] = {
    "gpt2": (),
    "qwen": (QWEN,),
    "llama": (LLAMA,),
    "deepseek": DEEPSEEK,
    "gpt-oss": (GPT_OSS,),
}
CORPUS = [
    "The city isn't far, they'll say: it's by the river. " * 3,
    "def f(x):\n    return {'a': [x, 12345], \"b\": x_y}\n\n\tif x != 0 and y >= 7:\r\n  pass  #",
    "https://example.com/a-b_c?d=1&e=%20 <p>HTML</p> CamelCase SHOUTING don'T 3.14 1,000",
]
MARK = "<|im_end|>"


def make_tokenizer(patterns: Sequence[str]) -> Tokenizer:
    """A small byte-level BPE that cuts by `patterns`; by GPT-2's where there are none."""
    tokenizer = Tokenizer(models.BPE())
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns)
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, last]) if splits else last
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(MARK, special=True)])
    return tokenizer


TOKENIZERS = {name: make_tokenizer(patterns) for name, patterns in FORMATS.items()}
ENCODERS = {name: WordEncoder.of(tokenizer) for name, tokenizer in TOKENIZERS.items()}
TEXTS = st.one_of(
    st.text(st.characters(max_codepoint=127), max_size=80),
    st.text(st.sampled_from("aZs09 \n\r\t'.,-_/\\{}[]<>|\x00\x1c\x0b\x7f"), max_size=80),
    st.lists(
        st.sampled_from([*" ".join(CORPUS).split(" "), " ", "  ", "\n", "'LL", "\r\n\r\n", "99"]),
        max_size=30,
    ).map("".join),
    st.text(max_size=20),
)


@pytest.mark.parametrize("name", FORMATS)
@given(text=TEXTS)
@example(text="  two  spaces \n\n and\tmore   ")
@example(text="it'S they'Ll 'sx x'revenue")
@example(text=f"said {MARK} inside")
@example(text="a\x1cb\x1f c\x0b\x0cd\x85")
def test_same_ids(name: str, text: str) -> None:
    """Whatever the text, its ids are the tokenizer's, or it is left to the tokenizer."""
    encoder = ENCODERS[name]
    assert encoder is not None
    expected = TOKENIZERS[name].encode(text, add_special_tokens=False).ids
    ids = encoder.encode(text)
    assert ids == expected if text.isascii() and MARK not in text else ids is None


@settings(max_examples=30)
@given(texts=st.lists(TEXTS, max_size=8))
def test_forgetting(texts: list[str]) -> None:
    """An encoder that has room for three words only says the same, and keeps no more."""
    encoder = WordEncoder(TOKENIZERS["qwen"], [_translated(QWEN)], max_words=3)
    for text in texts:
        assert encoder.is_right(text)
        assert encoder.num_known <= 3


def test_long_words_are_not_kept() -> None:
    """A word that will hardly come again takes no room."""
    encoder = WordEncoder(TOKENIZERS["qwen"], [_translated(QWEN)])
    assert encoder.is_right("a" * 1000)
    assert encoder.num_known == 0
    assert encoder.is_right("a word")
    assert encoder.num_known == 2


def _translated(pattern: str) -> pretokenizer_cache.Pattern:
    found = in_ascii(pattern)
    assert found is not None
    return found


def _lowercase(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Lowercase()


def _prefixed(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def _spaced(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()


def _inverted(tokenizer: Tokenizer) -> None:
    split = pre_tokenizers.Split(Regex(QWEN), "removed", invert=True)
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, last])


def _uncut(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = None


def _truncated(tokenizer: Tokenizer) -> None:
    tokenizer.enable_truncation(4)


def _random(tokenizer: Tokenizer) -> None:
    tokenizer.model.dropout = 0.5


@pytest.mark.parametrize(
    "change", [_lowercase, _prefixed, _spaced, _inverted, _uncut, _truncated, _random]
)
def test_other_tokenizers_are_left_alone(change: object) -> None:
    """A tokenizer that does anything else than to cut and to encode words is not imitated."""
    tokenizer = make_tokenizer((QWEN,))
    assert callable(change)
    change(tokenizer)
    assert WordEncoder.of(tokenizer) is None


@pytest.mark.parametrize(
    "pattern",
    [
        r"[a-z&&[^b]]+|\s+",
        r"\p{Greek}+|.",
        r"^a|b$",
        r"(a)(b)",
        r"\bword\b",
        r"(?<=a)b",
        r"a{1,2}+",
    ],
)
def test_other_patterns_are_left_alone(pattern: str) -> None:
    """A pattern that `re` might read otherwise than Oniguruma is not translated."""
    assert in_ascii(pattern) is None


def test_a_wrong_cut_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder that cuts otherwise than its tokenizer is not used."""
    wrong = _translated(QWEN.replace(r"?\p{L}+|", r"?\p{L}|"))
    monkeypatch.setattr(pretokenizer_cache, "in_ascii", lambda pattern: wrong)
    assert WordEncoder.of(TOKENIZERS["qwen"]) is None


def test_every_normal_form_leaves_ascii_alone() -> None:
    """Tokenizers that bring text into a normal form first are imitated for ASCII."""
    tokenizer = make_tokenizer((QWEN,))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.NFKC()])
    encoder = WordEncoder.of(tokenizer)
    assert encoder is not None
    assert encoder.is_right(CORPUS[1])
    assert encoder.encode("e\u0301") is None
