"""Which chat format a model folder has: what `model.renderer = "auto"` stands for.

Decides by config.json's model_type and by the markers in tokenizer.json: a Llama may be one of
Meta's, a SmolLM2 or a distilled DeepSeek, each with another format. Renders nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outloop.buffer.errors import SettingsError

OWN_TEMPLATE = "default"
"""The renderer that follows the folder's own chat template."""

_MARKERS: dict[str, frozenset[str]] = {
    "llama-3": frozenset({"<|start_header_id|>", "<|eot_id|>"}),
    "deepseek-r1": frozenset({"<\uff5cAssistant\uff5c>", "<think>"}),
    "deepseek-v3": frozenset({"<\uff5cAssistant\uff5c>"}),
    "glm-4.5": frozenset({"<|assistant|>", "<|observation|>"}),
    "gpt-oss": frozenset({"<|channel|>", "<|message|>"}),
    "qwen3": frozenset({"<|im_start|>", "<tool_call>", "<think>"}),
    OWN_TEMPLATE: frozenset({"<|im_start|>"}),
}
"""What a tokenizer has for each format; the first that fits is the nearest."""
_ALONE = {
    "qwen3_moe": "qwen3",
    "qwen3_5": "qwen3.5",
    "glm4_moe": "glm-4.5",
    "gpt_oss": "gpt-oss",
    "minimax_m2": "minimax-m2",
}
"""Values of model_type that have one format."""
_BY_MARKERS = {
    "qwen2": ("deepseek-r1", OWN_TEMPLATE),
    "qwen3": ("deepseek-r1", "qwen3"),
    "llama": ("llama-3", "deepseek-r1", OWN_TEMPLATE),
    "smollm3": (OWN_TEMPLATE,),
}
"""Values that have several: Qwen2.5 and SmolLM2 write ChatML in ways of their own."""
_THINKS_FIRST = "<\uff5cAssistant\uff5c><think>"
"""In the chat template of DeepSeek-R1, whose answers begin with reasoning."""


def chat_format_of(folder: Path) -> str:
    """The name of the renderer for the model in `folder`.

    Raises:
        SettingsError: none is known to be right; the nearest one is named.
    """
    config = _read_json(folder / "config.json")
    added = _read_json(folder / "tokenizer.json").get("added_tokens") or ()
    tokens = {token["content"] for token in added}
    template = chat_template_of(folder)
    kind = str(config.get("model_type"))
    if kind in _ALONE:
        return _ALONE[kind]
    if kind == "deepseek_v3" and "thinking" not in (template or ""):
        return "deepseek-r1" if _THINKS_FIRST in (template or "") else "deepseek-v3"
    for name in _BY_MARKERS.get(kind, ()):
        if _MARKERS[name] <= tokens and (name != OWN_TEMPLATE or template is not None):
            return name
    near = next((name for name, markers in _MARKERS.items() if markers <= tokens), None)
    if near == OWN_TEMPLATE or (kind == "deepseek_v3" and template is not None):
        near = None
    hints = [f'"{near}", whose markers its tokenizer has'] if near is not None else []
    if template is not None:
        hints.append(f'"{OWN_TEMPLATE}", which follows the chat template in the folder')
    if not hints:
        hints.append("a family of the renderers package; the folder has no chat template either")
    known, choice = (
        ", ".join(sorted({*_ALONE, *_BY_MARKERS, "deepseek_v3"})),
        ", or to ".join(hints),
    )
    raise SettingsError(
        f'model.renderer="auto" does not know the chat format of model_type={kind!r} with the '
        f"tokenizer in {str(folder)!r} (known: {known}). Set model.renderer to {choice}"
    )


def chat_template_of(folder: Path) -> str | None:
    """The Jinja template of the folder, None where it has none."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        return own.read_text()
    config = folder / "tokenizer_config.json"
    found = _read_json(config).get("chat_template") if config.is_file() else None
    if isinstance(found, list):
        by_name = {one["name"]: one["template"] for one in found}
        found = by_name.get("default")
    return found if isinstance(found, str) else None


def end_ids_of(folder: Path) -> tuple[int, ...]:
    """Ids at which servers end an answer by themselves: those of config.json and of
    generation_config.json together, as SGLang joins them."""
    found: list[int] = []
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        given = _read_json(path).get("eos_token_id") if path.is_file() else None
        found += [given] if isinstance(given, int) else given or []
    return tuple(dict.fromkeys(found))


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"{str(path)!r} cannot be read ({error}); give a Hugging Face folder with config.json, "
            "tokenizer.json and model.safetensors"
        ) from error
