"""The weight table and the model: parity with Hugging Face, both directions."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import TrainerSettings
from outloop.engine.train.data.samples import Sample
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.megatron import import_weights, model_and_optimizer
from outloop.engine.train.megatron.export_weights import Exports
from outloop.engine.train.megatron.layers import pack_row
from outloop.engine.train.step.policy_update import sft_update

TinyFolder = Callable[..., Path]
FAMILIES = pytest.mark.parametrize(
    ("kind", "tied"),
    [
        ("qwen3", True),
        ("qwen3", False),
        ("llama", False),
        ("llama3", False),
        ("qwen2", True),
        ("smollm2", True),
        ("qwen3_moe", False),
        ("glm4_moe", False),
    ],
)


def exported(policy: model_and_optimizer.Policy) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the policy under its Hugging Face name."""
    exports = Exports(policy.model)
    names = [spec.name for spec in exports.specs]
    return zip(names, exports.gather(names), strict=True)


def load(folder: Path) -> model_and_optimizer.PolicyModel:
    """The folder's model on Megatron-core."""
    model = model_and_optimizer.PolicyModel(model_and_optimizer.read_config(folder, {}))
    import_weights.load_huggingface(model, folder)
    return model


@pytest.mark.medium
@FAMILIES
def test_logits_agree_with_transformers(kind: str, tied: bool, tiny_folder: TinyFolder) -> None:
    """Packed samples of unequal length give the logits that transformers gives each alone."""
    folder = tiny_folder(kind, tied=tied)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
    lengths = [7, 33, 1, 24, 24, 90]
    samples = [torch.randint(0, 400, (length,)) for length in lengths]
    row = pack_row(lengths, torch.device("cpu"))
    with torch.no_grad():
        model = load(folder)
        ours = model.logits(model(torch.cat(samples), row, torch.arange(sum(lengths))))
        theirs = torch.cat([reference(sample[None]).logits[0] for sample in samples])
    assert (ours - theirs).abs().max() <= 1e-5


@pytest.mark.medium
@FAMILIES
def test_gradients_agree_with_transformers(
    kind: str, tied: bool, tiny_folder: TinyFolder, make_samples: Callable[..., list[Sample]]
) -> None:
    """The cross-entropy gradient of packed samples, by Hugging Face name."""
    folder = tiny_folder(kind, tied=tied)
    samples = make_samples(6)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
    count = sum(sample.num_trained_tokens for sample in samples)
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids).long()
        logprobs = torch.log_softmax(reference(ids[None]).logits[0, :-1], -1)
        sampled = logprobs.gather(1, ids[1:, None])[:, 0]
        (-sampled[torch.from_numpy(sample.loss_mask[1:])].sum() / count).backward()
    settings = TrainerSettings(max_grad_norm=1e9, max_microbatch_tokens=60)
    policy = model_and_optimizer.build_policy(
        model_and_optimizer.read_config(folder, {}), settings, num_updates=1
    )
    import_weights.load_huggingface(policy.model, folder)
    sft_update(policy, TrainBatch.of(samples), settings)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.copy_(parameter.main_grad)
    theirs = {
        # None: an expert that no token went to.
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in reference.named_parameters()
    }
    for name, ours in exported(policy):
        if name.endswith("e_score_correction_bias"):
            # A buffer, which an update leaves as it was.
            assert torch.equal(ours, reference.get_buffer(name)), name
            continue
        scale = theirs[name].abs().max()
        assert (ours - theirs[name]).abs().max() <= 1e-4 * scale + 1e-8, name


