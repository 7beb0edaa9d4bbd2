"""This rank's coordinates among the others.

Of the ranks that computed the same numbers exactly one reports them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core import parallel_state

from outloop.engine.train.data.context_parallel import ContextPlace


@dataclass(frozen=True, slots=True)
class VocabPart:
    """The columns [start, stop) of the vocabulary that this rank holds, and who holds the rest."""

    start: int
    stop: int
    group: Any = None
    """Process group over which the vocabulary is split; None: it is whole here."""


def is_reporting_rank() -> bool:
    """Whether this rank reports for its share of the tokens: last stage, first of its columns."""
    return bool(
        parallel_state.is_pipeline_last_stage()
        and parallel_state.get_tensor_model_parallel_rank() == 0
    )


def data_rank() -> int:
    """Which data-parallel share of the samples this rank computes."""
    return int(parallel_state.get_data_parallel_rank())


def context_place() -> ContextPlace:
    """Which of each sample's tokens this rank computes."""
    return ContextPlace(
        rank=int(parallel_state.get_context_parallel_rank()),
        num_ranks=int(parallel_state.get_context_parallel_world_size()),
    )


def context_group() -> Any:
    """The process group of the ranks that share each sample's tokens; None: it is this one."""
    if parallel_state.get_context_parallel_world_size() == 1:
        return None
    return parallel_state.get_context_parallel_group()
