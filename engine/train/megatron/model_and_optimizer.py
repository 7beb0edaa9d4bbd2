"""This rank's model, gradient buffers and optimizer, and joining the process group.

The only module that touches Megatron-core's process groups, model wrapper and optimizer. Gradients
are summed, never averaged, over microbatches and data-parallel ranks; the caller divides by one
denominator that it fixed before the first forward.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from outloop.engine.train.megatron import cpu_backend

cpu_backend.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional  # noqa: E402

from outloop.buffer.settings.trainer import TrainerSettings  # noqa: E402
from outloop.engine.train.megatron.gradient_hash import gradient_hash  # noqa: E402
from outloop.engine.train.megatron.layers import PackedRow, block_spec  # noqa: E402
from outloop.engine.train.megatron.model_config import PolicyConfig, read_config  # noqa: E402
from outloop.engine.train.megatron.muon import build_muon, check_muon  # noqa: E402
from outloop.engine.train.megatron.parallel_config import ParallelSizes  # noqa: E402
from outloop.engine.train.megatron.parallel_rank import VocabPart  # noqa: E402

__all__ = [
    "Policy",
    "PolicyConfig",
    "PolicyModel",
    "ValueModel",
    "build_critic",
    "build_policy",
    "build_reward_model",
    "join_process_group",
    "leave_process_group",
    "read_config",
]


def join_process_group(
    *,
    seed: int,
    sizes: ParallelSizes | None = None,
    timeout_s: float = 600.0,
    gpu: int | None = None,
) -> None:
    """Join torchrun's group, or make a group of one; idempotent; seeds the random trackers.

    Args:
        timeout_s: after which a collective that a rank does not join fails on the others.
        gpu: which of the CUDA devices that this process sees; None: the one at LOCAL_RANK.
    """
    sizes = sizes or ParallelSizes()
    if not dist.is_initialized():
        # Tensors on the CPU go over gloo: see `collectives`.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        timeout = timedelta(seconds=timeout_s)
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) if gpu is None else gpu)
        if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tensor,
            pipeline_model_parallel_size=sizes.pipeline,
            context_parallel_size=sizes.context,
            expert_model_parallel_size=sizes.expert,
            expert_tensor_parallel_size=sizes.expert_tensor,
            # timedelta takes fractions; the deadline is that of every group.
            distributed_timeout_minutes=timeout_s / 60.0,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(seed)


def rendezvous_store() -> Any:
    """The store on which the ranks met; it outlives each of them under torchrun."""
    return dist.distributed_c10d._get_default_store()


def leave_process_group() -> None:
    """Undo `join_process_group`."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


