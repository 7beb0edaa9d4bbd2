"""Weight updates of one model: staged apart, then swapped in whole.

`live` is never written, and a session that did not end changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from outloop.engine.serve.torch_server.weights import Weights, WeightsRefused, read_folder


class UpdateRefused(Exception):
    """The call does not fit the session's state; HTTP 400."""


class UpdateSession:
    """begin -> any number of writes -> end. Used from the engine's thread only."""

    def __init__(self, live: Weights) -> None:
        self.live = live
        self._spare: Weights | None = None
        self._staged: Weights | None = None
        self._written: set[str] = set()

    def begin(self) -> None:
        """Open a session; tensors it does not bring keep their values.

        Raises:
            UpdateRefused: one is open.
        """
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
            UpdateRefused: a session is open.
            WeightsRefused: the folder does not hold this model.
        """
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
        """Make random weights live: whatever the next update does not bring will show."""
        fresh = self._fresh()
        for tensor in fresh.named.values():
            tensor.uniform_()
        self._swap(fresh)

    def _fresh(self) -> Weights:
        spare, self._spare = self._spare, None
        return spare or Weights(self.live.config, self.live.dtype, self.live.device)

    def _swap(self, fresh: Weights) -> None:
        fresh.refresh()
        self.live, self._spare = fresh, self.live
