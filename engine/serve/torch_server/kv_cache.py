"""Keys and values of the tokens that were computed, and which of them can be used again.

A slot's first `length` positions hold the keys and values of `ids[:length]`. A prefix is reused
only under the same salt and only if one set of weights computed all of it.

Shape letters: L layers, N slots, K key/value heads, T capacity in tokens, d head size, k experts of
a token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from outloop.engine.serve.torch_server.config import ModelConfig

_MAX_CACHE_BYTES = 4 << 30
_MIN_CAPACITY = 128
_MIN_REUSED_TOKENS = 8
"""Shorter matches cost more to copy than to compute."""
_NO_SALT = -1
_MAX_SALTS = 4096


class KVCache:
    """Slots of keys and values; capacity in tokens grows as sequences do."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_running: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        heads = config.num_layers * config.num_kv_heads * config.head_dim
        bytes_per_slot = 2 * heads * max_tokens * dtype.itemsize
        self.max_running = max(1, min(max_running, _MAX_CACHE_BYTES // bytes_per_slot))
        self.max_tokens = max_tokens
        num_slots = max(
            self.max_running, min(2 * self.max_running, _MAX_CACHE_BYTES // bytes_per_slot)
        )
        self._shape = (config.num_layers, num_slots, config.num_kv_heads, config.head_dim)
        self._top_k = config.routing[1] if config.routing is not None else 0
        self._dtype = dtype
        self._device = device
        self._allocate()
        self.length: npt.NDArray[np.int64] = np.zeros(num_slots, dtype=np.int64)
        self._ids: npt.NDArray[np.int32] = np.zeros((num_slots, max_tokens), dtype=np.int32)
        self._salt: npt.NDArray[np.int64] = np.full(num_slots, _NO_SALT, dtype=np.int64)
        self._used_at: npt.NDArray[np.int64] = np.zeros(num_slots, dtype=np.int64)
        self._is_running: npt.NDArray[np.bool_] = np.zeros(num_slots, dtype=np.bool_)
        self._clock = 0
        self._salts: dict[str | None, int] = {}

    def _allocate(self) -> None:
        num_layers, num_slots, num_heads, size = self._shape
        self.capacity = min(_MIN_CAPACITY, self.max_tokens) + 1
        # Zeros, not empty: what is masked out must still be finite.
        shape = (num_layers, num_slots, num_heads, self.capacity, size)
        self.keys = torch.zeros(shape, dtype=self._dtype, device=self._device)
        self.values = torch.zeros_like(self.keys)
        """[L, N, K, T, d]; the last position is scratch, where padding is written."""
        self.routes = torch.zeros(
            (num_layers, num_slots, self.capacity, self._top_k),
            dtype=torch.int16,
            device=self._device,
        )
        """[L, N, T, k] int16: experts that the token at a position went to; 0 in dense layers."""

    def give_back(self) -> None:
        """Free the memory of all slots and forget what they held; no request may run."""
        self.keys = self.values = self.keys.new_empty(0)
        self.routes = self.routes.new_empty(0)
        self.length[:] = 0
        self.forget()

    def take_again(self) -> None:
        """Allocate what was given back, empty."""
        self._allocate()

    @property
    def num_slots(self) -> int:
        """Slots in all, running or kept for reuse."""
        return len(self.length)

    def reserve(self, num_tokens: int) -> None:
        """Make room for sequences of `num_tokens`, keeping what is there."""
        if num_tokens < self.capacity:
            return
        grown = self.capacity
        while grown <= num_tokens:
            grown *= 2
        grown = min(grown, self.max_tokens + 1)
        shape = (*self.keys.shape[:3], grown, self.keys.shape[4])
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = torch.zeros(shape, dtype=old.dtype, device=old.device)
            new[..., : self.capacity, :] = old
            setattr(self, name, new)
        routes = self.routes.new_zeros((*self.routes.shape[:2], grown, self.routes.shape[3]))
        routes[:, :, : self.capacity] = self.routes
        self.routes = routes
        self.capacity = grown

    def acquire(self, ids: npt.NDArray[np.int32], extra_key: str | None) -> tuple[int, int]:
        """A slot for a request of `ids` [P], and how many of its tokens need no computing (< P)."""
        if len(self._salts) >= _MAX_SALTS:
            self.forget()
        salt = self._salts.setdefault(extra_key, len(self._salts))
        source, num_cached = self._longest_match(ids, salt)
        self.reserve(len(ids))
        if num_cached and not self._is_running[source] and self.length[source] == num_cached:
            slot = source
        else:
            slot = self._least_recently_used()
            if num_cached and slot != source:
                self.keys[:, slot, :, :num_cached] = self.keys[:, source, :, :num_cached]
                self.values[:, slot, :, :num_cached] = self.values[:, source, :, :num_cached]
                self.routes[:, slot, :num_cached] = self.routes[:, source, :num_cached]
        self._ids[slot, : len(ids)] = ids
        self.length[slot] = num_cached
        self._salt[slot] = salt
        self._is_running[slot] = True
        return slot, num_cached

    def release(self, slot: int) -> None:
        """End the request in `slot`; what it computed stays for reuse until the slot is needed."""
        self._clock += 1
        self._used_at[slot] = self._clock
        self._is_running[slot] = False

    def append(self, slots: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]) -> None:
        """One more id of each slot was computed."""
        self._ids[slots, self.length[slots]] = ids
        self.length[slots] += 1

    def routed_experts(self, slot: int, start: int) -> npt.NDArray[np.int32]:
        """[rows, L, k]: of the computed tokens of a slot from position `start` on."""
        rows = self.routes[:, slot, start : int(self.length[slot])]
        found: npt.NDArray[np.int32] = rows.transpose(0, 1).to("cpu", torch.int32).numpy()
        return found

    def forget(self) -> None:
        """Reuse nothing computed so far: running slots continue, and are not reused afterwards."""
        self._salt[:] = _NO_SALT
        self._used_at[~self._is_running] = 0
        self._salts.clear()

    def _longest_match(self, ids: npt.NDArray[np.int32], salt: int) -> tuple[int, int]:
        """The slot that shares the longest computed prefix, at most all but the last id."""
        limit = len(ids) - 1
        slots = np.flatnonzero(self._salt == salt)
        if limit < _MIN_REUSED_TOKENS or not len(slots):
            return 0, 0
        differs = self._ids[slots, :limit] != ids[:limit]
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), limit)
        common = np.minimum(first, self.length[slots])
        best = int(common.argmax())
        if common[best] < _MIN_REUSED_TOKENS:
            return 0, 0
        return int(slots[best]), int(common[best])

    def _least_recently_used(self) -> int:
        return int(np.where(self._is_running, np.iinfo(np.int64).max, self._used_at).argmin())
