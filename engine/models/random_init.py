"""Makes a small random Qwen3-shaped policy with a tokenizer and chat template of its own.

The result is a Hugging Face folder that the torch server, the trainer and transformers load.
Neither torch nor transformers is needed to make it, and nothing is downloaded.

The tokenizer is a byte-level BPE trained on whole rendered conversations, the tool preamble
included: the preamble is sent with every turn, and text that the BPE has not seen costs several
hundred ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from renderers import Qwen3RendererConfig, create_renderer
from safetensors.numpy import save
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from tokenizers.trainers import BpeTrainer

from outloop.buffer.errors import SettingsError

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKER_TOKENS = [
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]
NUM_TOKENIZER_CONVERSATIONS = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How large a new policy is; the default has 0.14M weights."""

    vocab_size: int = 640
    """At most; the BPE stops when nothing is left to merge."""
    hidden_size: int = 64
    head_size: int = 16
    """Of each attention head. SGLang's kernels for GPUs are made for 64 to 512; for others it takes
    slower ones."""
    num_layers: int = 2
    max_context_tokens: int = 512


_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    # Its place: files of one policy are the same bytes.
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_cache": True,
    "initializer_range": 0.02,
    "torch_dtype": "float32",
}
# The renderer's format as a template, for tools that read templates: with thinking disabled, each
# assistant turn opens with an empty <think> block.
CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and ' }}
    {{- 'arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n' }}
    {{- '</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}{{- call.function.arguments }}
            {%- else %}{{- call.function.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
"""


class RendererTokenizer:
    """The few methods that `renderers` asks of a tokenizer."""

    name_or_path = "outloop-new-policy"
    unk_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int], **_: object) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self.tokenizer.token_to_id(token)


def renderer_of(tokenizer: Tokenizer) -> Any:
    """The renderer that the router uses, over `tokenizer`."""
    config = Qwen3RendererConfig(enable_thinking=False)
    return create_renderer(RendererTokenizer(tokenizer), config)


def train_tokenizer(rows: Iterable[Mapping[str, Any]], vocab_size: int) -> Tokenizer:
    """A BPE over the conversations, rendered by the renderer that will render them later."""
    bytes_only = bpe([], vocab_size=0)
    renderer = renderer_of(bytes_only)

    def text_of(row: Mapping[str, Any], num_messages: int, ends_in_prompt: bool) -> str:
        ids = renderer.render_ids(
            row["messages"][:num_messages],
            tools=row.get("tools"),
            add_generation_prompt=ends_in_prompt,
        )
        text: str = bytes_only.decode(ids, skip_special_tokens=False)
        return text

    texts = []
    for row in rows:
        before = ""
        for index, message in enumerate(row["messages"]):
            if message["role"] == "assistant":
                # Where a prompt ends and an answer begins is fixed when the policy samples, so no
                # merge may run across it.
                for text in (text_of(row, index, True), text_of(row, index + 1, False)):
                    texts.append(text.removeprefix(before))
                    before = text
    return bpe(texts, vocab_size)


def bpe(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE with single digits; only its special tokens may hold several digits."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(ByteLevel.alphabet()),
        special_tokens=[
            *(AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS),
            *(AddedToken(token, special=False, normalized=False) for token in MARKER_TOKENS),
        ],
        show_progress=False,
    )
    # Markers are cut out before a text is encoded, so no merge may run across one.
    markers = "|".join(map(re.escape, SPECIAL_TOKENS + MARKER_TOKENS))
    tokenizer.train_from_iterator((re.split(markers, text) for text in texts), trainer)
    return tokenizer


def initial_weights(config: Mapping[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Random float32 weights under their Hugging Face names."""
    rng = np.random.default_rng(seed)
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    num_queries = config["num_attention_heads"] * head
    num_keys = config["num_key_value_heads"] * head

    def normal(rows: int, columns: int, scale: float) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * scale).astype(np.float32)

    def ones(size: int) -> np.ndarray:
        return np.ones(size, np.float32)

    wide, deep = hidden**-0.5, (2 * config["num_hidden_layers"]) ** -0.5
    weights = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden, 0.05)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        weights |= {
            prefix + "input_layernorm.weight": ones(hidden),
            prefix + "post_attention_layernorm.weight": ones(hidden),
            attention + "q_proj.weight": normal(num_queries, hidden, wide),
            attention + "k_proj.weight": normal(num_keys, hidden, wide),
            attention + "v_proj.weight": normal(num_keys, hidden, wide),
            attention + "o_proj.weight": normal(hidden, num_queries, num_queries**-0.5 * deep),
            attention + "q_norm.weight": ones(head),
            attention + "k_norm.weight": ones(head),
            mlp + "gate_proj.weight": normal(inner, hidden, wide),
            mlp + "up_proj.weight": normal(inner, hidden, wide),
            mlp + "down_proj.weight": normal(hidden, inner, inner**-0.5 * deep),
        }
    return weights | {"model.norm.weight": ones(hidden)}


def config_of(sizes: Sizes, vocab_size: int, *, end: int, pad: int) -> dict[str, Any]:
    """The folder's config.json."""
    return _CONFIG | {
        "hidden_size": sizes.hidden_size,
        "intermediate_size": 3 * sizes.hidden_size,
        "num_hidden_layers": sizes.num_layers,
        "head_dim": sizes.head_size,
        "num_attention_heads": sizes.hidden_size // sizes.head_size,
        "num_key_value_heads": sizes.hidden_size // sizes.head_size // 2,
        "max_position_embeddings": sizes.max_context_tokens,
        "vocab_size": vocab_size,
        "bos_token_id": pad,
        "eos_token_id": end,
        "pad_token_id": pad,
    }


def write_policy(
    folder: Path,
    seed: int,
    conversations: Iterable[Mapping[str, Any]] = (),
    sizes: Sizes = Sizes(),
) -> int:
    """Write the folder: tokenizer, template, config and weights; returns the number of weights.

    A folder that holds this very policy already stays as it is; one with another model is refused.

    Args:
        seed: of the weights.
        conversations: rows {"messages", "tools"?}; the tokenizer learns from the first of them.
            None: every byte is a token.

    Raises:
        SettingsError: head_size is odd, hidden_size cannot be divided into pairs of heads, the
            folder holds another model, or it cannot be written.
    """
    if sizes.head_size <= 0 or sizes.head_size % 2:
        raise SettingsError(
            f"head_size={sizes.head_size}: a head's numbers are rotated in pairs; give an even one"
        )
    if sizes.hidden_size <= 0 or sizes.hidden_size % (2 * sizes.head_size):
        raise SettingsError(
            f"hidden_size={sizes.hidden_size}: heads have {sizes.head_size} each and share keys in "
            f"pairs; give a multiple of {2 * sizes.head_size}"
        )
    rows = islice(conversations, NUM_TOKENIZER_CONVERSATIONS)
    tokenizer = train_tokenizer(rows, sizes.vocab_size)
    end, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    config = config_of(sizes, tokenizer.get_vocab_size(), end=end, pad=pad)
    weights = initial_weights(config, seed)
    described = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": [end, pad], "pad_token_id": pad},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": sizes.max_context_tokens,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    files = {name: json.dumps(content, indent=1).encode() for name, content in described.items()}
    files["tokenizer.json"] = tokenizer.to_str(pretty=True).encode()
    files["model.safetensors"] = save(weights, metadata={"format": "pt"})
    _write_new(folder, files)
    return sum(weight.size for weight in weights.values())


def _write_new(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the files of a model into a folder that holds none, or these."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = [path for path in folder.iterdir() if path.name in files or _is_weights(path)]
        is_same = all(
            path.name in files and path.read_bytes() == files[path.name] for path in there
        )
        if is_same:
            # Each file whole: what a kill leaves is completed by the next call.
            for name in files.keys() - {path.name for path in there}:
                partial = folder / f".{name}.partial"
                partial.write_bytes(files[name])
                partial.replace(folder / name)
    except OSError as error:
        raise SettingsError(
            f"folder={str(folder)!r} cannot be written: {error}; give the path of a folder that "
            "you may write"
        ) from error
    if not is_same:
        names = ", ".join(sorted(path.name for path in there))
        raise SettingsError(
            f"folder={str(folder)!r} holds another model already ({names}), which is left as it "
            "is; give another folder, or remove this one"
        )


def _is_weights(path: Path) -> bool:
    return path.suffix in (".safetensors", ".bin", ".gguf") or path.name.endswith(".index.json")
