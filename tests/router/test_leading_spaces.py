"""Tokenizers whose tokens begin with a space that decoding drops where a text begins."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from fakes.fake_server import Script
from outloop.router.rendering.renderer import PolicyRenderer
from outloop.router.rendering.tokenizer import PolicyTokenizer

WORDS = ("\u2581", "\u2581\u2581", "\u2581hello", "\u2581world", "hello", "lo", "\u2581caf\u00e9")
MARKERS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>", "<think>", "</think>"),
)
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
DECODERS = {
    "metaspace": decoders.Metaspace(),
    "metaspace that drops none": decoders.Metaspace(prepend_scheme="never"),
    "as llama 2": decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    ),
}


def make(folder: Path, decoder: decoders.Decoder) -> PolicyTokenizer:
    """A tokenizer of whole words, with bytes for all else and the markers of Qwen3."""
    vocabulary = {name: i for i, name in enumerate(("<unk>", *WORDS, *BYTES))}
    tokenizer = Tokenizer(
        models.Unigram([(name, -1.0) for name in vocabulary], 0, byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in MARKERS[:3]])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKERS[3:]])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return PolicyTokenizer(folder)


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_token_has_its_space(tmp_path: Path, decoder: str) -> None:
    """Its bytes are what it adds to a text that goes on, and a byte's is that byte."""
    tokenizer = make(tmp_path, DECODERS[decoder])
    for word in WORDS:
        token = tokenizer.convert_tokens_to_ids(word)
        assert tokenizer.bytes_of(token) == word.replace("\u2581", " ").encode()
    names = [f"<0x{byte:02X}>" for byte in "\u4e2d".encode()]
    ids = tokenizer.convert_tokens_to_ids(names)
    if decoder == "as llama 2":
        assert b"".join(map(tokenizer.bytes_of, ids)) == "\u4e2d".encode()
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.bytes_of(stop) == b"<|im_end|>"


@pytest.fixture
async def spaced(make_stage, tmp_path: Path):
    """A router whose policy has such a tokenizer and answers " hello world" and a cafe."""
    folder = tmp_path / "spaced"
    folder.mkdir()
    make(folder, DECODERS["as llama 2"])
    stage = await make_stage(model={"path": str(folder)})
    renderer = PolicyRenderer(stage.run.settings.model)
    names = ["\u2581hello", "\u2581world", "\u2581\u2581", "\u2581caf\u00e9", "<0xC3>", "<0xA9>"]
    ids = renderer.tokenizer.convert_tokens_to_ids(names)
    stage.server.answer = lambda request: Script(ids=ids, finish={"type": "length"})
    return stage


MESSAGES = [{"role": "user", "content": "hello"}]
TEXT = " hello world   caf\u00e9\u00e9"


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_have_the_spaces_of_the_answer(spaced, stream: bool) -> None:
    """Text and bytes of chat completions and responses, joined, are what was said."""
    client = await spaced.client(await spaced.open())
    chat = await client.chat.completions.create(
        model="policy", messages=MESSAGES, logprobs=True, top_logprobs=1, stream=stream
    )
    choices = [c async for x in chat for c in x.choices] if stream else chat.choices
    tokens = [t for choice in choices if choice.logprobs for t in choice.logprobs.content]
    assert [t.token for t in tokens[:3]] == [" hello", " world", "  "]
    assert b"".join(bytes(t.bytes) for t in tokens) == TEXT.encode()
    assert tokens[0].top_logprobs[0].token == " hello"
    asked = {"model": "policy", "input": "hi", "include": ["message.output_text.logprobs"]}
    answer = await client.responses.create(**asked)
    part = answer.output[0].content[0]
    assert part.text == TEXT.strip()
    assert "".join(t.token for t in part.logprobs[:4]) == " hello world   caf\u00e9"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_raw_completion_goes_on_with_its_space(spaced, stream: bool) -> None:
    """Text that is put after the prompt has it, offsets count it, and the whole text, sent again,
    goes on from the recorded ids."""
    episode = await spaced.open()
    client = await spaced.client(episode)
    raw = await client.completions.create(model="policy", prompt="hello", logprobs=1, stream=stream)
    choices = [c async for x in raw for c in x.choices] if stream else raw.choices
    text = "".join(choice.text for choice in choices)
    assert text == TEXT
    (found,) = (choice.logprobs for choice in choices if choice.logprobs)
    assert found.tokens[:2] == [" hello", " world"]
    for token, start in zip(found.tokens[:4], found.text_offset[:4], strict=True):
        assert text[start:].startswith(token)
    await client.completions.create(model="policy", prompt=f"hello{text} world")
    assert [turn.branch_cause for turn in spaced.turns(episode)] == ["root", "extension"]
