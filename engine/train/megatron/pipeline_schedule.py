"""Running microbatches through the model's stages, forward only or with backward.

Every data-parallel rank runs the same number of microbatches. `on_hidden` runs on the last pipeline
stage only, once for each.

Shape letters: N trained tokens of a microbatch, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from outloop.engine.train.data.microbatch import Microbatch, build_microbatch
from outloop.engine.train.data.packing import deal
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.megatron.model_and_optimizer import PolicyConfig
from outloop.engine.train.megatron.parallel_rank import context_place

OnHidden = Callable[[Microbatch, Tensor], Tensor | None]
"""A microbatch and its last hidden states [N, H] -> their gradient [N, H], or None without one."""


def deal_rows(
    lengths: Sequence[int], config: PolicyConfig, *, max_tokens: int
) -> list[list[list[int]]]:
    """Indices of `lengths` by data-parallel rank and microbatch; equal on all ranks."""
    return deal(
        lengths,
        max_tokens=max_tokens,
        num_ranks=parallel_state.get_data_parallel_world_size(),
        hidden_size=config.hidden_size,
    )


def run_microbatches(
    model: Any,
    config: PolicyConfig,
    batch: TrainBatch,
    members: Sequence[Sequence[int]],
    on_hidden: OnHidden,
    *,
    on_microbatch: Callable[[], None],
    forward_only: bool = False,
) -> None:
    """Run this rank's microbatches through its stage.

    Args:
        model: a PolicyModel, wrapped for gradients unless `forward_only`.
        members: rows of `batch` for each microbatch; may be empty lists.
        on_microbatch: called before every forward, for heartbeats.
    """
    if not members:
        # Without rows no rank has a microbatch, and Megatron's schedules expect one at least.
        return
    device = next(model.parameters()).device
    multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
    context = context_place()
    microbatches = (
        build_microbatch(
            batch,
            part,
            device,
            multiple=multiple,
            layers=config.layers,
            context=context,
            routing=config.routing,
        )
        for part in members
    )

    def forward_step(batches: Iterator[Microbatch], part: Any) -> tuple[Tensor, Any]:
        on_microbatch()
        microbatch = next(batches)
        hidden = part(microbatch.token_ids_T, microbatch.row, microbatch.predictors_N)

        def loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            gradient = on_hidden(microbatch, output)
            num_tokens = torch.zeros((), dtype=torch.int, device=output.device)
            if gradient is None:
                return num_tokens.float(), num_tokens, {}
            scalar: Tensor = _Given.apply(output, gradient)
            return scalar, num_tokens, {}

        return hidden, loss

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(microbatches),
        model=[model],
        num_microbatches=len(members),
        # Stages send each other the lengths of their rows (variable_seq_lengths).
        seq_length=multiple,
        micro_batch_size=1,
        forward_only=forward_only,
    )


class _Given(torch.autograd.Function):
    """A scalar that has a given gradient with respect to the hidden states."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient, None
