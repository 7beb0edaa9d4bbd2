"""Weight updates of one model: staged apart, then swapped in whole.

`live` is never written, and a session that did not end changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from outloop.engine.publish.verification.checksum import Algorithm
from outloop.engine.serve.torch_server.weights import Weights, WeightsRefused, read_folder


class UpdateRefused(Exception):
    """The call does not fit the session's state; HTTP 400."""


class UpdateSession:
    """begin -> any number of writes -> end. Used from the engine's thread only."""

    def __init__(self, live: Weights) -> None:
        self.live = live
        self._device: torch.device | None = None
        """Where weights were before they were given back."""
        self._spare: Weights | None = None
        self._staged: Weights | None = None
        self._written: set[str] = set()

    def begin(self) -> None:
        """Open a session; tensors it does not bring keep their values.

        Raises:
            UpdateRefused: one is open, or the memory of the weights is released.
        """
        self._require_memory("begin_weight_update")
        if self._staged is not None:
            raise UpdateRefused(
                "begin_weight_update: a session is open; end it with end_weight_update first"
            )
        self._staged = self._fresh()
        self._written = set()

    def require_open(self) -> None:
        """Refuse what needs a session.

        Raises:
            UpdateRefused: no session is open.
        """
        if self._staged is None:
            raise UpdateRefused(
                "weights must be updated between begin_weight_update and end_weight_update"
            )

    def write(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Stage tensors.

        Raises:
            UpdateRefused: no session is open.
            WeightsRefused: a name or shape that is not this model's.
        """
        self.require_open()
        assert self._staged is not None
        for name, tensor in named_tensors:
            self._staged.write(name, tensor)
            self._written.add(name)
        if self.live.device.type == "cuda":
            # After the answer the sender may write there again, so the copies must be complete.
            torch.cuda.current_stream(self.live.device).synchronize()

    def end(self) -> None:
        """Make the staged set live.

        Raises:
            UpdateRefused: no session is open.
        """
        if self._staged is None:
            raise UpdateRefused(
                "end_weight_update: no session is open; start one with begin_weight_update"
            )
        staged, self._staged = self._staged, None
        staged.copy_from(self.live, staged.named.keys() - self._written)
        self._swap(staged)

    def load(self, folder: Path) -> None:
        """Make the weights of a Hugging Face folder live; on an error the old ones stay.

        Raises:
            UpdateRefused: a session is open, or the memory of the weights is released.
            WeightsRefused: the folder does not hold this model.
        """
        self._require_memory("update_weights_from_disk")
        if self._staged is not None:
            raise UpdateRefused(
                "update_weights_from_disk: a session is open; end it with end_weight_update first"
            )
        fresh = self._fresh()
        try:
            read_folder(fresh, folder)
        except WeightsRefused:
            self._spare = fresh
            raise
        self._swap(fresh)

    def scramble(self) -> None:
        """Make random weights live: whatever the next update does not bring will show.

        Raises:
            UpdateRefused: the memory of the weights is released.
        """
        self._require_memory("reset_tensors")
        fresh = self._fresh()
        for tensor in fresh.named.values():
            tensor.uniform_()
        self._swap(fresh)

    def checksums(self, algorithm: Algorithm) -> dict[str, str]:
        """Of every live tensor.

        Raises:
            UpdateRefused: the memory of the weights is released.
        """
        self._require_memory("checksum")
        return self.live.checksums(algorithm)

    def give_back(self) -> None:
        """Free the memory of all weights; an update that was open is forgotten."""
        live = self.live
        self._device = live.device
        self._staged = self._spare = None
        self.live = Weights(live.config, live.dtype, torch.device("meta"))

    def take_again(self) -> None:
        """Allocate what was given back; no value is what it was, and each is NaN until it is
        updated."""
        assert self._device is not None
        fresh = Weights(self.live.config, self.live.dtype, self._device)
        for tensor in fresh.named.values():
            tensor.fill_(torch.nan)
        self.live = fresh

    def _require_memory(self, what: str) -> None:
        if self.live.device.type == "meta":
            raise UpdateRefused(
                f"{what}: the memory of the weights is released; resume_memory_occupation first"
            )

    def _fresh(self) -> Weights:
        spare, self._spare = self._spare, None
        return spare or Weights(self.live.config, self.live.dtype, self.live.device)

    def _swap(self, fresh: Weights) -> None:
        fresh.refresh()
        self.live, self._spare = fresh, self.live
