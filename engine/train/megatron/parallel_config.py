"""Over how many ranks a model is split, in which directions.

Nothing here needs a process group, so that impossible sizes are refused, with the sizes that work,
before one is formed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from outloop.buffer.errors import SettingsError
from outloop.engine.train.megatron.layer_kind import LayerKind

TABLE = "trainer.megatron"
FIELDS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "context_parallel_size",
)
_REFUSED = {
    "virtual_pipeline_model_parallel_size": "interleaved pipeline stages train wrongly with "
    "megatron-core's default point-to-point order (a wrong gradient, silently); use whole stages",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelSizes:
    """How `num_ranks` ranks are laid out; data-parallel sizes follow from the others."""

    num_ranks: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1
    context: int = 1
    is_sequence: bool = False

    @property
    def data(self) -> int:
        """Ranks that hold the same dense weights and compute different samples."""
        return self.num_ranks // (self.tensor * self.pipeline * self.context)


def read_sizes(
    raw: Mapping[str, Any], *, num_ranks: int, layers: LayerKind = "local"
) -> ParallelSizes:
    """The parallel sizes that the raw table asks for.

    Raises:
        SettingsError: a size that is no positive whole number, a direction that this trainer does
            not have with these layers, or sizes that do not divide num_ranks; those that do are
            named.
    """
    for name, reason in _REFUSED.items():
        if raw.get(name) not in (None, 1):
            raise SettingsError(f"{TABLE}.{name}={raw[name]!r}: {reason}. Remove it")
    for name in FIELDS:
        value = raw.get(name, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SettingsError(f"{TABLE}.{name}={value!r}; a whole number from 1 on is allowed")
    tensor = int(raw.get("tensor_model_parallel_size", 1))
    sizes = ParallelSizes(
        num_ranks=num_ranks,
        tensor=tensor,
        pipeline=int(raw.get("pipeline_model_parallel_size", 1)),
        expert=int(raw.get("expert_model_parallel_size", 1)),
        expert_tensor=int(raw.get("expert_tensor_parallel_size", tensor)),
        context=int(raw.get("context_parallel_size", 1)),
        is_sequence=bool(raw.get("sequence_parallel", False)),
    )
    if sizes.context > 1 and layers != "transformer_engine":
        raise SettingsError(
            f"{TABLE}.context_parallel_size={sizes.context}: only Transformer Engine's attention "
            "exchanges keys and values between ranks, and this run has Megatron's local layers, as "
            'every run on a CPU has. Remove it, or set trainer.device = "cuda" where '
            "transformer_engine is importable"
        )
    _check_ranks(sizes)
    return sizes


def _check_ranks(sizes: ParallelSizes) -> None:
    """The products must divide the number of ranks."""
    pipeline, num_ranks = sizes.pipeline, sizes.num_ranks
    _must_divide("pipeline_model_parallel_size", pipeline, {"trainer.num_ranks": num_ranks})
    rest = num_ranks // pipeline
    where = f"trainer.num_ranks={num_ranks} / pipeline_model_parallel_size={pipeline}"
    _must_divide("tensor_model_parallel_size", sizes.tensor, {where: rest})
    if sizes.context > 1:
        shared = f"{where} / tensor_model_parallel_size={sizes.tensor}"
        _must_divide("context_parallel_size", sizes.context, {shared: rest // sizes.tensor})
    if sizes.expert > 1 or sizes.expert_tensor != sizes.tensor:
        _must_divide("expert_tensor_parallel_size", sizes.expert_tensor, {where: rest})
        where += f" / expert_tensor_parallel_size={sizes.expert_tensor}"
        _must_divide(
            "expert_model_parallel_size", sizes.expert, {where: rest // sizes.expert_tensor}
        )
    if sizes.is_sequence and sizes.tensor == 1:
        raise SettingsError(
            f"{TABLE}.sequence_parallel=true with tensor_model_parallel_size=1 splits nothing; "
            "set tensor_model_parallel_size to 2 or more, or remove sequence_parallel"
        )
    if sizes.expert > 1 and sizes.tensor > 1 and not sizes.is_sequence:
        raise SettingsError(
            f"{TABLE}.expert_model_parallel_size={sizes.expert} with tensor_model_parallel_size="
            f"{sizes.tensor} needs sequence_parallel=true; set it"
        )


def check_model(
    sizes: ParallelSizes, fields: Mapping[str, Any], *, has_own_split: bool = False
) -> None:
    """Refuse sizes that do not divide the model.

    Args:
        fields: Megatron's configuration of the model, before it is built.
        has_own_split: the raw table sets how many layers the first or last stage has.

    Raises:
        SettingsError: names the sizes that work.
    """
    _must_divide(
        "tensor_model_parallel_size",
        sizes.tensor,
        {
            name: fields[name]
            for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size")
        },
    )
    if not has_own_split:
        _must_divide(
            "pipeline_model_parallel_size", sizes.pipeline, {"num_layers": fields["num_layers"]}
        )
    num_experts = fields.get("num_moe_experts")
    if num_experts is None:
        for name, size in (("expert_model_parallel_size", sizes.expert),):
            if size > 1:
                raise SettingsError(f"{TABLE}.{name}={size}: the model has no experts; remove it")
        return
    _must_divide("expert_model_parallel_size", sizes.expert, {"num_moe_experts": num_experts})
    _must_divide(
        "expert_tensor_parallel_size",
        sizes.expert_tensor,
        {"moe_ffn_hidden_size": fields["moe_ffn_hidden_size"]},
    )


def check_world(num_ranks: int) -> None:
    """Refuse a process that was started as one of another number of ranks.

    Raises:
        SettingsError: WORLD_SIZE and trainer.num_ranks differ.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != num_ranks:
        raise SettingsError(
            f"trainer.num_ranks={num_ranks}, but this process is one of WORLD_SIZE={started}; "
            f"start it with torchrun over {num_ranks} processes, or set trainer.num_ranks="
            f"{started}"
        )


def _must_divide(name: str, size: int, totals: Mapping[str, int]) -> None:
    if any(total % size for total in totals.values()):
        named = ", ".join(f"{key}={value}" for key, value in totals.items())
        allowed = ", ".join(map(str, common_divisors(totals.values())))
        raise SettingsError(f"{TABLE}.{name}={size} does not divide {named}; these do: {allowed}")


def common_divisors(totals: Iterable[int]) -> list[int]:
    """Every number that divides all of `totals`, in ascending order."""
    values = list(totals)
    return [size for size in range(1, min(values) + 1) if all(v % size == 0 for v in values)]
