"""What `checkpoints/step_N/` holds, and reading it.

Megatron's distributed format with weights, optimizer state, schedule and random states, and the
mark of what the weights contain. A folder named step_N is complete or is skipped. An older
checkpoint is removed only after a newer one is complete. Any layout of ranks reads what another
wrote.
"""

from __future__ import annotations

import dataclasses
import json
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
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from outloop.buffer.errors import SettingsError
from outloop.buffer.records import CheckpointMark
from outloop.engine.train.megatron.model_and_optimizer import Policy, PolicyConfig, PolicyModel
from outloop.engine.train.megatron.optimizer_state import put_state, state_to_fill
from outloop.engine.train.megatron.value_head import ValueHead

SCHEMA = 3
STATE = "state.json"
COMPLETE = "COMPLETE"
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
    """What its folder said of it, for refusing another model's checkpoint."""
    reference_hash: str = ""
    """Content hash of the reference model that the run is pinned to; empty: none yet."""
    layout: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Parallel sizes of the ranks that wrote it."""
    critic: dict[str, Any] | None = None
    """What the critic's folder said of it, or a head of itself; None: it holds none."""
    num_critic_updates: int = 0
    """Optimizer updates of the critic."""
    kl_coefficient: float | None = None
    """As trainer.kl_target had moved it; None: it was not written."""
    entropy_coefficient: float | None = None
    """As trainer.entropy_target had moved it; None: it was not written."""
    has_reference: bool = False
    """It holds a reference that follows the policy."""
    optimizer: str = "adam"
    """Whose moments it holds."""


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


def complete_checkpoints(folder: Path) -> list[Checkpoint]:
    """Every complete checkpoint in a folder.

    Raises:
        SettingsError: another release wrote one.
    """
    return [read_checkpoint(path) for path in _steps(folder).values() if _problem(path) is None]


def read_checkpoint(path: Path) -> Checkpoint:
    """What a complete checkpoint says of itself.

    Raises:
        SettingsError: another release wrote it.
    """
    state = json.loads((path / STATE).read_text())
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
        critic=state.get("critic"),
        num_critic_updates=state.get("num_critic_updates", 0),
        kl_coefficient=state.get("kl_coefficient"),
        entropy_coefficient=state.get("entropy_coefficient"),
        has_reference=state.get("has_reference", False),
        optimizer=state.get("optimizer", "adam"),
    )


def check_model(checkpoint: Checkpoint, config: PolicyConfig) -> None:
    """Refuse a checkpoint of another model; needs no process group.

    Raises:
        SettingsError: names what differs.
    """
    if other := _differing(checkpoint.model, config.described):
        raise SettingsError(
            f"checkpoint {checkpoint.path} is of another model (checkpoint, model.path): {other}; "
            "start a new run.name, or give the model folder that this run began with"
        )


def check_critic(checkpoint: Checkpoint, critic: dict[str, Any]) -> None:
    """Refuse a checkpoint without a critic, or with one of another kind or size; needs no process
    group.

    Args:
        critic: that the run wants, as its configuration or `value_head.described` says it.

    Raises:
        SettingsError: names what differs.
    """
    if checkpoint.critic is None:
        raise SettingsError(
            f'checkpoint {checkpoint.path} holds no critic, which trainer.advantage="gae" needs: '
            "it was written with another advantage. Start a new run.name from its weights, or go "
            "on with that advantage"
        )
    written, wanted = (one.get("kind", "model") for one in (checkpoint.critic, critic))
    if written != wanted:
        raise SettingsError(
            f'checkpoint {checkpoint.path} holds a critic of trainer.critic.kind="{written}", and '
            f'the run has trainer.critic.kind="{wanted}"; give the kind that it began with, or '
            "start a new run.name from the checkpoint's weights"
        )
    if other := _differing(checkpoint.critic, critic):
        raise SettingsError(
            f"checkpoint {checkpoint.path} holds a critic of another model (checkpoint, "
            f"trainer.critic.path): {other}; start a new run.name, or give the folder that its "
            "critic began with"
        )


def described_critic(critic: Policy | ValueHead) -> dict[str, Any]:
    """What a checkpoint says of it."""
    return critic.described if isinstance(critic, ValueHead) else critic.config.described


def num_updates_of(critic: Policy | ValueHead) -> int:
    """Its optimizer updates so far."""
    if isinstance(critic, ValueHead):
        return critic.num_updates
    return critic.scheduler.num_steps


