"""The example with a real model: the conversion, questions, verdicts, and two steps of training."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 260}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def llama() -> LlamaForCausalLM:
    """A tiny Llama of transformers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES, **HEADS, rope_theta=1e5, tie_word_embeddings=True, max_position_embeddings=64
    )
    return LlamaForCausalLM(config).eval()


def interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """A projection as GGUF has it: the halves of each head row by row."""
    rows = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return rows.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: LlamaForCausalLM, names: dict[str, str]) -> None:
    """The model as llama.cpp would store it, with a tokenizer of bytes."""
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    letters = [chr(code) for code in range(33, 127)]
    named = ["<|end|>", "<|im_start|>", "<|im_end|>", *letters, "he", "hel"]
    tokens = [*named, *(f"unused{number}" for number in range(config.vocab_size - len(named)))]
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["h e", "he l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")
    back = {ours: theirs for theirs, ours in names.items()}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        weight = tensor.numpy()
        for part, num_heads in heads.items():
            if part in name:
                weight = interleave(weight, num_heads)
        if name in back:
            writer.add_tensor(back[name], weight)
        else:
            _, _, layer, part = name.removesuffix(".weight").split(".", 3)
            writer.add_tensor(f"blk.{layer}.{back[part]}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_converted_model_is_the_model(
    load_example: Callable[..., Any], llama: LlamaForCausalLM, tmp_path: Path
) -> None:
    """Logits to the bit, and ids: each digit is one, control tokens are one, text comes back."""
    model = load_example("smollm2", "model")
    write_gguf(tmp_path / "tiny.gguf", llama, model.NAMES)
    model.convert(tmp_path / "tiny.gguf", tmp_path / "folder")
    read = LlamaForCausalLM.from_pretrained(tmp_path / "folder").eval()
    ids = torch.arange(40)[None] * 7 % SIZES["vocab_size"]
    with torch.no_grad():
        assert torch.equal(read(ids).logits, llama(ids).logits)
    tokenizer = Tokenizer.from_file(str(tmp_path / "folder/tokenizer.json"))
    encoded = tokenizer.encode("<|im_start|>hello12")
    assert encoded.tokens == ["<|im_start|>", "hel", "l", "o", "1", "2"]
    assert tokenizer.decode(encoded.ids) == "hello12"
    written = json.loads((tmp_path / "folder/tokenizer_config.json").read_text())
    assert (written["eos_token"], written["chat_template"]) == ("<|im_end|>", "{{ messages }}")


def test_held_out_words_are_asked_about_nowhere_else(load_example: Callable[..., Any]) -> None:
    """No word is in both splits or of two kinds, and every kind is in both."""
    tasks = load_example("smollm2", "tasks")
    words = [word for _, text in tasks.KINDS.values() for word in text.split(", ")]
    assert len(set(words)) == len(words)
    asked = {}
    for split in tasks.SHARES:
        rows = tasks.questions(split)
        assert {row["answer"] for row in rows} == set(tasks.KINDS)
        subjects = [row["question"].split(" ", 1)[1] for row in rows]
        asked[split] = {word for word in words if any(s.startswith(f"{word} ") for s in subjects)}
    assert not asked["train"] & asked["test"]
    assert asked["train"] | asked["test"] == set(words)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("A fruit.", 1.0),
        ("Figs are fruits, not cities", 0.0),
        ("It is a CITY", 0.0),
        ("one of those fruits", 1.0),
        ("fruitful", 0.0),
        ("", 0.0),
    ],
)
def test_an_answer_names_one_kind(
    load_example: Callable[..., Any], answer: str, reward: float
) -> None:
    """The right one, in any form of the word, and not the other."""
    verifier = load_example("smollm2", "verifier")
    task = SimpleNamespace(payload={"answer": "fruit", "other": "city"})
    assert verifier.verify(task, SimpleNamespace(answer=answer)) == reward


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(240)
def test_it_trains(train_example: Callable[..., list[dict[str, Any]]]) -> None:
    """From a random policy of the same settings: two steps."""
    rows = [row for row in train_example("smollm2") if "train/loss" in row]
    assert [row["train/episodes"] for row in rows] == [12, 12]
    assert all(row["train/failed_share"] == 0 for row in rows)
