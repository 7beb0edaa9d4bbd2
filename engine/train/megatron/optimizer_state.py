"""Adam's moments in the shapes of the parameters, whichever optimizer keeps them.

Owns: taking them out of Megatron's plain and distributed optimizers for a checkpoint, and putting
them back. Does not own: the checkpoint (checkpoint). Invariant: both optimizers write the same
tensors under the same names, so a checkpoint of one is read by the other, in any layout; each
parameter counts its own updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from outloop.engine.train.megatron.model_and_optimizer import Policy

_NAMES = ("exp_avg", "exp_avg_sq")


def moments_to_save(policy: Policy, model_state: dict[str, Any]) -> dict[str, Any]:
    """Sharded moments of every parameter of this rank."""
    found: dict[str, Any] = {}
    sharded = _by_parameter(model_state)
    for number, part in enumerate(_parts(policy)):
        if isinstance(part, DistributedOptimizer):
            # All data-parallel ranks get the whole of it; the first of them writes.
            state = part.sharded_param_state_fully_reshardable(model_state, False, {})
            for index, tensors in state.items():
                found |= {f"{number}.{index}.{name}": tensors[name] for name in _NAMES}
            continue
        for index, parameter in enumerate(part.get_parameters()):
            state = part.optimizer.state[parameter]
            for name in _NAMES:
                entry = _sharded(sharded(parameter), state[name], name)
                found[f"{number}.{index}.{name}"] = entry
    return found


def moments_to_fill(policy: Policy, model_state: dict[str, Any]) -> dict[str, Any]:
    """Room for what a checkpoint holds, by this rank's parameter names."""
    found: dict[str, Any] = {}
    sharded = _by_parameter(model_state)
    for parameter_name, parameter in policy.model.named_parameters():
        for name in _NAMES:
            room = torch.zeros_like(parameter)
            found[f"{parameter_name}.{name}"] = _sharded(sharded(parameter), room, name)
    return found


def put_moments(policy: Policy, moments: dict[str, Tensor], *, num_updates: int) -> None:
    """Give the optimizers what was read into `moments_to_fill`; weights are loaded before."""
    names = {id(parameter): name for name, parameter in policy.model.named_parameters()}
    for part in _parts(policy):
        for parameter, main, where in _owned(part):
            whole = {name: moments[f"{names[id(parameter)]}.{name}"] for name in _NAMES}
            entry = {name: t.flatten()[where].view_as(main).clone() for name, t in whole.items()}
            if _counts_by_parameter(part.optimizer):
                # Adam counts in place: a step shared by all parameters would count once for each.
                entry["step"] = torch.tensor(float(num_updates), device=_step_device(part, main))
            part.optimizer.state[main] = entry
        if not _counts_by_parameter(part.optimizer):
            for group in part.optimizer.param_groups:
                group["step"] = num_updates


def _counts_by_parameter(optimizer: Any) -> bool:
    """torch counts updates in each parameter's state. FusedAdam, Transformer Engine's and Apex',
    counts in the group, where nothing is before its first step: bias correction would begin anew.
    """
    return isinstance(optimizer, torch.optim.Adam)


def _step_device(part: Any, main: Tensor) -> torch.device:
    """Where torch's Adam keeps its counter: with the weights if it is fused, else on the host."""
    is_fused = any(group.get("fused") for group in part.optimizer.param_groups)
    return main.device if is_fused else torch.device("cpu")


def _owned(part: Any) -> Iterator[tuple[Tensor, Tensor, slice]]:
    """Model parameter, the tensor that the optimizer updates for it, and which part that is."""
    if not isinstance(part, DistributedOptimizer):
        for parameter in part.get_parameters():
            yield parameter, parameter, slice(None)
        return
    for parameter, (group, order) in part.model_param_group_index_map.items():
        where = part._get_model_param_range_map(parameter)["param"]
        main = part.optimizer.param_groups[group]["params"][order]
        yield parameter, main, slice(where.start, where.end)


def _parts(policy: Policy) -> list[Any]:
    """Dense and expert parameters may have optimizers of their own; a stage may lack either."""
    parts = getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])
    return [part for part in parts if not getattr(part, "is_stub_optimizer", False)]


def _by_parameter(model_state: dict[str, Any]) -> Callable[[Tensor], Any]:
    tensors, _ = extract_sharded_tensors_and_factories(model_state)
    found = {id(entry.data): entry for entry in nested_values(tensors)}
    return lambda parameter: found[id(parameter)]


def _sharded(entry: Any, tensor: Tensor, name: str) -> Any:
    return make_sharded_optimizer_tensor(entry, tensor, prefix=f"optimizer.state.{name}")