class PolicyModel(GPTModel):
    """This rank's part of a GPTModel over packed rows; logits only where they are asked for."""

    _has_partial_gradient = True
    """Each tensor-parallel rank knows its own columns' share of the hidden states' gradient."""

    def __init__(self, config: PolicyConfig, *, is_tied: bool | None = None) -> None:
        """`is_tied`: whether input and output embedding are one; None: as the folder says."""
        size = config.tensor_model_parallel_size
        super().__init__(
            config=config,
            transformer_layer_spec=block_spec(config),
            # Megatron needs equal parts; the rows beyond the vocabulary are never used.
            vocab_size=-(-config.vocab_size // size) * size,
            max_sequence_length=1,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            parallel_output=True,
            share_embeddings_and_output_weights=config.is_tied if is_tied is None else is_tied,
            position_embedding_type="none",
        )

    @property
    def vocab_part(self) -> VocabPart:
        """The columns whose logits `logits` gives."""
        size = self.config.tensor_model_parallel_size
        if size == 1:
            return VocabPart(0, self.config.vocab_size)
        width = -(-self.config.vocab_size // size)
        start = parallel_state.get_tensor_model_parallel_rank() * width
        return VocabPart(
            min(start, self.config.vocab_size),
            min(start + width, self.config.vocab_size),
            parallel_state.get_tensor_model_parallel_group(),
        )

    def forward(self, token_ids_T: Tensor, row: PackedRow, positions_N: Tensor) -> Tensor:
        """Of a packed row of T tokens: last hidden states [N, H] at `positions_N`.

        A pipeline stage that is not the last gives what it sends on, [T, 1, H] or, with sequence
        parallelism, this rank's share of it. The gradient that comes back to the hidden states
        is summed over the tensor-parallel ranks, each of which knows its own columns' share.
        """
        hidden_T1H = None
        if self.pre_process:
            hidden_T1H = self.embedding(input_ids=token_ids_T[None, :], position_ids=None)
        hidden_T1H = self.decoder(
            hidden_states=hidden_T1H, attention_mask=None, packed_seq_params=row
        )
        if not self.post_process:
            return hidden_T1H
        if self.config.sequence_parallel:
            hidden_T1H = tensor_parallel.gather_from_sequence_parallel_region(
                hidden_T1H, tensor_parallel_output_grad=self._has_partial_gradient
            )
            return hidden_T1H[positions_N, 0]
        hidden_NH = hidden_T1H[positions_N, 0]
        if self.config.tensor_model_parallel_size > 1 and self._has_partial_gradient:
            hidden_NH = tensor_parallel.copy_to_tensor_model_parallel_region(hidden_NH)
        return hidden_NH

    @property
    def output_weight(self) -> Tensor:
        """[C, H] this rank's rows of the output layer, padding included; last stage only."""
        weight: Tensor = (
            self.shared_embedding_or_output_weight()
            if self.config.is_tied
            else self.output_layer.weight
        )
        return weight

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Logits [N, C] of the token that follows each hidden state, in `vocab_part`'s columns."""
        part = self.vocab_part
        return functional.linear(hidden_NH, self.output_weight[: part.stop - part.start])


class ValueModel(PolicyModel):
    """A critic: the layers of a policy with one number in place of logits.

    The head begins at zero, so that no state is worth anything before the first update; every
    tensor-parallel rank holds all of it and computes the whole gradient.
    """

    _has_partial_gradient = False

    def forward(self, token_ids_T: Tensor, row: PackedRow, positions_N: Tensor) -> Tensor:
        """As a policy's; what is recorded of the policy's routers says nothing of these."""
        return super().forward(token_ids_T, dataclasses.replace(row, routes=None), positions_N)

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config, is_tied=False)
        if self.post_process:
            # Under the name that Megatron's checkpoints expect on the last stage.
            self.output_layer = torch.nn.Linear(config.hidden_size, 1, dtype=config.params_dtype)
            torch.nn.init.zeros_(self.output_layer.weight)
            torch.nn.init.zeros_(self.output_layer.bias)

    def values(self, hidden_NH: Tensor) -> Tensor:
        """[N] float32: the return that is expected from each hidden state on."""
        head = self.output_layer
        found = functional.linear(hidden_NH.float(), head.weight.float(), head.bias.float())
        return found[:, 0]


@dataclass(kw_only=True)
class Policy:
    """A model with what its optimizer step needs; see `build_policy` and `build_critic`."""

    config: PolicyConfig
    model: PolicyModel
    wrapped: DistributedDataParallel
    optimizer: Any
    scheduler: OptimizerParamScheduler
    hashes_gradients: bool = False
    """Whether `step` sets `gradient_hash`; equal on all ranks."""
    gradient_hash: str = ""
    """Of the last step's gradients, before clipping."""
    optimizer_name: Literal["adam", "muon"] = "adam"
    norm_limit: float = math.inf
    """Largest gradient norm with which the next step is made."""

    def zero_grad(self) -> None:
        """Forget the gradients of the previous update."""
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()

    def take_weights(self) -> None:
        """Call this when the model's weights were written: the optimizer continues from them."""
        self.optimizer.reload_model_params()

    @contextmanager
    def hold_sync(self) -> Iterator[None]:
        """Backward passes in here do not count as a parameter's last one of the update."""
        groups = self.wrapped.bucket_groups + self.wrapped.expert_parallel_bucket_groups
        before = [group.is_last_microbatch for group in groups]
        for group in groups:
            group.is_last_microbatch = False
        try:
            yield
        finally:
            for group, was_last in zip(groups, before, strict=True):
                group.is_last_microbatch = was_last

    def step(self) -> tuple[float, float]:
        """Sum gradients over ranks, clip, update; returns (gradient norm, learning rate used).

        Raises:
            FloatingPointError: the gradient norm is not finite, or above `norm_limit`; weights are
                unchanged.
        """
        self._report_output_layer()
        finalize_model_grads(
            [self.wrapped], pg_collection=ProcessGroupCollection.use_mpu_process_groups()
        )
        # The optimizer sees the gradient buffers only after this; without it the norm would be 0.
        self.optimizer.prepare_grads()
        norm = _largest(float(self.optimizer.get_grad_norm()))
        if norm > self.norm_limit and norm != math.inf:
            raise FloatingPointError(
                f"grad_norm={norm:.4g} exceeds {self.norm_limit:.4g}, what trainer.max_grad_spike "
                "allows over the median of the last updates; the update was not made."
            )
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"grad_norm={norm}; the update was not made. Look at the batch's rewards, logprobs "
                "and learning rate."
            )
        if self.hashes_gradients:
            self.gradient_hash = gradient_hash(
                _gradients(self.optimizer),
                device=next(self.model.parameters()).device,
            )
        # Before the update, so that the first one of a warm-up has a rate above zero.
        self.scheduler.step(increment=1)
        # Megatron's own `step` would copy the gradients and compute their norm once more.
        self._clip(norm)
        self.optimizer.step_with_ready_grads()
        return norm, float(self.optimizer.param_groups[0]["lr"])

    def _clip(self, norm: float) -> None:
        """Scale the gradients down to the largest norm that the settings allow."""
        for part in optimizer_parts(self.optimizer):
            limit = part.config.clip_grad
            factor = limit / (norm + 1e-6)
            if limit <= 0.0 or factor >= 1.0:
                continue
            # Without Apex Megatron would scale into copies.
            torch._foreach_mul_([p.grad for p in part.get_parameters()], factor)

    def _report_output_layer(self) -> None:
        """With overlap, Megatron waits for a parameter whose passes were all held back."""
        model = self.model
        if not self.wrapped.ddp_config.overlap_grad_reduce or not model.post_process:
            return
        if isinstance(model, ValueModel):
            # Its head's passes are not held back.
            return
        if not (self.config.is_tied and model.pre_process):
            weight = model.output_weight
            self.wrapped.param_to_bucket_group[weight].register_grad_ready(weight)


