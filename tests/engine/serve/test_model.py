"""The torch server's arithmetic against Hugging Face transformers."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fakes.families import make_family
from outloop.buffer.errors import SettingsError
from outloop.engine.serve.torch_server.config import read_config
from outloop.engine.serve.torch_server.kv_cache import KVCache
from outloop.engine.serve.torch_server.transformer import Transformer
from outloop.engine.serve.torch_server.weights import load_weights

CPU = torch.device("cpu")


def _reference(folder: Path) -> torch.nn.Module:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


@pytest.mark.parametrize(
    ("kind", "tied"),
    [
        ("qwen3", True),
        ("qwen3", False),
        ("llama", False),
        ("qwen3_moe", False),
        ("glm4_moe", False),
    ],
)
def test_logits_equal_transformers(kind: str, tied: bool, tmp_path: Path) -> None:
    """Ragged prefill and single decode steps give transformers' logits to 1e-5."""
    folder = tmp_path / kind
    make_family(kind, folder, is_tied=tied)
    reference = _reference(folder)
    config = read_config(folder)
    weights = load_weights(config, folder, dtype=torch.float32, device=CPU)
    model = Transformer(config, max_tokens=513, device=CPU)
    cache = KVCache(config, max_running=4, max_tokens=512, dtype=torch.float32, device=CPU)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 40, 127])
    rows = [torch.randint(0, 400, (int(n),), generator=generator) for n in lengths]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    slots = torch.tensor([cache.acquire(r.numpy().astype(np.int32), None)[0] for r in rows])
    with torch.inference_mode():
        starts = torch.zeros_like(lengths)
        logits = model.forward(weights, cache, padded, slots, starts, lengths, num_seen=127)
        for step in range(8):
            expected = torch.stack([reference(row[None]).logits[0, -1] for row in rows])
            assert (logits - expected).abs().max() <= 1e-5, f"step {step}"
            new = torch.randint(0, 400, (3,), generator=generator)
            rows = [torch.cat((row, token[None])) for row, token in zip(rows, new, strict=True)]
            starts = lengths + step
            cache.reserve(int(starts.max()) + 1)
            logits = model.forward(
                weights,
                cache,
                new[:, None],
                slots,
                starts,
                torch.ones_like(lengths),
                num_seen=int(starts.max()) + 1,
            )


def test_unsupported_features_are_refused(tmp_path: Path) -> None:
    """An architecture or rope scaling that is not computed is a clear error."""
    base = '{"architectures": ["%s"], "rope_scaling": %s}'
    for architecture, scaling, sentence in (
        ("GPT2LMHeadModel", "null", "architectures='GPT2LMHeadModel'"),
        ("LlamaForCausalLM", '{"rope_type": "yarn"}', "rope_type='yarn'"),
    ):
        (tmp_path / "config.json").write_text(base % (architecture, scaling))
        with pytest.raises(SettingsError, match=sentence):
            read_config(tmp_path)


def test_a_folder_that_lacks_tensors_is_refused(make_model: Callable[..., Path]) -> None:
    """Names that are missing are an error, not zeros."""
    untied = read_config(make_model(tied=False))
    with pytest.raises(SettingsError, match="lm_head.weight"):
        load_weights(untied, make_model(tied=True), dtype=torch.float32, device=CPU)
