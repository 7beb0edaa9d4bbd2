"""Which of the machine's GPUs each server and each trainer rank gets.

A part sees only its own GPUs (CUDA_VISIBLE_DEVICES), so that two that start at once cannot take the
same one. GPUs are numbered as this process sees them: by its own CUDA_VISIBLE_DEVICES if it has
one, else as nvidia-smi lists them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings
from outloop.engine.machine.visible_gpus import VISIBLE, Gpu


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuPlacement:
    """Numbers of GPUs by part; None: the part sees what its starter sees."""

    gpus: tuple[Gpu, ...]
    servers: tuple[tuple[int, ...] | None, ...]
    trainer: tuple[int, ...] | None

    def environment(self, part: str, index: int = 0) -> dict[str, str]:
        """What the process of a part is started with, beside what its starter has."""
        numbers: tuple[int, ...] | None = None
        if part == "trainer":
            numbers = self.trainer
        elif part == "server" and index < len(self.servers):
            numbers = self.servers[index]
        if numbers is None:
            return {}
        return {VISIBLE: ",".join(self.gpus[number].id for number in numbers)}

    def lines(self) -> list[str]:
        """The GPUs of each part, for a person; empty where no part has a GPU."""
        found = [
            f"server-{index}: {self._named(numbers)}"
            for index, numbers in enumerate(self.servers)
            if numbers
        ]
        found += [
            f"trainer rank {rank}: {self._named((number,))}"
            for rank, number in enumerate(self.trainer or ())
        ]
        return found

    def _named(self, numbers: Sequence[int]) -> str:
        names = ", ".join(str(number) for number in numbers)
        gpu = self.gpus[numbers[0]]
        return f"GPU {names}" + (f" ({gpu.name})" if gpu.name else "")


NOT_PLACED = GpuPlacement(gpus=(), servers=(), trainer=None)
"""Every part sees what its starter sees."""


def place_gpus(
    settings: Settings,
    gpus: Sequence[Gpu],
    *,
    has_servers: bool = True,
    has_trainer: bool = True,
) -> GpuPlacement:
    """Give every part its GPUs, as the settings say or, where they say nothing, in order.

    Servers get the first, the trainer's ranks those behind them; with trainer.is_colocated both
    begin at the first. What runs on the CPU sees none.

    Args:
        has_servers: False where none is started.
        has_trainer: False where none is started.

    Raises:
        SettingsError: there are not enough, a number is not there, or two parts would share one.
    """
    server, trainer = settings.server, settings.trainer
    size = server.tensor_parallel_size
    num_servers = server.num_servers if has_servers else 0
    # GPUs that are named for all parts, on the CPU too, say who would sit where: a rehearsal.
    is_named = bool(server.gpus) and bool(trainer.gpus)
    num_for_servers = size * num_servers if server.device == "cuda" or is_named else 0
    is_on_gpu = trainer.device == "cuda" or (trainer.device == "auto" and bool(gpus)) or is_named
    num_for_trainer = trainer.num_ranks if is_on_gpu and has_trainer else 0
    if has_servers:
        _check_list("server.gpus", server.gpus, num_for_servers, len(gpus))
    if has_trainer:
        _check_list("trainer.gpus", trainer.gpus, num_for_trainer, len(gpus))
    is_by_hand = "base_gpu_id" in {key.replace("-", "_") for key in server.sglang}
    if server.gpus and is_by_hand:
        raise SettingsError(
            "server.sglang.base_gpu_id with server.gpus: each server sees its own GPUs only, from "
            "0 on; leave one of them out"
        )
    if is_by_hand:
        num_for_servers = 0
    taken = set() if trainer.is_colocated else {*server.gpus, *trainer.gpus}
    free = [number for number in range(len(gpus)) if number not in taken]
    of_servers = server.gpus or _first(free, num_for_servers, "servers", len(gpus), settings)
    if not trainer.is_colocated:
        free = [number for number in free if number not in of_servers]
    of_trainer = trainer.gpus or _first(free, num_for_trainer, "trainer", len(gpus), settings)
    shared = sorted({*of_servers} & {*of_trainer})
    if shared and not trainer.is_colocated:
        raise SettingsError(
            f"server.gpus={list(of_servers)} and trainer.gpus={list(of_trainer)} share "
            f"{shared}: weights, gradients and a server's cache would not fit beside each other. "
            "Give them GPUs of their own, or set trainer.is_colocated = true"
        )
    lonely = sorted({*of_servers} - {*of_trainer}) if of_trainer else []
    if settings.publish.transport == "cuda_ipc" and has_servers and has_trainer and lonely:
        raise SettingsError(
            f'publish.transport="cuda_ipc" with servers on GPUs {lonely}, where no trainer rank '
            "is: weights are handed over on the GPU that both are on. Give the trainer a rank on "
            'each (trainer.num_ranks, trainer.gpus), or set publish.transport="shared_memory"'
        )
    servers: list[tuple[int, ...] | None] = []
    for index in range(num_servers):
        own = of_servers[index * size : (index + 1) * size]
        servers.append(own if own or server.device == "cpu" else None)
    is_placed = bool(of_trainer) or trainer.device == "cpu"
    return GpuPlacement(
        gpus=tuple(gpus),
        servers=tuple(servers),
        trainer=of_trainer if is_placed else None,
    )


def _check_list(name: str, numbers: Sequence[int], wanted: int, num_gpus: int) -> None:
    if not numbers:
        return
    part = name.partition(".")[0]
    if len(numbers) != wanted:
        how = {
            "server": 'num_servers x tensor_parallel_size with server.device = "cuda"',
            "trainer": 'trainer.num_ranks with trainer.device = "cuda"',
        }[part]
        raise SettingsError(
            f"{name}={list(numbers)} names {len(numbers)} GPUs; {wanted} are needed ({how})"
        )
    if len(set(numbers)) != len(numbers):
        raise SettingsError(f"{name}={list(numbers)} names a GPU twice; each takes one process")
    wrong = [number for number in numbers if not 0 <= number < num_gpus]
    if wrong:
        there = f"0 to {num_gpus - 1} are" if num_gpus else "none is"
        raise SettingsError(f"{name}={list(numbers)}: GPU {wrong[0]} is not here; {there} allowed")


def _first(
    free: Sequence[int], wanted: int, part: str, num_gpus: int, settings: Settings
) -> tuple[int, ...]:
    if wanted > len(free):
        server, trainer = settings.server, settings.trainer
        raise SettingsError(
            f"{wanted} GPUs are needed for the {part}, and {len(free)} of {num_gpus} are free "
            f"(server.num_servers={server.num_servers} x server.tensor_parallel_size="
            f"{server.tensor_parallel_size}, trainer.num_ranks={trainer.num_ranks}). Lower one of "
            "them, or let them share with trainer.is_colocated = true"
        )
    return tuple(free[:wanted])
