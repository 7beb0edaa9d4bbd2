"""Which of Megatron-core's layers a trainer uses: by settings, device and what is installed.

It needs no process group and no device, so that an impossible choice is refused before either is
touched.
"""

from __future__ import annotations

from typing import Literal

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings.trainer import TrainerSettings
from outloop.engine.train.megatron.device import device_of

LayerKind = Literal["local", "local_varlen", "transformer_engine"]
"""local_varlen: Megatron's local layers, with torch's attention kernels of variable length."""


def choose_layers(
    wanted: Literal["auto", "local", "local_varlen", "transformer_engine"],
    *,
    device: str,
    is_importable: bool,
) -> LayerKind:
    """Transformer Engine's layers where they can run, unless local ones are asked for.

    Without them a GPU gets torch's own kernels of variable length: padded attention would keep the
    whole matrix of scores.

    Args:
        wanted: trainer.layers.
        device: what `device_of` chose.
        is_importable: whether Megatron-core could import Transformer Engine.

    Raises:
        SettingsError: Transformer Engine is asked for and cannot be had.
    """
    is_on_gpu = device.startswith("cuda")
    if wanted == "auto":
        if not is_on_gpu:
            return "local"
        return "transformer_engine" if is_importable else "local_varlen"
    if wanted != "local" and not is_on_gpu:
        raise SettingsError(
            f'trainer.layers="{wanted}" on device={device!r}: its kernels need CUDA; '
            'set trainer.layers = "auto"'
        )
    if wanted == "transformer_engine" and not is_importable:
        raise SettingsError(
            'trainer.layers="transformer_engine": megatron-core cannot import transformer_engine '
            "here; install transformer-engine[pytorch] for this torch, or set "
            'trainer.layers = "auto"'
        )
    return wanted


def layers_of(trainer: TrainerSettings) -> LayerKind:
    """`choose_layers` with what Megatron-core could import.

    Raises:
        SettingsError: as `choose_layers`.
    """
    # Only here: megatron-core is to be imported after its CPU backend is installed (config).
    from megatron.core.models.gpt import gpt_layer_specs

    return choose_layers(
        trainer.layers, device=device_of(trainer), is_importable=bool(gpt_layer_specs.HAVE_TE)
    )
