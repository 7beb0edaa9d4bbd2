"""The optimizer's weights and moments in the shapes of the parameters, for checkpoints.

Megatron's plain, mixed-precision and distributed optimizers all write the same float32 tensors
under the same names, so that each reads the checkpoints of the others, in any layout and dtype. Of
the distributed optimizer each data-parallel rank writes and reads its own part: nothing is gathered
for a checkpoint. Each parameter counts its own updates.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

from outloop.engine.train.megatron.model_and_optimizer import Policy, optimizer_parts


def _moments_of(part: Any) -> tuple[str, ...]:
    """Under which names an optimizer holds what it remembers of each parameter."""
    if isinstance(part.optimizer, torch.optim.Muon):
        return ("momentum_buffer",)
    return ("exp_avg", "exp_avg_sq")


def state_to_save(policy: Policy, *, has_moments: bool) -> dict[str, Any]:
    """Sharded weights of this rank in float32, and its moments.

    Of the distributed optimizer each data-parallel rank has its own part of both.

    Args:
        has_moments: false before the first update, when Adam has none.
    """
    model = policy.model.sharded_state_dict()
    sharded = _by_parameter(model)
    weights: dict[int, Any] = {}
    moments: dict[str, Any] = {}
    for number, part in enumerate(optimizer_parts(policy.optimizer)):
        if isinstance(part, DistributedOptimizer):
            # What another rank holds is written there.
            weights |= {id(p): None for buffer in part.buffers for p in buffer.param_index_map}
        for index, (parameter, main, where) in enumerate(_owned(part)):
            entry = sharded(parameter)
            weights[id(parameter)] = _part(entry, main.detach(), where)
            if not has_moments:
                continue
            state = part.optimizer.state[main]
            for name in _moments_of(part):
                moments[f"{number}.{index}.{name}"] = _part(
                    entry, state[name], where, prefix=f"optimizer.state.{name}."
                )
    state = {"model": _replaced(model, lambda entry: weights.get(id(entry.data), entry))}
    return state | {"moments": moments} if has_moments else state


def state_to_fill(policy: Policy, *, has_moments: bool) -> dict[str, Any]:
    """Room for what a checkpoint holds: whole weights, and this rank's part of the moments."""
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


def _room(entry: Any) -> Any:
    # On the host: float32 weights beside the optimizer's own would not fit on a GPU.
    return _of(entry, torch.zeros_like(entry.data, dtype=torch.float32, device="cpu"))


def _replaced(model: dict[str, Any], made: Callable[[Any], Any]) -> dict[str, Any]:
    """The sharded state with other entries in the parameters' places, or none."""
    found = {
        name: made(entry) if isinstance(entry, ShardedTensor | ShardedTensorFactory) else entry
        for name, entry in model.items()
    }
    return {name: entry for name, entry in found.items() if entry is not None}


def _moments_to_fill(policy: Policy, model_state: dict[str, Any]) -> dict[str, Any]:
    """Room for what a checkpoint holds, by this rank's parameter names."""
    found: dict[str, Any] = {}
    sharded = _by_parameter(model_state)
    names = _names(policy)
    for part in optimizer_parts(policy.optimizer):
        for parameter, main, where in _owned(part):
            for name in _moments_of(part):
                room = torch.zeros_like(main, dtype=torch.float32, device="cpu")
                found[f"{names[id(parameter)]}.{name}"] = _part(
                    sharded(parameter), room, where, prefix=f"optimizer.state.{name}."
                )
    return found


@torch.no_grad()
def _put_weights(policy: Policy, weights: dict[str, Tensor]) -> None:
    """The optimizers' float32 weights, which the model's were rounded from."""
    names = _names(policy)
    for part in optimizer_parts(policy.optimizer):
        for parameter, main, where in _owned(part):
            whole = weights[names[id(parameter)]].flatten()
            main.copy_((whole if where is None else whole[where]).view_as(main))


def put_moments(policy: Policy, moments: dict[str, Any], *, num_updates: int) -> None:
    """Give the optimizers what was read into the room for moments; weights are loaded before."""
    names = _names(policy)
    for part in optimizer_parts(policy.optimizer):
        for parameter, main, _ in _owned(part):
            entry = {
                name: _joined(moments[f"{names[id(parameter)]}.{name}"])
                .view_as(main)
                .to(main.device, copy=True)
                for name in _moments_of(part)
            }
            if _counts_by_parameter(part.optimizer):
                # Adam counts in place: a step shared by all parameters would count once for each.
                entry["step"] = torch.tensor(float(num_updates), device=_step_device(part, main))
            part.optimizer.state[main] = entry
        counts_nothing = isinstance(part.optimizer, torch.optim.Muon)
        if not (counts_nothing or _counts_by_parameter(part.optimizer)):
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


