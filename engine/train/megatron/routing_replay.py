"""Mixtures of experts that send tokens where servers sent them.

The router's scores, and so the weights of the experts and their gradients, are the trainer's own;
only which experts are weighed is taken from the row (Ma et al. 2025, arXiv:2510.11370, section 4).
A token of which nothing is known goes where the router would send it.

Shape letters: T tokens of a row, t of them on this sequence-parallel rank, L layers, k experts of a
token, X experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from outloop.buffer.errors import SettingsError
from outloop.engine.train.megatron.release import parts_of

_Choice = tuple[Tensor, Tensor]
_TABLE = "trainer.megatron"


class Replay:
    """What Megatron-core's routing asks in place of its own top-k."""

    def __init__(self) -> None:
        self.routes: Tensor | None = None
        """[t, k] int16, -1 where nothing is known; None: the router chooses."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., _Choice] | None = None,
    ) -> _Choice:
        """Scores [t, k] and experts [t, k] of tokens with `scores` [t, X]."""
        assert default_compute_topk is not None
        chosen, own = default_compute_topk(
            scores, topk, num_groups=num_groups, group_topk=group_topk
        )
        if self.routes is None:
            return chosen, own
        recorded = self.routes.long()
        is_known = (recorded >= 0).all(dim=1, keepdim=True)
        experts = torch.where(is_known, recorded, own)
        return scores.gather(1, experts), experts


class ReplayingRouter(TopKRouter):
    """Megatron-core's router with a Replay."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.router_replay: Any = Replay()


class ReplayingLayer(TransformerLayer):
    """A layer with experts; hands its router the routes of the row, before each forward.

    So that a layer that is computed again on the way back has those of its own microbatch.
    """

    def forward(self, *args: Any, **options: Any) -> Any:
        """As the layer's."""
        row = options["packed_seq_params"]
        self.mlp.router.router_replay.routes = self._own(row.routes)
        return super().forward(*args, **options)

    def _own(self, routes_TLk: Tensor | None) -> Tensor | None:
        """[t, k] of this layer and rank."""
        if routes_TLk is None:
            return None
        config = self.config
        if config.moe_router_fusion:
            raise SettingsError(
                f"{_TABLE}.moe_router_fusion=true: the fused router cannot replay routes; remove "
                "it, or set trainer.routing_replay = false"
            )
        recomputes = config.recompute_granularity == "selective" and "moe" in (
            config.recompute_modules or ()
        )
        if recomputes and config.pipeline_model_parallel_size > 1:
            raise SettingsError(
                f'{_TABLE}.recompute_modules with "moe" and pipeline_model_parallel_size='
                f"{config.pipeline_model_parallel_size}: experts would be computed again with the "
                'routes of another microbatch; set recompute_granularity = "full", or '
                "trainer.routing_replay = false"
            )
        routes = routes_TLk[:, self.layer_number - 1]
        if config.sequence_parallel:
            size = parallel_state.get_tensor_model_parallel_world_size()
            routes = routes.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]
        return routes


def with_replay(spec: ModuleSpec) -> ModuleSpec:
    """The specification of a layer with experts, that can replay."""
    spec.module = ReplayingLayer
    parts_of(spec.submodules.mlp).router = ReplayingRouter
    return spec