@FAMILIES
def test_import_then_export_is_bit_equal(
    kind: str, tied: bool, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    """Hugging Face -> Megatron -> Hugging Face changes no bit and no name."""
    folder = tiny_folder(kind, tied=tied)
    Exports(load(folder)).save(tmp_path / "out", source=folder)
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out") is not None


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe"])
def test_an_updated_mixture_is_exported_as_it_is(
    kind: str,
    tiny_folder: TinyFolder,
    make_samples: Callable[..., list[Sample]],
    tmp_path: Path,
) -> None:
    """After an update transformers finds the trainer's logprobs in the folder that it exported."""
    folder = tiny_folder(kind, tied=False)
    samples = make_samples(6)
    settings = TrainerSettings(max_microbatch_tokens=60, learning_rate=1e-2)
    policy = model_and_optimizer.build_policy(
        model_and_optimizer.read_config(folder, {}), settings, num_updates=1
    )
    import_weights.load_huggingface(policy.model, folder)
    policy.take_weights()
    sft_update(policy, TrainBatch.of(samples), settings)
    Exports(policy.model).save(tmp_path / "out", source=folder)
    row = pack_row([50], torch.device("cpu"))
    ids = torch.randint(0, 400, (50,))
    with torch.no_grad():
        ours = policy.model.logits(policy.model(ids, row, torch.arange(50))).log_softmax(-1)
        before, after = (
            transformers.AutoModelForCausalLM.from_pretrained(f)(ids[None])
            .logits[0]
            .log_softmax(-1)
            for f in (folder, tmp_path / "out")
        )
    assert (ours - after).abs().max() <= 1e-5
    assert (ours - before).abs().max() > 0.1


def test_a_bias_of_a_bfloat16_folder_stays_in_float32(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    """The correction bias of GLM's routers is not rounded on its way through the trainer; layers
    that predict further tokens are left out."""
    folder = tiny_folder("glm4_moe", tied=False)
    tensors = load_file(folder / "model.safetensors")
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    given = {name: t if name == bias else t.bfloat16() for name, t in tensors.items()}
    given["model.layers.2.eh_proj.weight"] = torch.ones(64, 128, dtype=torch.bfloat16)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_nextn_predict_layers": 1, "torch_dtype": "bfloat16"}
    config.pop("dtype", None)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/config.json").write_text(json.dumps(config))
    save_file(given, tmp_path / "in/model.safetensors", metadata={"format": "pt"})
    model = model_and_optimizer.PolicyModel(
        model_and_optimizer.read_config(tmp_path / "in", {}, dtype="bfloat16")
    )
    import_weights.load_huggingface(model, tmp_path / "in")
    Exports(model).save(tmp_path / "out", source=tmp_path / "in")
    after = load_file(tmp_path / "out/model.safetensors")
    del given["model.layers.2.eh_proj.weight"]
    assert after.keys() == given.keys()
    assert after[bias].dtype == torch.float32
    assert all(torch.equal(after[name], given[name]) for name in given)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"topk_group": 1, "num_experts_per_tok": 3}, "2 experts for each chosen group"),
        ({"norm_topk_prob": False}, "norm_topk_prob=false"),
    ],
)
def test_routers_of_other_kinds_are_refused(
    change: dict[str, object], sentence: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    """What Megatron-core would compute in another way than transformers."""
    config = json.loads((tiny_folder("glm4_moe", tied=False) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(SettingsError, match=sentence):
        model_and_optimizer.read_config(tmp_path, {}, has_tensors=False)


def test_a_bfloat16_folder_comes_back_bit_equal(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """Training is in float32; the folder keeps the dtype that its configuration names."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder())
    model.to(torch.bfloat16).save_pretrained(tmp_path / "in")
    loaded = load(tmp_path / "in")
    Exports(loaded).save(tmp_path / "out", source=tmp_path / "in")
    before, after = (load_file(tmp_path / f / "model.safetensors") for f in ("in", "out"))
    assert before["model.norm.weight"].dtype == torch.bfloat16
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_attention_never_crosses_samples(tiny_folder: TinyFolder) -> None:
    """Changing one sample of a row leaves the logits of every other sample bit-equal."""
    model = load(tiny_folder())
    lengths = [12, 5, 30]
    row = pack_row(lengths, torch.device("cpu"))
    ids = torch.randint(0, 400, (sum(lengths),))
    changed = ids.clone()
    changed[12:17] = (changed[12:17] + 1) % 400
    everywhere = torch.arange(sum(lengths))
    with torch.no_grad():
        before, after = (model.logits(model(x, row, everywhere)) for x in (ids, changed))
    untouched = torch.cat([torch.arange(12), torch.arange(17, 47)])
    assert torch.equal(before[untouched], after[untouched])
    assert not torch.equal(before[12:17], after[12:17])


def test_a_missing_tensor_is_named_with_its_neighbours(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    """A folder that lacks a tensor is refused; the nearest names there are listed."""
    folder = tiny_folder()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_projection.weight"] = tensors.pop(
        "model.layers.1.mlp.down_proj.weight"
    )
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(SettingsError, match="down_proj.weight.*nearest.*down_projection"):
        load(tmp_path)


@pytest.mark.medium
def test_a_tensor_without_a_place_is_refused(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """A folder with more tensors than its configuration has places for is refused."""
    folder = tiny_folder()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.7.input_layernorm.weight"] = torch.ones(64)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(SettingsError, match="layers.7"):
        load(tmp_path)


def test_an_unknown_architecture_is_refused(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """The error names the architecture and those that are allowed."""
    config = json.loads((tiny_folder() / "config.json").read_text())
    config["architectures"] = ["MambaForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SettingsError, match="MambaForCausalLM.*Qwen3ForCausalLM"):
        model_and_optimizer.read_config(tmp_path, {})


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("hidden_sise", "did you mean 'hidden_size'"),
        ("hidden_size", "model folder or the trainer decides"),
        ("attention_dropout", "model folder or the trainer decides"),
        ("tensor_model_parallel_size_", "did you mean"),
        ("recompute_granularity", "megatron-core refuses"),
    ],
)
def test_upstream_options_are_checked(name: str, sentence: str, tiny_folder: TinyFolder) -> None:
    """An unknown [trainer.megatron] key, or one that the model decides, is refused."""
    with pytest.raises(SettingsError, match=sentence):
        model_and_optimizer.read_config(tiny_folder(), {name: 1})


def test_an_upstream_option_reaches_megatron(tiny_folder: TinyFolder) -> None:
    """A known [trainer.megatron] key changes Megatron's configuration."""
    config = model_and_optimizer.read_config(tiny_folder(), {"init_method_std": 0.5})
    assert config.init_method_std == 0.5
