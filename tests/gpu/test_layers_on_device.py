"""The trainer's layers on a GPU, Transformer Engine's where importable; `make gpu-check` runs this.

What trainer.layers = "auto" chooses there is tested, and local layers with padded attention.
"""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from outloop.buffer.settings.trainer import TrainerSettings

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
LENGTHS = [7, 33, 1, 24, 24, 90]
MAX_GAP = {"local": 1e-3, "local_varlen": 6e-2, "transformer_engine": 6e-2}
"""Of logits up to 3.5, which attention in bfloat16 moves by 0.026 on a CPU; "local" is float32
throughout: see MAX_LOGIT_DIFFERENCE in test_device.py."""
Build = Callable[[Path], Any]


@pytest.fixture(params=["auto", "local"])
def settings(request: pytest.FixtureRequest) -> TrainerSettings:
    """Of a trainer on the GPU that chooses its layers, and of one with padded attention."""
    return TrainerSettings(device="cuda", layers=request.param)


@pytest.fixture
def build(settings: TrainerSettings) -> Iterator[Build]:
    """Make the policy of a folder on the GPU, in a process group of one."""
    torch.set_float32_matmul_precision("highest")
    with warnings.catch_warnings():
        # megatron-core announces at import what it falls back to without Transformer Engine.
        warnings.simplefilter("ignore")
        from outloop.engine.train.megatron import import_weights, model_and_optimizer
        from outloop.engine.train.megatron.layer_kind import layers_of
    model_and_optimizer.join_process_group(seed=1)

    def make(folder: Path) -> Any:
        config = model_and_optimizer.read_config(folder, {}, layers=layers_of(settings))
        policy = model_and_optimizer.build_policy(config, settings, num_updates=1)
        import_weights.load_huggingface(policy.model, folder)
        return policy

    yield make
    model_and_optimizer.leave_process_group()


def _logits(model: Any, samples: list[Tensor]) -> Tensor:
    from outloop.engine.train.megatron.layers import pack_row

    lengths = [len(sample) for sample in samples]
    row = pack_row(lengths, torch.device("cuda"), layers=model.config.layers)
    everywhere = torch.arange(sum(lengths), device="cuda")
    logits: Tensor = model.logits(model(torch.cat(samples), row, everywhere))
    return logits


@pytest.fixture
def samples() -> list[Tensor]:
    """Of unequal length."""
    torch.manual_seed(3)
    return [torch.randint(0, 300, (length,)).to("cuda") for length in LENGTHS]


def test_a_packed_row_is_its_samples_alone_and_transformers(
    build: Build, make_model: Callable[..., Path], samples: list[Tensor]
) -> None:
    """Logits of a row, of each of its samples in a row of its own, and of transformers agree."""
    import transformers

    folder = make_model()
    model = build(folder).model
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference.to("cuda").eval()
    with torch.no_grad():
        packed = _logits(model, samples)
        alone = torch.cat([_logits(model, [sample]) for sample in samples])
        theirs = torch.cat([reference(sample[None]).logits[0] for sample in samples])
    assert packed.dtype == torch.float32
    assert (packed - alone).abs().max() <= MAX_GAP[model.config.layers]
    assert (packed - theirs).abs().max() <= MAX_GAP[model.config.layers]


def test_no_sample_sees_another(
    build: Build, make_model: Callable[..., Path], samples: list[Tensor]
) -> None:
    """Changing one sample of a row leaves the logits of those before and behind as they were."""
    model = build(make_model()).model
    changed = [*samples]
    changed[1] = (changed[1] + 1) % 300
    with torch.no_grad():
        before, after = _logits(model, samples), _logits(model, changed)
    gap = (before - after).abs().amax(-1)
    assert torch.cat([gap[:7], gap[40:]]).max() <= 1e-6
    # A thousand times what the others may move by.
    assert gap[7:40].max() > 1e-3


def test_gradients_are_those_of_transformers(
    build: Build, make_model: Callable[..., Path], samples: list[Tensor]
) -> None:
    """Of every parameter, under its Hugging Face name."""
    import transformers

    from outloop.engine.train.megatron.export_weights import Exports

    folder = make_model()
    policy = build(folder)
    policy.zero_grad()
    torch.log_softmax(_logits(policy.wrapped.module, samples), -1)[:, 5].mean().backward()
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference.to("cuda")
    logits = torch.cat([reference(sample[None]).logits[0] for sample in samples])
    torch.log_softmax(logits, -1)[:, 5].mean().backward()
    theirs = {name: parameter.grad for name, parameter in reference.named_parameters()}
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.copy_(parameter.main_grad)
    # Of a tensor's largest. In float32 three passes of the sums of MAX_LOGIT_DIFFERENCE, relative:
    # 72 x 128 x 2^-24 = 5e-4. In bfloat16 attention rounds about 16 values in both layers, forward
    # and backward: 0.0017 sqrt(16) in the root mean square, five times that at the most.
    share = 1e-3 if policy.config.layers == "local" else 5e-2
    exports = Exports(policy.model)
    names = [spec.name for spec in exports.specs]
    for name, ours in zip(names, exports.gather(names), strict=True):
        assert (ours - theirs[name]).abs().max() <= share * theirs[name].abs().max() + 1e-6, name


def test_weights_come_back_bit_equal(build: Build, make_model: Callable[..., Path]) -> None:
    """Hugging Face -> the trainer's layers -> Hugging Face changes no bit and no name."""
    from outloop.engine.train.megatron.export_weights import Exports

    folder = make_model()
    before = load_file(folder / "model.safetensors")
    exports = Exports(build(folder).model)
    names = [spec.name for spec in exports.specs]
    after = {n: t.cpu() for n, t in zip(names, exports.gather(names), strict=True)}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
