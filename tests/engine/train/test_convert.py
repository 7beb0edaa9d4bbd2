"""`outloop convert`: Hugging Face to Megatron and back, within a bound on memory."""

import gc
import json
import os
import pickle
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from megatron.core import dist_checkpointing
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

from fakes.families import make_family
from outloop.buffer.errors import SettingsError
from outloop.buffer.records import CheckpointMark
from outloop.buffer.settings import TrainerSettings
from outloop.cli.convert import convert
from outloop.engine.train.checkpoint.async_writer import Shards, ShardStrategy, save_checkpoint
from outloop.engine.train.checkpoint.checkpoint_format import load_checkpoint, read_checkpoint
from outloop.engine.train.checkpoint.convert import to_huggingface, to_megatron
from outloop.engine.train.data.samples import Sample
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.megatron.export_weights import Exports
from outloop.engine.train.megatron.model_and_optimizer import Policy
from outloop.engine.train.step.policy_update import rl_update

TinyFolder = Callable[..., Path]


def exported(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the policy under its Hugging Face name."""
    exports = Exports(policy.model)
    names = [spec.name for spec in exports.specs]
    return zip(names, exports.gather(names), strict=True)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder, sharded or not."""
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def assert_equal_tensors(first: Path, second: Path) -> None:
    """Same names, same dtypes, same bits."""
    before, after = tensors_of(first), tensors_of(second)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype, name
        assert torch.equal(tensor, after[name]), name


@pytest.mark.medium
@pytest.mark.parametrize(
    ("kind", "tied"),
    [
        ("qwen3", True),
        ("llama3", False),
        ("qwen2", True),
        ("smollm2", True),
        ("qwen3_moe", False),
    ],
)
def test_there_and_back_is_bit_equal(
    kind: str, tied: bool, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    """Through the command, in several files with an index; transformers reads what comes back."""
    source = tiny_folder(kind, tied=tied)
    there, back = tmp_path / "megatron", tmp_path / "back"
    for arguments in ([source, there], [there, back, "--max-shard-gb", "0.0002"]):
        answer = CliRunner().invoke(convert, [str(argument) for argument in arguments])
        assert answer.exit_code == 0, answer.output
    assert_equal_tensors(source, back)
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert index["weight_map"].keys() == tensors_of(source).keys()
    model = transformers.AutoModelForCausalLM.from_pretrained(back)
    assert sum(p.numel() for p in model.parameters()) > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "megatron"]


@pytest.mark.medium
def test_bfloat16_comes_back_bit_equal(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """The checkpoint holds float32, which holds every bfloat16."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder())
    model.to(torch.bfloat16).save_pretrained(tmp_path / "in")
    to_megatron(tmp_path / "in", tmp_path / "megatron")
    to_huggingface(tmp_path / "megatron", tmp_path / "out")
    assert tensors_of(tmp_path / "out")["model.norm.weight"].dtype == torch.bfloat16
    assert_equal_tensors(tmp_path / "in", tmp_path / "out")


def test_the_trainer_loads_what_was_converted(
    make_policy: Callable[..., Policy], tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    """A policy with other weights has the folder's after it."""
    to_megatron(tiny_folder(), tmp_path / "step_0")
    policy = make_policy()
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.zero_()
    load_checkpoint(policy, read_checkpoint(tmp_path / "step_0"))
    want = tensors_of(tiny_folder())
    for name, tensor in exported(policy):
        assert torch.equal(tensor, want[name]), name


def test_a_runs_checkpoint_becomes_a_folder(
    make_policy: Callable[..., Policy],
    make_samples: Callable[..., list[Sample]],
    tiny_folder: TinyFolder,
    tmp_path: Path,
) -> None:
    """Its optimizer state is left out; the weights are those of the trainer's own export."""
    policy = make_policy(learning_rate=1e-2)
    rl_update(
        policy,
        TrainBatch.of(make_samples(5)),
        TrainerSettings(),
        policy_version=0,
        on_microbatch=lambda: None,
    )
    mark = CheckpointMark(fence=1, group_ids=(), next_slot=0, policy_version=1)
    path = save_checkpoint(policy, tmp_path, step=1, mark=mark, keep=1)
    with pytest.raises(SettingsError, match="--config"):
        to_huggingface(path, tmp_path / "hf")
    to_huggingface(path, tmp_path / "hf", config=tiny_folder())
    Exports(policy.model).save(tmp_path / "exported", source=tiny_folder())
    assert_equal_tensors(tmp_path / "exported", tmp_path / "hf")


def renamed(tensors: dict[str, torch.Tensor], old: str, new: str) -> dict[str, torch.Tensor]:
    """With one name changed."""
    return {new if name == old else name: tensor for name, tensor in tensors.items()}


def test_unknown_and_missing_names_list_the_nearest(
    make_policy: Callable[..., Policy], tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    """In both directions, before OUT is begun."""
    state = make_policy().model.sharded_state_dict()
    for name, entry in state.items():
        if name.startswith("decoder.layers") and name.endswith("linear_proj.weight"):
            entry.key = entry.key.replace("linear_proj", "linear_projection")
    (tmp_path / "other").mkdir()
    strategy = ShardStrategy(WritesAtOnce(tmp_path / "other"))
    dist_checkpointing.save(state, str(tmp_path / "other"), sharded_strategy=strategy)
    with pytest.raises(SettingsError, match=r"lacks 1 .*linear_proj.weight.*linear_projection"):
        to_huggingface(tmp_path / "other", tmp_path / "out", config=tiny_folder())
    to_megatron(tiny_folder("qwen3"), tmp_path / "qwen3")
    llama = tiny_folder("llama", tied=True)
    with pytest.raises(SettingsError, match=r"has no place for.*k_layernorm"):
        to_huggingface(tmp_path / "qwen3", tmp_path / "out", config=llama)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.writing").exists()


class WritesAtOnce(Shards):
    """As another program would write a checkpoint: without our files around it."""

    def finish(self, metadata: object, results: list) -> None:  # type: ignore[type-arg]
        """Everything now."""
        super().finish(metadata, results)  # type: ignore[arg-type]
        self.complete([self.write()])


def test_what_cannot_be_converted_is_refused(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """An OUT that is there, and a SOURCE that is neither of the two."""
    with pytest.raises(SettingsError, match="is there already"):
        to_megatron(tiny_folder(), tmp_path)
    answer = CliRunner().invoke(convert, [str(tmp_path), str(tmp_path / "out")])
    assert isinstance(answer.exception, SettingsError)
    assert "neither a Hugging Face folder" in str(answer.exception)


class Hostile:
    """An object whose reading calls a function."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("function", [os.mkdir, getattr, torch.load, subprocess.Popen, eval])
def test_a_hostile_checkpoint_runs_no_code(
    function: Callable[..., object], tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    """Its index names a function; the conversion refuses it, and nothing was called."""
    to_megatron(tiny_folder(), tmp_path / "given")
    made = tmp_path / "made"
    arguments: dict[Any, tuple[object, ...]] = {
        getattr: (Hostile(os.mkdir, str(made)), "real"),
        subprocess.Popen: (["mkdir", str(made)],),
        eval: (f"__import__('os').mkdir({str(made)!r})",),
    }
    hostile = Hostile(function, *arguments.get(function, (str(made),)))
    (tmp_path / "given/shards/.metadata").write_bytes(pickle.dumps({"weights": hostile}))
    with pytest.raises(SettingsError, match="which no index needs"):
        to_huggingface(tmp_path / "given", tmp_path / "out")
    assert not made.exists()
    assert not (tmp_path / "out").exists()


def test_an_index_names_only_files_beside_it(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """A checkpoint that was given does not decide which of this machine's files are read."""
    to_megatron(tiny_folder(), tmp_path / "given")
    path = tmp_path / "given/shards/.metadata"
    index = pickle.loads(path.read_bytes())
    for info in index.storage_data.values():
        info.relative_path = "../../" + info.relative_path
    path.write_bytes(pickle.dumps(index))
    with pytest.raises(SettingsError, match="files beside it are allowed"):
        to_huggingface(tmp_path / "given", tmp_path / "out")


@pytest.mark.parametrize("content", [b"", b"rubbish", pickle.dumps([1]), b"\x80\x04" + b"(" * 999])
def test_an_index_that_is_none_is_one_sentence(
    content: bytes, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    """Whatever lies in its place."""
    to_megatron(tiny_folder(), tmp_path / "given")
    (tmp_path / "given/shards/.metadata").write_bytes(content)
    with pytest.raises(SettingsError, match="checkpoint index"):
        to_huggingface(tmp_path / "given", tmp_path / "out")


def live_bytes() -> int:
    """Of every tensor with memory behind it that was made since gc.freeze, each storage once."""
    gc.collect()
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
            found[thing.data_ptr()] = max(found.get(thing.data_ptr(), 0), thing.nbytes)
    return sum(found.values())


class LiveBytes(TorchFunctionMode):
    """Notes how many bytes live after each function of torch that makes a large tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.num_bytes = 0
        """Of all tensors that were made."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if type(result) is torch.Tensor and result.nbytes >= 16_384:
            self.num_bytes += result.nbytes
            self.seen.append(live_bytes())
        return result


@pytest.mark.medium
def test_a_conversion_never_holds_the_model(tmp_path: Path) -> None:
    """Both ways at most a fifth of the weights lives at any time, though each passes through."""
    make_family("llama", tmp_path / "in", is_tied=True, num_hidden_layers=12)
    num_bytes = (tmp_path / "in/model.safetensors").stat().st_size
    gc.freeze()
    try:
        with LiveBytes() as there:
            to_megatron(tmp_path / "in", tmp_path / "megatron")
        with LiveBytes() as back:
            to_huggingface(tmp_path / "megatron", tmp_path / "back")
    finally:
        gc.unfreeze()
    for way in (there, back):
        assert way.num_bytes >= num_bytes
        assert 0 < max(way.seen) < num_bytes / 5
    assert_equal_tensors(tmp_path / "in", tmp_path / "back")
