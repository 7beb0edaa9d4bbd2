"""Which GPUs this process was given, and what the driver says of them. Nothing here touches one."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

VISIBLE = "CUDA_VISIBLE_DEVICES"
_QUERY = (
    "--query-gpu=index,uuid,name,memory.total,compute_cap,pci.bus_id",
    "--format=csv,noheader,nounits",
)
_QUERY_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One device; `id` is what CUDA_VISIBLE_DEVICES takes."""

    id: str
    name: str = ""
    memory_mb: int = 0
    generation: int | None = None
    """The first number of its compute capability: 8 Ampere, 9 Hopper, 10 and up Blackwell."""
    index: int | None = None
    """Its number in the driver's order, that of the bus; None where not known."""
    pci: str = ""
    """Its address on the bus as the kernel writes it, 0000:3b:00.0; empty where not known."""


def visible_gpus(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES names, in its order; empty where it is not set."""
    return tuple(name.strip() for name in environment.get(VISIBLE, "").split(",") if name.strip())


def own_gpu(environment: Mapping[str, str] = os.environ) -> str:
    """The one of this rank of torchrun's; empty where none is known."""
    gpus, rank = visible_gpus(environment), int(environment.get("LOCAL_RANK", "0"))
    return gpus[rank] if rank < len(gpus) else ""


def list_gpus(environment: Mapping[str, str] = os.environ) -> tuple[Gpu, ...]:
    """The GPUs that a process with this environment sees; none without NVIDIA's driver."""
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    found: list[tuple[str, Gpu]] = []
    if program is not None:
        answer = subprocess.run(
            [program, *_QUERY],
            capture_output=True,
            text=True,
            timeout=_QUERY_TIMEOUT_S,
            check=False,
        )
        lines = answer.stdout.splitlines() if answer.returncode == 0 else []
        for fields in (line.split(", ") for line in lines):
            if len(fields) >= 4:
                index, uuid, name, memory, *rest = fields
                size = int(memory) if memory.isdecimal() else 0
                major = rest[0].partition(".")[0] if rest else ""
                generation = int(major) if major.isdecimal() else None
                pci = _kernel_address(rest[1]) if len(rest) > 1 else ""
                number = int(index) if index.isdecimal() else None
                gpu = Gpu(
                    id=uuid,
                    name=name,
                    memory_mb=size,
                    generation=generation,
                    index=number,
                    pci=pci,
                )
                found.append((index, gpu))
    if VISIBLE not in environment:
        return tuple(gpu for _, gpu in found)
    by_name = dict(found) | {gpu.id: gpu for _, gpu in found}
    return tuple(by_name.get(name, Gpu(id=name)) for name in visible_gpus(environment))


def _kernel_address(bus_id: str) -> str:
    """The driver writes 00000000:3B:00.0, the kernel 0000:3b:00.0."""
    domain, _, rest = bus_id.strip().lower().partition(":")
    return f"{domain[-4:]}:{rest}" if rest else ""
