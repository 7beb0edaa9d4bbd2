"""The optimizer's weights and moments in the shapes of the parameters, for checkpoints.

Megatron's plain, mixed-precision and distributed optimizers all write the same float32 tensors
under the same names, so that each reads the checkpoints of the others, in any layout and dtype.
Each parameter counts its own updates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

from outloop.engine.train.megatron.model_and_optimizer import Policy, optimizer_parts

_NAMES = ("exp_avg", "exp_avg_sq")
_WEIGHT = "param"
"""Megatron's word for the optimizer's own weights, beside the names of its moments."""


def state_to_save(policy: Policy, *, has_moments: bool) -> dict[str, Any]:
    """Sharded weights of this rank in float32, and its moments.

    Args:
        has_moments: false before the first update, when Adam has none.
    """
    model = policy.model.sharded_state_dict()
    if not has_moments:
        # No update was made yet, so the optimizer's weights are the model's.
        return {"model": _replaced(model, lambda parameter: parameter.detach().float())}
    moments, weights = _optimizer_tensors(policy, model)
    return {
        "model": _replaced(model, lambda p: weights.get(id(p), p.detach())),
        "moments": moments,
    }


def state_to_fill(policy: Policy, *, has_moments: bool) -> dict[str, Any]:
    """Room for what a checkpoint holds."""
    model = policy.model.sharded_state_dict()
    filled = {"model": _replaced(model, _room) if policy.config.bf16 else model}
    if has_moments:
        filled["moments"] = _moments_to_fill(policy, model)
    return filled


def put_state(policy: Policy, state: dict[str, Any], *, num_updates: int) -> None:
    """Give model and optimizers what was read into `state_to_fill`."""
    policy.model.load_state_dict(state["model"])
    policy.take_weights()
    if policy.config.bf16:
        _put_weights(policy, state["model"])
    if num_updates:
        put_moments(policy, state["moments"], num_updates=num_updates)


def _room(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, dtype=torch.float32)


def _replaced(model: dict[str, Any], tensor_of: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The sharded state with other tensors in the parameters' places."""
    found = dict(model)
    for name, entry in model.items():
        if not isinstance(entry, ShardedTensor | ShardedTensorFactory):
            continue
        tensor = tensor_of(entry.data)
        if isinstance(entry, ShardedTensor):
            found[name] = dataclasses.replace(entry, data=tensor, dtype=tensor.dtype)
        else:
            found[name] = dataclasses.replace(entry, data=tensor)
    return found


def _optimizer_tensors(
    policy: Policy, model_state: dict[str, Any]
) -> tuple[dict[str, Any], dict[int, Tensor]]:
    """Sharded moments of every parameter of this rank, and its weights by the parameter's id."""
    found: dict[str, Any] = {}
    weights: dict[int, Tensor] = {}
    sharded = _by_parameter(model_state)
    for number, part in enumerate(optimizer_parts(policy.optimizer)):
        if isinstance(part, DistributedOptimizer):
            # All data-parallel ranks get the whole of it; the first of them writes.
            state = part.sharded_param_state_fully_reshardable(model_state, False, {})
            owned = (p for buffer in part.buffers for p in buffer.param_index_map)
            for parameter, (index, tensors) in zip(owned, state.items(), strict=True):
                found |= {f"{number}.{index}.{name}": tensors[name] for name in _NAMES}
                weights[id(parameter)] = tensors[_WEIGHT].data
            continue
        for index, (parameter, main, _) in enumerate(_owned(part)):
            state = part.optimizer.state[main]
            for name in _NAMES:
                entry = _sharded(sharded(parameter), state[name], name)
                found[f"{number}.{index}.{name}"] = entry
            weights[id(parameter)] = main.detach()
    return found, weights


def _moments_to_fill(policy: Policy, model_state: dict[str, Any]) -> dict[str, Any]:
    """Room for what a checkpoint holds, by this rank's parameter names."""
    found: dict[str, Any] = {}
    sharded = _by_parameter(model_state)
    for parameter_name, parameter in policy.model.named_parameters():
        for name in _NAMES:
            # On the host: whole moments beside the optimizer's own would not fit on a GPU.
            room = torch.zeros_like(parameter, dtype=torch.float32, device="cpu")
            found[f"{parameter_name}.{name}"] = _sharded(sharded(parameter), room, name)
    return found


@torch.no_grad()
def _put_weights(policy: Policy, weights: dict[str, Tensor]) -> None:
    """The optimizers' float32 weights, which the model's were rounded from."""
    names = {id(parameter): name for name, parameter in policy.model.named_parameters()}
    for part in optimizer_parts(policy.optimizer):
        for parameter, main, where in _owned(part):
            main.copy_(weights[names[id(parameter)]].flatten()[where].view_as(main))


def put_moments(policy: Policy, moments: dict[str, Tensor], *, num_updates: int) -> None:
    """Give the optimizers what was read into the room for moments; weights are loaded before."""
    names = {id(parameter): name for name, parameter in policy.model.named_parameters()}
    for part in optimizer_parts(policy.optimizer):
        for parameter, main, where in _owned(part):
            whole = {name: moments[f"{names[id(parameter)]}.{name}"] for name in _NAMES}
            entry = {
                name: tensor.flatten()[where].view_as(main).to(main.device, copy=True)
                for name, tensor in whole.items()
            }
            if _counts_by_parameter(part.optimizer):
                # Adam counts in place: a step shared by all parameters would count once for each.
                entry["step"] = torch.tensor(float(num_updates), device=_step_device(part, main))
            part.optimizer.state[main] = entry
        if not _counts_by_parameter(part.optimizer):
            for group in part.optimizer.param_groups:
                group["step"] = num_updates


def _counts_by_parameter(optimizer: Any) -> bool:
    """torch counts updates in each parameter's state. FusedAdam, Transformer Engine's and Apex',
    counts in the group, where nothing is before its first step: bias correction would begin again.
    """
    return isinstance(optimizer, torch.optim.Adam)


def _step_device(part: Any, main: Tensor) -> torch.device:
    """Where torch's Adam keeps its counter: with the weights if it is fused, else on the host."""
    is_fused = any(group.get("fused") for group in part.optimizer.param_groups)
    return main.device if is_fused else torch.device("cpu")


def _owned(part: Any) -> Iterator[tuple[Tensor, Tensor, slice]]:
    """Model parameter, the tensor that the optimizer updates for it, and which part that is."""
    if isinstance(part, Float16OptimizerWithFloat16Params):
        for ours, theirs in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            for parameter, main in zip(ours, theirs, strict=True):
                yield parameter, main, slice(None)
        return
    if not isinstance(part, DistributedOptimizer):
        for parameter in part.get_parameters():
            yield parameter, parameter, slice(None)
        return
    for parameter, (group, order) in part.model_param_group_index_map.items():
        where = part._get_model_param_range_map(parameter)["param"]
        main = part.optimizer.param_groups[group]["params"][order]
        yield parameter, main, slice(where.start, where.end)


def _by_parameter(model_state: dict[str, Any]) -> Callable[[Tensor], Any]:
    tensors, _ = extract_sharded_tensors_and_factories(model_state)
    found = {id(entry.data): entry for entry in nested_values(tensors)}
    return lambda parameter: found[id(parameter)]


def _sharded(entry: Any, tensor: Tensor, name: str) -> Any:
    return make_sharded_optimizer_tensor(entry, tensor, prefix=f"optimizer.state.{name}")