def _owned(part: Any) -> Iterator[tuple[Tensor, Tensor, slice | None]]:
    """Model parameter, the tensor that the optimizer updates for it, and which part of the
    flattened parameter that is; None: it is whole, and other ranks may hold the same."""
    if isinstance(part, Float16OptimizerWithFloat16Params):
        for ours, theirs in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            for parameter, main in zip(ours, theirs, strict=True):
                yield parameter, main, None
        return
    if not isinstance(part, DistributedOptimizer):
        for parameter in part.get_parameters():
            yield parameter, parameter, None
        return
    for parameter, (group, order) in part.model_param_group_index_map.items():
        where = part._get_model_param_range_map(parameter)["param"]
        main = part.optimizer.param_groups[group]["params"][order]
        yield parameter, main, slice(where.start, where.end)


def _names(policy: Policy) -> dict[int, str]:
    return {id(parameter): name for name, parameter in policy.model.named_parameters()}


def _by_parameter(model_state: dict[str, Any]) -> Callable[[Tensor], Any]:
    tensors, _ = extract_sharded_tensors_and_factories(model_state)
    found = {id(entry.data): entry for entry in nested_values(tensors)}
    return lambda parameter: found[id(parameter)]


def _of(entry: Any, tensor: Tensor, prefix: str = "") -> Any:
    """A parameter's entry with another tensor of its shape, under another key."""
    if isinstance(entry, ShardedTensorFactory):
        return dataclasses.replace(entry, key=f"{prefix}{entry.key}", data=tensor)
    return dataclasses.replace(entry, key=f"{prefix}{entry.key}", data=tensor, dtype=tensor.dtype)


def _part(entry: Any, tensor: Tensor, where: slice | None, *, prefix: str = "") -> Any:
    """A parameter's entry with what an optimizer holds for it.

    A part of the flattened parameter becomes boxes of it, in order, each of them contiguous in
    both. Nothing but this rank has them, wherever the parameter itself has replicas among
    data-parallel ranks.
    """
    if where is None:
        return _of(entry, tensor, prefix)
    flat = tensor.flatten()
    boxes: dict[str, ShardedTensor] = {}
    for whole in _views(entry):
        begin = whole.data.storage_offset() - entry.data.storage_offset()
        first, last = max(where.start, begin), min(where.stop, begin + whole.data.numel())
        for offset, size in _boxes(tuple(whole.data.shape), first - begin, last - begin):
            ones = (1,) * whole.prepend_axis_num
            length = math.prod(size)
            held = flat[first - where.start :][:length].view(ones + size)
            first += length
            inner = (0,) * whole.prepend_axis_num + offset
            boxes[str(len(boxes))] = dataclasses.replace(
                whole,
                key=f"{prefix}{whole.key}",
                data=held,
                dtype=held.dtype,
                local_shape=tuple(held.shape),
                global_offset=tuple(map(sum, zip(whole.global_offset, inner, strict=True))),
                # Megatron's sign that parts are of any size.
                axis_fragmentations=None,
                replica_id=(*whole.replica_id[:-1], 0),
                prepend_axis_num=0,
            )
    return boxes


def _views(entry: Any) -> list[ShardedTensor]:
    """What a checkpoint holds of a parameter, as views of it."""
    if not isinstance(entry, ShardedTensorFactory):
        return [entry]
    found: list[ShardedTensor] = list(nested_values(entry.build()))
    assert all(each.data.is_contiguous() for each in found), entry.key
    return sorted(found, key=lambda each: int(each.data.storage_offset()))


def _boxes(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of the boxes that a range of a flattened tensor consists of, in order:
    the end of a row, whole rows, the beginning of one, and so on within a row."""
    if start >= stop:
        return
    if len(shape) < 2:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:
        # Within one row.
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(
    shape: tuple[int, ...], row: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    if start >= math.prod(shape[1:]):
        return
    for offset, size in _boxes(shape[1:], start, stop):
        yield (row, *offset), (1, *size)


def _joined(read: Any) -> Tensor:
    """What was read into a whole tensor, or into the boxes of a part of one."""
    if isinstance(read, Tensor):
        return read.flatten()
    return torch.cat([box.flatten() for box in read.values()])
