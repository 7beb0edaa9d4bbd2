"""Policies made from nothing."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from outloop.buffer.errors import SettingsError
from outloop.engine.models.random_init import Sizes, renderer_of, write_policy

ROW = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "twelve times seven"},
        {"role": "assistant", "content": "eighty four"},
    ]
}


@pytest.mark.medium
def test_the_command_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    """Conversations are looked for in --import-dir; a bad row is named and nothing is written."""
    (tmp_path / "talk.py").write_text(f"def rows():\n    return [{ROW!r}] * 3\n")
    (tmp_path / "bad.jsonl").write_text('{"messages": []}\n')
    code = (
        "import sys\nfrom outloop.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    code = end.code\n"
        "assert not {'torch', 'transformers', 'redis'} & set(sys.modules)\nsys.exit(code)"
    )

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, "new-policy", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=dict(os.environ),
        )

    made = run("--out", "p", "--conversations", "talk:rows", "--import-dir", str(tmp_path))
    assert made.returncode == 0, made.stderr
    assert "random weights" in made.stdout
    assert (tmp_path / "p/model.safetensors").is_file()
    refused = run("--out", "q", "--conversations", "bad.jsonl")
    assert refused.returncode == 2
    assert "bad.jsonl" in refused.stderr
    assert not (tmp_path / "q").exists()


def test_a_seed_fixes_the_weights(tmp_path: Path) -> None:
    """The same seed gives the same bytes, another one other weights, the tokenizer stays."""
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_policy(tmp_path / name, seed, [ROW])

    def digest(name: str, file: str) -> str:
        return hashlib.sha256((tmp_path / name / file).read_bytes()).hexdigest()

    assert digest("a", "model.safetensors") == digest("b", "model.safetensors")
    assert digest("a", "model.safetensors") != digest("c", "model.safetensors")
    assert digest("a", "tokenizer.json") == digest("c", "tokenizer.json")


def test_a_policy_of_other_sizes_is_consistent(tmp_path: Path) -> None:
    """Config, weights and count agree with what was asked for, and transformers loads them."""
    from transformers import AutoModelForCausalLM

    sizes = Sizes(vocab_size=300, hidden_size=32, num_layers=3, max_context_tokens=1024)
    num_weights = write_policy(tmp_path, 0, [ROW], sizes)
    config = json.loads((tmp_path / "config.json").read_text())
    weights = load_file(tmp_path / "model.safetensors")
    assert (config["num_hidden_layers"], config["max_position_embeddings"]) == (3, 1024)
    assert config["vocab_size"] <= 300
    assert weights["model.embed_tokens.weight"].shape == (config["vocab_size"], 32)
    assert sum(weight.size for weight in weights.values()) == num_weights
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sum(weight.numel() for weight in model.parameters()) == num_weights


def test_heads_have_the_size_that_is_asked_for(tmp_path: Path) -> None:
    """As for SGLang on a GPU; transformers finds weights of every shape that it expects."""
    from transformers import AutoModelForCausalLM

    write_policy(tmp_path, 0, [ROW], Sizes(hidden_size=128, head_size=64, num_layers=1))
    config = json.loads((tmp_path / "config.json").read_text())
    heads = (config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"])
    assert heads == (64, 2, 1)
    _, loading = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading.values())
    with pytest.raises(SettingsError, match="head_size=33: .*even"):
        write_policy(tmp_path / "odd", 0, [], Sizes(hidden_size=132, head_size=33))


@pytest.mark.parametrize("hidden_size", [0, -32, 16, 40])
def test_sizes_that_cannot_be_are_refused(hidden_size: int, tmp_path: Path) -> None:
    """The sentence says which would do."""
    with pytest.raises(SettingsError, match=f"hidden_size={hidden_size}: .*multiple of 32"):
        write_policy(tmp_path, 0, [], Sizes(hidden_size=hidden_size))


def test_without_conversations_every_byte_is_a_token(tmp_path: Path) -> None:
    """Such a policy takes any text, and gives it back as it was."""
    write_policy(tmp_path, 0)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "naïve 12*7\n\t漢"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_conversations_without_tools_are_learned_from(tmp_path: Path) -> None:
    """What the conversations say often takes few ids."""
    write_policy(tmp_path / "bytes", 0)
    write_policy(tmp_path / "learned", 0, [ROW] * 4)

    def length(name: str) -> int:
        tokenizer = Tokenizer.from_file(str(tmp_path / name / "tokenizer.json"))
        return len(renderer_of(tokenizer).render_ids(ROW["messages"]))

    assert length("learned") * 3 < length("bytes")


def test_another_model_is_never_written_over(tmp_path: Path) -> None:
    """The same policy again changes nothing; a folder that holds any other model is refused."""
    write_policy(tmp_path / "p", 0)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "p").iterdir()}
    assert write_policy(tmp_path / "p", 0) > 0
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "p").iterdir()} == before
    (tmp_path / "p/model.safetensors").unlink()
    write_policy(tmp_path / "p", 0)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "p").iterdir()}
    assert len(before) == 5
    with pytest.raises(SettingsError, match="holds another model .*config.json.* another folder"):
        write_policy(tmp_path / "p", 1)
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "p").iterdir()} == before
    (tmp_path / "q").mkdir()
    (tmp_path / "q/model-00001-of-00002.safetensors").write_bytes(b"weights")
    with pytest.raises(SettingsError, match="holds another model"):
        write_policy(tmp_path / "q", 0)
    assert [path.name for path in (tmp_path / "q").iterdir()] == [
        "model-00001-of-00002.safetensors"
    ]


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    """As every mistake is."""
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file/policy", Path("/proc/policy")):
        with pytest.raises(SettingsError, match="cannot be written") as caught:
            write_policy(folder, 0)
        assert str(folder) in str(caught.value)
