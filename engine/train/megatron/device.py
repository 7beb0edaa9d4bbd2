"""Which device a trainer rank computes on.

Needs no device: a choice that cannot be had is refused before anything is built.
"""

from __future__ import annotations

import re

import torch

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings.trainer import TrainerSettings

_NUMBERED = re.compile(r"cuda:(\d+)")


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
