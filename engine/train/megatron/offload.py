"""Taking the trainer's tensors off its device while servers use it, and putting them back.

What comes back is bit-equal and lies in the same storages, so that every view of them, Megatron's
buffers included, stays valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from outloop.engine.train.megatron.host_memory import host_bytes
from outloop.engine.train.megatron.model_and_optimizer import Policy, optimizer_parts


class Offload:
    """A policy's tensors, and those of models beside it, on the device or away from it.

    Weights alone may stay, or come back, for a publish. Gradients are not copied: every update
    begins with zeros.
    """

    def __init__(self, policy: Policy, *, is_colocated: bool) -> None:
        """With `is_colocated` off, nothing ever leaves."""
        self._policy = policy
        self._trained = [policy]
        self._is_colocated = is_colocated
        self._frozen: list[torch.nn.Module] = []
        self._weights = _Away()
        self._gradients = _Away(is_kept=False)
        self._rest = _Away()
        """Main weights, moments, and all of the other models."""

    def add_frozen(self, model: torch.nn.Module) -> None:
        """Include a model that is never updated; it leaves and comes back with the optimizer."""
        self._frozen.append(model)

    def add_trained(self, policy: Policy) -> None:
        """Let a model with an optimizer of its own, a critic, leave and come back too. A critic's
        head stays: some KiB."""
        self._trained.append(policy)

    @property
    def is_away(self) -> bool:
        """True while the device holds no weights."""
        return self._weights.is_away

    @property
    def has_left(self) -> bool:
        """True while the device holds nothing that is needed for updates alone."""
        return self._rest.is_away

    def can_leave(self, *, keeps_weights: bool = False) -> bool:
        """Whether `leave` would do anything."""
        is_gone = self._rest.is_away and (keeps_weights or self._weights.is_away)
        return self._is_colocated and not is_gone

    def leave(self, *, keeps_weights: bool = False) -> None:
        """Copy to the host and free on the device: everything, or all but the policy's weights."""
        if not self.can_leave(keeps_weights=keeps_weights):
            return
        if not self._rest.is_away:
            weights = _storages(self._weight_tensors())
            gradients = _storages(self._gradient_tensors())
            known = {storage.data_ptr() for storage in (*weights, *gradients)}
            rest = [s for s in _storages(self._other_tensors()) if s.data_ptr() not in known]
            self._rest.leave(rest)
            self._gradients.leave(gradients)
        if not (keeps_weights or self._weights.is_away):
            self._weights.leave(_storages(self._weight_tensors()))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def come_back(self, *, weights_only: bool = False) -> None:
        """Put everything back where it was, or the policy's weights alone."""
        self._weights.come_back()
        if not weights_only:
            self._gradients.come_back()
            self._rest.come_back()

    def _weight_tensors(self) -> Iterator[Tensor]:
        """Of the policy; some share storages."""
        yield from chain(self._policy.model.parameters(), self._policy.model.buffers())
        for buffer in _buffers(self._policy):
            if buffer.param_data is not None:
                yield buffer.param_data

    def _gradient_tensors(self) -> Iterator[Tensor]:
        for policy in self._trained:
            for buffer in _buffers(policy):
                if buffer.grad_data is not None:
                    yield buffer.grad_data
            for parameter in policy.model.parameters():
                if parameter.grad is not None:
                    yield parameter.grad

    def _other_tensors(self) -> Iterator[Tensor]:
        """Optimizer state, the other trained models and the frozen ones."""
        modules: list[torch.nn.Module] = [*(one.model for one in self._trained[1:]), *self._frozen]
        yield from chain.from_iterable(
            chain(module.parameters(), module.buffers()) for module in modules
        )
        for policy in self._trained:
            for buffer in _buffers(policy):
                if buffer.param_data is not None:
                    yield buffer.param_data
            for part in optimizer_parts(policy.optimizer):
                for group in part.optimizer.param_groups:
                    yield from group["params"]
                for state in part.optimizer.state.values():
                    yield from (value for value in state.values() if isinstance(value, Tensor))


class _Away:
    """Storages that leave and come back together."""

    def __init__(self, *, is_kept: bool = True) -> None:
        """`is_kept` off: they come back as zeros."""
        self._is_kept = is_kept
        self._copies: dict[int, Tensor] = {}
        """By place in the list: a host copy is used again on the next journey."""
        self._away: list[tuple[torch.UntypedStorage, int]] = []
        self.is_away = False

    def leave(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Copy, if they are kept, and free."""
        for number, storage in enumerate(storages):
            size = storage.nbytes()
            self._away.append((storage, size))
            if self._is_kept:
                if len(self._copies.get(number, ())) != size:
                    cudart = torch.cuda.cudart() if storage.is_cuda else None
                    self._copies[number] = host_bytes(size, cudart)
                self._copies[number].copy_(_as_bytes(storage), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for storage in storages:
            storage.resize_(0)
        self.is_away = True

    def come_back(self) -> None:
        """Allocate, and copy back or fill with zeros."""
        for number, (storage, size) in enumerate(self._away):
            storage.resize_(size)
            if self._is_kept:
                _as_bytes(storage).copy_(self._copies[number], non_blocking=True)
            else:
                _as_bytes(storage).zero_()
        if self._away and torch.cuda.is_available():
            torch.cuda.synchronize()
        self._away.clear()
        self.is_away = False


def _buffers(policy: Policy) -> list[Any]:
    """Megatron's contiguous buffers of weights and gradients."""
    return [*policy.wrapped.buffers, *policy.wrapped.expert_parallel_buffers]


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Each storage once, in order; empty ones hold nothing to move."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        if tensor.untyped_storage().nbytes():
            found.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
    return list(found.values())


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