def optimizer_parts(optimizer: Any) -> list[Any]:
    """Dense and expert parameters may have optimizers of their own; a stage may lack either."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if not getattr(part, "is_stub_optimizer", False)]


def _fuse_adam(optimizer: Any) -> None:
    """Have torch update weights in one pass, without a temporary of the optimizer state's size.

    Apex and Transformer Engine bring an Adam that does.
    """
    for part in optimizer_parts(optimizer):
        if isinstance(part.optimizer, torch.optim.Adam):
            for group in part.optimizer.param_groups:
                group["fused"] = True


def _gradients(optimizer: Any) -> Iterator[Tensor]:
    """What the optimizer of this rank is about to apply."""
    for part in optimizer_parts(optimizer):
        for parameter in part.get_parameters():
            if parameter.grad is not None:
                yield parameter.grad


def _largest(norm: float) -> float:
    """Norm over all ranks: all must decide alike, even if their last bits differ."""
    if dist.get_world_size() == 1:
        return norm
    largest = torch.tensor(norm if math.isfinite(norm) else math.inf, device=_device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest) if math.isfinite(norm) else norm


def _device() -> torch.device:
    """Where this rank's tensors are."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def build_policy(config: PolicyConfig, settings: TrainerSettings, *, num_updates: int) -> Policy:
    """Model, gradient buffers, optimizer and learning-rate schedule for `num_updates` updates.

    Raises:
        SettingsError: Muon, and the model's matrices are split over ranks.
    """
    return _build(
        PolicyModel(config),
        settings,
        optimizer_name=settings.optimizer,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        max_grad_norm=settings.max_grad_norm,
        num_updates=num_updates,
    )


def build_critic(config: PolicyConfig, settings: TrainerSettings, *, num_updates: int) -> Policy:
    """The same of a critic: an optimizer of its own, with the rates and the limit of
    trainer.critic. Random states are left as they were."""
    critic = settings.critic
    with torch.random.fork_rng(devices=[]):
        model = ValueModel(config)
    return _build(
        model,
        settings,
        learning_rate=critic.learning_rate,
        warmup_steps=critic.warmup_steps,
        max_grad_norm=critic.max_grad_norm,
        num_updates=num_updates,
    )


def build_reward_model(
    config: PolicyConfig, settings: TrainerSettings, *, num_updates: int
) -> Policy:
    """A model with one number in place of logits, and the optimizer of the policy's settings."""
    return _build(
        ValueModel(config),
        settings,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        max_grad_norm=settings.max_grad_norm,
        num_updates=num_updates,
    )


def _build(
    model: PolicyModel,
    settings: TrainerSettings,
    *,
    learning_rate: float,
    warmup_steps: int,
    max_grad_norm: float,
    num_updates: int,
    optimizer_name: Literal["adam", "muon"] = "adam",
) -> Policy:
    config: PolicyConfig = model.config
    is_distributed = config.sizes.data * config.sizes.context > 1
    if optimizer_name == "muon":
        check_muon(
            tensor=config.tensor_model_parallel_size,
            has_experts=config.routing is not None,
            is_sharded=bool(config.ddp_options.get("use_distributed_optimizer")),
        )
        is_distributed = False
    model = model.to(_device())
    ddp_options: dict[str, Any] = {"use_distributed_optimizer": is_distributed}
    ddp_options |= config.ddp_options
    wrapped = DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True, **ddp_options),
        module=model,
    )
    wrapped.broadcast_params()
    config.no_sync_func = wrapped.no_sync
    optimizer_options: dict[str, Any] = {
        "use_distributed_optimizer": ddp_options["use_distributed_optimizer"]
    }
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=learning_rate,
        min_lr=learning_rate * settings.min_lr_ratio,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        clip_grad=max_grad_norm,
        bf16=config.bf16,
        params_dtype=config.params_dtype,
        **(optimizer_options | config.optimizer_options),
    )
    optimizer = (
        build_muon(optimizer_config, wrapped, model, momentum=settings.muon_momentum)
        if optimizer_name == "muon"
        else get_megatron_optimizer(optimizer_config, [wrapped])
    )
    _fuse_adam(optimizer)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=learning_rate,
        min_lr=learning_rate * settings.min_lr_ratio,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=max(num_updates, warmup_steps + 1),
        lr_decay_style="WSD" if settings.lr_decay == "wsd" else settings.lr_decay,
        wsd_decay_steps=settings.wsd_decay_updates,
        lr_wsd_decay_style="linear",
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return Policy(
        config=config,
        model=model,
        wrapped=wrapped,
        optimizer=optimizer,
        scheduler=scheduler,
        optimizer_name=optimizer_name,
    )
