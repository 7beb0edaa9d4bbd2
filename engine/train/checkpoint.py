"""Checkpoints of the trainer.

Owns: `checkpoints/step_N/`: Megatron's distributed format with weights, moments, schedule and
random states, and the mark of what the weights contain. Does not own: when to save, what Redis
makes of the mark (reader), how an optimizer keeps its moments (moments). Invariant: a folder named
step_N is complete or is skipped; an older checkpoint is removed only after a newer one is complete
on disk; what one layout of ranks wrote, any other reads.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from outloop.buffer.errors import SettingsError
from outloop.buffer.records import CheckpointMark
from outloop.engine.train.mcore import Policy, PolicyConfig
from outloop.engine.train.moments import moments_to_fill, moments_to_save, put_moments

SCHEMA = 2
_STATE = "state.json"
_COMPLETE = "COMPLETE"
_log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int
    """Steps of the loop that its weights contain."""
    num_updates: int
    """Optimizer updates in them."""
    mark: CheckpointMark
    model: dict[str, Any]
    """Shape of the model, for refusing another one's checkpoint."""
    reference_hash: str = ""
    """Content hash of the reference model that the run is pinned to; empty: none yet."""
    layout: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of the ranks that wrote it."""


class _SyncTorchDist(SaveShardedStrategy):
    """Writes Megatron's torch_dist format in this process.

    Megatron's own writer starts processes that import the main module again, which costs seconds
    and hangs where that import fails.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Sharded objects travel with the tensors."""
        return True

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        """Write all shards of this rank."""
        flat, _, _ = torch_strategies._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, True
        )
        save_distributed(
            torch_strategies.mcore_to_pyt_state_dict(flat, False),
            storage_writer=FileSystemWriter(
                checkpoint_dir, single_file_per_rank=True, sync_files=True, thread_count=1
            ),
            planner=torch_strategies.MCoreSavePlanner(
                dedup_replicated_tensors=False, flatten_state_dict=False
            ),
        )


def save_checkpoint(
    policy: Policy,
    folder: Path,
    *,
    step: int,
    mark: CheckpointMark,
    keep: int,
    reference_hash: str = "",
) -> Path:
    """Write `folder/step_{step}` and remove all but the newest `keep`.

    Guarantees that the folder appears under its name only when everything in it is on disk.
    """
    final = folder / f"step_{step}"
    temporary = folder / f".step_{step}.writing"
    num_updates = policy.scheduler.num_steps
    is_first = dist.get_rank() == 0
    if is_first:
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / "shards").mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(
        _sharded_state(policy, num_updates=num_updates) | {"random": _random_states()},
        str(temporary / "shards"),
        sharded_strategy=_SyncTorchDist(),
    )
    if is_first:
        state = {
            "schema": SCHEMA,
            "step": step,
            "num_updates": num_updates,
            "mark": dataclasses.asdict(mark),
            "model": _shape(policy.config),
            "reference_hash": reference_hash,
            "layout": dataclasses.asdict(policy.config.sizes),
        }
        (temporary / _STATE).write_text(json.dumps(state, indent=1))
        sizes = {
            str(path.relative_to(temporary)): path.stat().st_size
            for path in sorted(temporary.rglob("*"))
            if path.is_file()
        }
        (temporary / _COMPLETE).write_text(json.dumps(sizes, indent=1))
        for path in (*temporary.rglob("*"), temporary):
            _sync_to_disk(path)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        _sync_to_disk(folder)
        _remove_old(folder, newest=step, keep=keep)
    dist.barrier()
    return final


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """The complete checkpoint with the most steps; incomplete ones are skipped and named."""
    found = sorted(_steps(folder).items(), reverse=True)
    for _, path in found:
        problem = _problem(path)
        if problem is None:
            return read_checkpoint(path)
        _log.warning(
            "checkpoint_skipped",
            sentence=f"checkpoint {path} is incomplete ({problem}); the one before it is used",
        )
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """What a complete checkpoint says of itself.

    Raises:
        SettingsError: another release wrote it.
    """
    state = json.loads((path / _STATE).read_text())
    if state["schema"] != SCHEMA:
        raise SettingsError(
            f"checkpoint {path} has schema={state['schema']}; this release reads {SCHEMA}. Go on "
            "with the release that wrote it, or start a new run.name"
        )
    mark = state["mark"]
    return Checkpoint(
        path=path,
        step=state["step"],
        num_updates=state["num_updates"],
        mark=CheckpointMark(**(mark | {"group_ids": tuple(mark["group_ids"])})),
        model=state["model"],
        reference_hash=state["reference_hash"],
        layout=state["layout"],
    )


def load_checkpoint(policy: Policy, checkpoint: Checkpoint) -> None:
    """Put a checkpoint's weights, moments, schedule position and random states in place.

    Learning rate, decay and betas stay as the settings of this start say. Random states are those
    of the rank's place, so they come back in the layout that wrote them; in another layout they
    stay as this start seeded them.

    Raises:
        SettingsError: the checkpoint is of a model of another shape.
    """
    shape = _shape(policy.config)
    if checkpoint.model != shape:
        other = {k: (v, shape.get(k)) for k, v in checkpoint.model.items() if shape.get(k) != v}
        raise SettingsError(
            f"checkpoint {checkpoint.path} is of another model (checkpoint, model.path): {other}; "
            "start a new run.name, or give the model folder that this run began with"
        )
    is_same_layout = checkpoint.layout == dataclasses.asdict(policy.config.sizes)
    wanted = _sharded_state(policy, num_updates=checkpoint.num_updates, is_loading=True)
    if is_same_layout:
        wanted["random"] = _random_states()
    with warnings.catch_warnings():
        # Megatron 0.16.1 reads through a function that this torch has deprecated.
        warnings.simplefilter("ignore", FutureWarning)
        state = dist_checkpointing.load(wanted, str(checkpoint.path / "shards"))
    policy.model.load_state_dict(state["model"])
    if checkpoint.num_updates:
        put_moments(policy, state["moments"], num_updates=checkpoint.num_updates)
    policy.scheduler.num_steps = 0
    policy.scheduler.step(increment=checkpoint.num_updates)
    if is_same_layout:
        torch.set_rng_state(state["random"]["torch"])
        get_cuda_rng_tracker().set_states(state["random"]["megatron"])


def _random_states() -> ShardedObject:
    """This rank's own."""
    states = {"torch": torch.get_rng_state(), "megatron": get_cuda_rng_tracker().get_states()}
    return ShardedObject("random", states, (dist.get_world_size(),), (dist.get_rank(),))