def _differing(written: dict[str, Any], described: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = sorted(written.keys() | described.keys())
    pairs = {name: (written.get(name), described.get(name)) for name in names}
    return {name: (before, now) for name, (before, now) in pairs.items() if before != now}


def critic_state(state: dict[str, Any]) -> dict[str, Any]:
    """A critic's sharded state under names of its own, beside the policy's."""
    add_prefix_for_sharding(state, "critic.")
    return state


def reference_state(model: PolicyModel) -> dict[str, Any]:
    """A reference's sharded weights under names of their own, beside the policy's."""
    state: dict[str, Any] = model.sharded_state_dict()
    add_prefix_for_sharding(state, "reference.")
    return state


def load_moved_reference(model: PolicyModel, checkpoint: Checkpoint) -> None:
    """Put the weights of the reference that a checkpoint holds in place."""
    wanted = {"reference": reference_state(model)}
    state = _read(wanted, checkpoint)
    model.load_state_dict(state["reference"])


def load_checkpoint(
    policy: Policy, checkpoint: Checkpoint, *, critic: Policy | ValueHead | None = None
) -> None:
    """Put a checkpoint's weights, moments, schedule position and random states in place.

    Learning rate, decay and betas stay as the settings of this start say. Random states are those
    of the rank's place, so they come back in the layout that wrote them; in another layout they
    stay as this start seeded them.

    Args:
        critic: to be loaded too; None: one that the checkpoint holds is left out.

    Raises:
        SettingsError: the checkpoint is of another model, or holds no critic, or another.
    """
    has_critic_moments = checkpoint.num_critic_updates > 0
    check_model(checkpoint, policy.config)
    if checkpoint.num_updates and checkpoint.optimizer != policy.optimizer_name:
        raise SettingsError(
            f"checkpoint {checkpoint.path} holds the moments of trainer.optimizer="
            f'"{checkpoint.optimizer}", and the run has trainer.optimizer="{policy.optimizer_name}"'
            "; give the optimizer that it began with, or start a new run.name from the "
            "checkpoint's weights"
        )
    if critic is not None:
        check_critic(checkpoint, described_critic(critic))
    is_same_layout = checkpoint.layout == dataclasses.asdict(policy.config.sizes)
    wanted = state_to_fill(policy, has_moments=checkpoint.num_updates > 0)
    if isinstance(critic, ValueHead):
        wanted["critic"] = critic.sharded_state(has_moments=has_critic_moments)
    elif critic is not None:
        wanted["critic"] = critic_state(state_to_fill(critic, has_moments=has_critic_moments))
    if is_same_layout:
        wanted["random"] = random_states()
    state = _read(wanted, checkpoint)
    put_state(policy, state, num_updates=checkpoint.num_updates)
    policy.scheduler.num_steps = 0
    policy.scheduler.step(increment=checkpoint.num_updates)
    if isinstance(critic, ValueHead):
        critic.put_state(state["critic"], num_updates=checkpoint.num_critic_updates)
    elif critic is not None:
        put_state(critic, state["critic"], num_updates=checkpoint.num_critic_updates)
        critic.scheduler.num_steps = 0
        critic.scheduler.step(increment=checkpoint.num_critic_updates)
    if is_same_layout:
        torch.set_rng_state(state["random"]["torch"])
        get_cuda_rng_tracker().set_states(state["random"]["megatron"])


def random_states() -> ShardedObject:
    """This rank's own."""
    states = {"torch": torch.get_rng_state(), "megatron": get_cuda_rng_tracker().get_states()}
    return ShardedObject("random", states, (dist.get_world_size(),), (dist.get_rank(),))


def _steps(folder: Path) -> dict[int, Path]:
    names = [path for path in folder.glob("step_*") if path.name[5:].isdecimal()]
    return {int(path.name[5:]): path for path in names}


def _problem(path: Path) -> str | None:
    """Why the checkpoint cannot be used, or None."""
    marker = path / COMPLETE
    if not marker.is_file():
        return f"{COMPLETE} is missing"
    for name, size in json.loads(marker.read_text()).items():
        part = path / name
        if not part.is_file() or part.stat().st_size != size:
            return f"{name} is missing or cut off"
    return None


def remove_old(folder: Path, *, newest: int, keep: int) -> None:
    """Remove what was begun, and all complete ones but the newest `keep`."""
    for step, path in sorted(_steps(folder).items(), reverse=True)[keep:]:
        if step < newest:
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".step_*.writing"):
        shutil.rmtree(path, ignore_errors=True)


def _read(wanted: dict[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """What a checkpoint holds of the sharded state `wanted`."""
    with warnings.catch_warnings():
        # Megatron reads through functions that this torch has deprecated; from 0.17 on each rank
        # reads by itself what is common, and torch remarks on how.
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        warnings.filterwarnings("ignore", "The argument order of load", UserWarning)
        state: dict[str, Any] = dist_checkpointing.load(wanted, str(checkpoint.path / "shards"))
    return state
