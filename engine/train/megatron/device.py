"""Which device a trainer rank computes on.

Needs no device: a choice that cannot be had is refused before anything is built.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, MutableMapping, Sequence

import structlog
import torch

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings.trainer import TrainerSettings
from outloop.engine.machine.visible_gpus import Gpu, list_gpus

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""How many queues a process has to a device; CUDA reads it when the process first uses one."""
_NUMBERED = re.compile(r"cuda:(\d+)")
_LAST_ORDERED = 9
"""Hopper. From Blackwell (10) on Megatron-LM asks for no number of queues."""
_log = structlog.get_logger()


def choose_device(wanted: str, *, num_gpus: int, num_ranks: int = 1) -> str:
    """ "cpu", "cuda" (each rank its own), or "cuda:N".

    Args:
        wanted: trainer.device.
        num_gpus: how many CUDA devices torch offers in this process.

    Raises:
        SettingsError: what is wanted is not there, or is one device for several ranks.
    """
    if wanted == "auto":
        return "cuda" if num_gpus else "cpu"
    if wanted == "cpu":
        if num_gpus:
            raise SettingsError(
                f'trainer.device="cpu" where torch offers {num_gpus} CUDA device(s), which '
                "megatron-core would use: hide them from the trainer with "
                'CUDA_VISIBLE_DEVICES="" (`outloop train` does), or set trainer.device = "auto"'
            )
        return "cpu"
    number = _NUMBERED.fullmatch(wanted)
    if number is None and wanted != "cuda":
        raise SettingsError(
            f'trainer.device={wanted!r}; "auto", "cpu", "cuda" and "cuda:N" are allowed'
        )
    if not num_gpus:
        raise SettingsError(
            f"trainer.device={wanted!r} on a machine where torch offers 'cpu' only; "
            'set trainer.device = "auto"'
        )
    if number is not None and num_ranks > 1:
        raise SettingsError(
            f"trainer.device={wanted!r} is one device for trainer.num_ranks={num_ranks}; set "
            'trainer.device = "cuda" and name the devices in trainer.gpus'
        )
    if number is not None and int(number[1]) >= num_gpus:
        raise SettingsError(
            f"trainer.device={wanted!r}, but this process sees {num_gpus} CUDA device(s): "
            f'"cuda:0" to "cuda:{num_gpus - 1}" are allowed'
        )
    return wanted


def device_of(trainer: TrainerSettings) -> str:
    """`choose_device` with what torch offers here.

    Raises:
        SettingsError: as `choose_device`.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return choose_device(trainer.device, num_gpus=num_gpus, num_ranks=trainer.num_ranks)


def set_precision(device: str) -> None:
    """On CUDA, matrix products of float32 weights run on tensor cores, in TF32.

    That is three times as fast, and rounds inputs to 10 bits of mantissa; sums stay float32. On a
    CPU nothing changes.
    """
    if device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")


def gpu_number(device: str) -> int | None:
    """N of "cuda:N"; None: it is left to the rank's place among the others."""
    number = _NUMBERED.fullmatch(device)
    return None if number is None else int(number[1])


def limit_connections(
    trainer: TrainerSettings,
    *,
    environment: MutableMapping[str, str] = os.environ,
    gpus: Callable[[], Sequence[Gpu]] = list_gpus,
) -> None:
    """Give this rank one queue to its device where Megatron-core's layers rely on it.

    Its tensor-parallel layers start a collective and then a matrix product, and overlap the two if
    they begin in that order. The trainer that 0.19.2 brings refuses tensor and context parallelism
    with more queues up to Hopper, unless batches overlap with the exchange of experts, which wants
    several. What the environment has already is left alone. To be called before CUDA is used.
    """
    raw = trainer.megatron
    sizes = (raw.get("tensor_model_parallel_size", 1), raw.get("context_parallel_size", 1))
    overlaps_experts = bool(raw.get("overlap_moe_expert_parallel_comm"))
    if trainer.device == "cpu" or sizes == (1, 1) or overlaps_experts or CONNECTIONS in environment:
        return
    generations = {gpu.generation for gpu in gpus()}
    if any(each is not None and each <= _LAST_ORDERED for each in generations):
        environment[CONNECTIONS] = "1"
        _log.info("device_queues_limited", variable=CONNECTIONS, value="1")