def _sharded_state(policy: Policy, *, num_updates: int, is_loading: bool = False) -> dict[str, Any]:
    """What Megatron saves, or fills; before the first update Adam has no moments."""
    model = policy.model.sharded_state_dict()
    if num_updates == 0:
        return {"model": model}
    take = moments_to_fill if is_loading else moments_to_save
    return {"model": model, "moments": take(policy, model)}


def _shape(config: PolicyConfig) -> dict[str, Any]:
    return {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.ffn_hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_query_groups,
        "kv_channels": config.kv_channels,
        "vocab_size": config.vocab_size,
        "qk_layernorm": config.qk_layernorm,
        "is_tied": config.is_tied,
        "add_qkv_bias": config.add_qkv_bias,
        "num_moe_experts": config.num_moe_experts,
        "moe_ffn_hidden_size": config.moe_ffn_hidden_size,
    }


def _steps(folder: Path) -> dict[int, Path]:
    names = [path for path in folder.glob("step_*") if path.name[5:].isdecimal()]
    return {int(path.name[5:]): path for path in names}


def _problem(path: Path) -> str | None:
    """Why the checkpoint cannot be used, or None."""
    marker = path / _COMPLETE
    if not marker.is_file():
        return f"{_COMPLETE} is missing"
    for name, size in json.loads(marker.read_text()).items():
        part = path / name
        if not part.is_file() or part.stat().st_size != size:
            return f"{name} is missing or cut off"
    return None


def _remove_old(folder: Path, *, newest: int, keep: int) -> None:
    for step, path in sorted(_steps(folder).items(), reverse=True)[keep:]:
        if step < newest:
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".step_*.writing"):
        shutil.rmtree(path, ignore_errors=True)


def _sync_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
