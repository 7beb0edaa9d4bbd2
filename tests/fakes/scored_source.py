"""A folder's weights as a source that can score prompts, by transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from fakes.local_tensors import LocalTensors


def source_of(folder: Path) -> LocalTensors:
    """The tensors of `model.safetensors`, and their model's logprobs."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @torch.inference_mode()
    def score(prompts: Sequence[Sequence[int]]) -> list[Any]:
        rows = []
        for ids in prompts:
            table = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
            rows.append(table[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].numpy())
        return rows

    return LocalTensors(load_file(folder / "model.safetensors"), score)
