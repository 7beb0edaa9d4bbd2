"""Which experts each token of a turn went to, as compactly as it is stored and trained.

Routing replay (Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and
Inference Routers", arXiv:2510.11370): the trainer sends tokens to the experts that the server sent
them to, so that a logit rounded in another way changes a logprob a little, not the expert.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from outloop.buffer.errors import RecordError, SettingsError

if TYPE_CHECKING:
    from outloop.buffer.settings import Settings

Experts = npt.NDArray[Any]
"""[rows, layers, top_k] uint8 or uint16."""


class RoutingShape(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How many layers, choices and experts a model's routers have.

    Dense layers count too: servers report them, with any experts.
    """

    num_layers: int
    top_k: int
    num_experts: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest type that holds every expert and `unknown`."""
        return np.dtype("<u1" if self.num_experts < 2**8 else "<u2")

    @property
    def unknown(self) -> int:
        """In the place of an expert: the router chooses by itself."""
        return int(np.iinfo(self.dtype).max)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return self.num_layers * self.top_k * self.dtype.itemsize


class RoutedExperts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The experts of successive tokens.

    Of a turn: row n is where the token before the turn's n-th id was sent, so that it helps to
    predict that id. The ids are `prompt_ids` and then `output_ids`; before the first id of a root
    there is no token, and no row.
    """

    shape: RoutingShape
    data: bytes
    """Rows behind each other, each [layers, top_k], of `shape.dtype`."""

    def __post_init__(self) -> None:
        shape = self.shape
        if shape.num_layers < 1 or not 1 <= shape.top_k <= shape.num_experts < 2**16:
            raise RecordError(
                f"routed_experts: {shape} is no mixture of experts; at least a layer, and top_k "
                "from 1 to num_experts are allowed"
            )
        if len(self.data) % shape.row_bytes:
            raise RecordError(
                f"routed_experts: {len(self.data)} bytes are no rows of {shape.row_bytes}"
            )

    @classmethod
    def of(cls, shape: RoutingShape, experts: npt.NDArray[Any]) -> RoutedExperts:
        """Pack experts [rows, layers, top_k]; what is none of the model's becomes unknown."""
        wanted = (shape.num_layers, shape.top_k)
        if experts.shape[1:] != wanted:
            raise RecordError(f"routed_experts: shape {experts.shape}; [rows, *{wanted}] is due")
        is_known = (experts >= 0) & (experts < shape.num_experts)
        data = np.where(is_known, experts, shape.unknown).astype(shape.dtype)
        return cls(shape=shape, data=data.tobytes())

    @property
    def num_rows(self) -> int:
        """How many tokens it is of."""
        return len(self.data) // self.shape.row_bytes

    @property
    def experts(self) -> Experts:
        """[rows, layers, top_k], read-only; `shape.unknown` where no expert is known."""
        flat = np.frombuffer(self.data, self.shape.dtype)
        return flat.reshape(-1, self.shape.num_layers, self.shape.top_k)

    def followed_by(self, more: RoutedExperts) -> RoutedExperts:
        """These rows and then others of the same shape."""
        if self.shape != more.shape:
            raise RecordError(f"routed_experts: {more.shape} cannot follow {self.shape}")
        return RoutedExperts(shape=self.shape, data=self.data + more.data)


def routing_shape(config: Mapping[str, Any]) -> RoutingShape | None:
    """Of a Hugging Face config.json; None for a dense model."""
    num_experts = config.get("n_routed_experts") or config.get("num_experts")
    if not num_experts:
        return None
    return RoutingShape(
        num_layers=int(config["num_hidden_layers"]),
        top_k=int(config["num_experts_per_tok"]),
        num_experts=int(num_experts),
    )


def replayed_shape(settings: Settings) -> RoutingShape | None:
    """The shape of what a run records and replays; None: nothing is.

    Raises:
        SettingsError: replay is asked for, and the model has no experts or cannot be read.
    """
    trainer, folder = settings.trainer, settings.model.path
    if trainer.routing_replay is False or trainer.mode == "sft":
        return None
    path = folder / "config.json"
    try:
        shape = routing_shape(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if not trainer.routing_replay:
            # Who needs the file for more says what is wrong with it.
            return None
        raise SettingsError(
            f"trainer.routing_replay=true: {str(path)!r} cannot be read ({error!r}); give a "
            "Hugging Face folder"
        ) from error
    if trainer.routing_replay and shape is None:
        raise SettingsError(
            f"trainer.routing_replay=true with model.path={str(folder)!r}, which has no experts; "
            "leave it out"
        )
    return shape
