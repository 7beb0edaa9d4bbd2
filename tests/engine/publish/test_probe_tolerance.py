"""How much of the probe's tolerance rounding takes: a model in bfloat16 and in float64."""

import math

import pytest
import torch

from outloop.engine.publish.verification.logprob_probe import TOLERANCES, probe_prompts

NUM_LAYERS = 8
DEEPEST = 94
"""Layers of the deepest of the models that outloop trains, Qwen3-235B-A22B."""
LOGIT_STD = 2.6
"""Over the vocabulary, of SmolLM2-135M at the probe's prompts; a random model's would be 0.6."""


@pytest.mark.medium
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rounding_takes_less_than_half_of_the_tolerance(seed: int) -> None:
    """Sums are float32 in both, stored values are rounded: their errors add up as a random walk,
    so a model of other depth has the root of the ratio."""
    import transformers

    hidden = 128
    config = transformers.Qwen3Config(
        vocab_size=2048,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=False,
        initializer_range=0.6 / math.sqrt(hidden),
    )
    torch.manual_seed(seed)
    rounded = transformers.Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        head = rounded.lm_head.weight
        head.mul_(LOGIT_STD / (head.std() * math.sqrt(hidden)))
    rounded.to(torch.bfloat16)
    exact = transformers.Qwen3ForCausalLM(config).eval().double()
    exact.load_state_dict({name: t.double() for name, t in rounded.state_dict().items()})
    ids = torch.tensor(probe_prompts(config.vocab_size))

    def score(model: torch.nn.Module) -> torch.Tensor:
        with torch.inference_mode():
            table = torch.log_softmax(model(ids).logits.double(), -1)
        return table[:, :-1].gather(-1, ids[:, 1:, None])

    gap = float((score(rounded) - score(exact)).abs().mean())
    assert 0 < gap * math.sqrt(DEEPEST / NUM_LAYERS) < TOLERANCES["bfloat16"] / 2
