"""Which renderer a model folder needs.

Owns: the families that "auto" knows, making a renderer of the `renderers` package. Does not own:
rendering. Invariant: what cannot work is refused before anything is served.
"""

from __future__ import annotations

import json
from typing import Any

from renderers import create_renderer
from renderers.configs import config_from_name

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import ModelSettings
from outloop.router.rendering.tokenizer import PolicyTokenizer

_FAMILY_OF_MODEL_TYPE = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "qwen3_5": "qwen3.5",
    "llama": "llama-3",
    "glm4_moe": "glm-4.5",
    "deepseek_v3": "deepseek-v3",
    "gpt_oss": "gpt-oss",
    "minimax_m2": "minimax-m2",
}


def make_renderer(tokenizer: PolicyTokenizer, model: ModelSettings) -> Any:
    """The renderer of `model`'s chat format.

    Raises:
        SettingsError: an unknown `model.renderer`, or options it refuses.
    """
    name = model.renderer
    if name == "auto":
        config = json.loads((model.path / "config.json").read_text())
        model_type = config.get("model_type")
        if model_type not in _FAMILY_OF_MODEL_TYPE:
            raise SettingsError(
                f'model.renderer="auto" does not know model_type={model_type!r} of '
                f"{str(model.path)!r}; known: {', '.join(sorted(_FAMILY_OF_MODEL_TYPE))}. "
                "Set model.renderer to a family of the renderers package."
            )
        name = _FAMILY_OF_MODEL_TYPE[model_type]
    try:
        default = config_from_name(name)
        if default is None:
            raise ValueError("it names no family")
        return create_renderer(tokenizer, type(default)(**model.renderer_options))
    except (ValueError, TypeError, AssertionError, AttributeError) as error:
        raise SettingsError(
            f"model.renderer={name!r} with model.renderer_options={model.renderer_options} and the "
            f"tokenizer in {str(model.path)!r} does not work: {error}"
        ) from error
