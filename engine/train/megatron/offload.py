"""Taking the trainer's tensors off its device while servers use it, and putting them back.

What comes back is bit-equal and lies in the same storages, so that every view of them, Megatron's
buffers included, stays valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import Tensor

from outloop.engine.train.megatron.model_and_optimizer import Policy, optimizer_parts


class Offload:
    """A policy's tensors, and those of frozen models beside it, on the device or away from it."""

    def __init__(self, policy: Policy, *, is_colocated: bool) -> None:
        """With `is_colocated` off, nothing ever leaves."""
        self._trained = [policy]
        self._is_colocated = is_colocated
        self._frozen: list[torch.nn.Module] = []
        self._away: list[tuple[torch.UntypedStorage, Tensor]] = []

    def add_frozen(self, model: torch.nn.Module) -> None:
        """Include a model that is never updated; it leaves and comes back with the policy."""
        self._frozen.append(model)

    def add_trained(self, policy: Policy) -> None:
        """Let a model with an optimizer of its own, a critic, leave and come back too."""
        self._trained.append(policy)

    @property
    def can_leave(self) -> bool:
        """Whether `leave` would do anything."""
        return self._is_colocated and not self._away

    @property
    def is_away(self) -> bool:
        """True while the device holds none of the tensors."""
        return bool(self._away)

    def leave(self) -> None:
        """Copy every storage to the host and free it on the device; does nothing while away."""
        if not self.can_leave:
            return
        for storage in _storages(self._tensors()):
            self._away.append((storage, _host_copy(storage)))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for storage, _ in self._away:
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def come_back(self) -> None:
        """Put everything back where it was; does nothing unless away."""
        for storage, copy in self._away:
            storage.resize_(copy.nbytes)
            _as_bytes(storage).copy_(copy, non_blocking=True)
        if self._away and torch.cuda.is_available():
            torch.cuda.synchronize()
        self._away.clear()

    def _tensors(self) -> Iterator[Tensor]:
        """Weights, gradient buffers, optimizer state and frozen models; some share storages."""
        modules: list[torch.nn.Module] = [*(one.model for one in self._trained), *self._frozen]
        yield from chain.from_iterable(
            chain(module.parameters(), module.buffers()) for module in modules
        )
        for policy in self._trained:
            for buffer in chain(policy.wrapped.buffers, policy.wrapped.expert_parallel_buffers):
                parts = (buffer.grad_data, buffer.param_data)
                yield from (part for part in parts if part is not None)
            for part in optimizer_parts(policy.optimizer):
                for group in part.optimizer.param_groups:
                    yield from group["params"]
                for state in part.optimizer.state.values():
                    yield from (value for value in state.values() if isinstance(value, Tensor))


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Each storage once, in order; empty ones hold nothing to move."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        for part in (tensor, tensor.grad) if tensor.is_leaf else (tensor,):
            if part is not None and part.untyped_storage().nbytes():
                found.setdefault(part.untyped_storage().data_ptr(), part.untyped_storage())
    return list(found.values())


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_copy(storage: torch.UntypedStorage) -> Tensor:
    """The bytes on the host, pinned where that makes the way back faster."""
    data = _as_bytes(storage)
    copy = torch.empty(len(data), dtype=torch.uint8, pin_memory=data.is_cuda)
    copy.copy_(data, non_blocking=True)
    return copy
