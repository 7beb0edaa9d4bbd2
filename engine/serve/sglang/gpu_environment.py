"""Variables that SGLang's processes need on GPUs, and whether its memory saver can be loaded."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings
from outloop.engine.machine.gpu_libraries import libraries_of
from outloop.engine.machine.visible_gpus import VISIBLE, list_gpus, visible_gpus
from outloop.engine.serve.sglang.cpu_environment import find_python

_CUDA_FOLDERS = (Path("/usr/local/cuda/lib64"),)
_ASK_TIMEOUT_S = 120.0
_NVIDIA_PACKAGES = """\
from importlib.util import find_spec
spec = find_spec("nvidia")
print(*(spec.submodule_search_locations if spec else ()), sep="\\n")
"""
_PRELOADED = """\
import subprocess, sys, torch_memory_saver
with torch_memory_saver.configure_subprocess():
    sys.exit(subprocess.run([sys.executable, "-c", "pass"]).returncode)
"""
"""SGLang starts its schedulers in the same way."""


def gpu_environment(settings: Settings, environment: Mapping[str, str]) -> dict[str, str]:
    """Give the variables of SGLang's processes on GPUs, beside those of `environment`.

    Raises:
        SettingsError: server.sglang_python is not a program.
    """
    added = _numbered(environment)
    if saves_memory(settings):
        # Without it CUDA graphs stay when memory is released.
        added["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = environment.get(
            "SGLANG_MEMORY_SAVER_CUDA_GRAPH", "1"
        )
        folders = _cuda_runtimes(find_python(settings.server.sglang_python))
        given = environment.get("LD_LIBRARY_PATH", "")
        path = ":".join(filter(None, (given, *map(str, folders))))
        if path:
            added["LD_LIBRARY_PATH"] = path
    return added


def saves_memory(settings: Settings) -> bool:
    """Whether SGLang is started with its memory saver."""
    if not settings.server.device.startswith("cuda"):
        return False
    table = {key.replace("-", "_"): value for key, value in settings.server.sglang.items()}
    return bool(table.get("enable_memory_saver", settings.trainer.is_colocated))


def refuse_torch_without_cuda(settings: Settings) -> None:
    """Refuse servers on GPUs in an environment whose torch is the CPU's.

    Raises:
        SettingsError: it is, or server.sglang_python is not a program.
    """
    if not settings.server.device.startswith("cuda"):
        return
    python = find_python(settings.server.sglang_python)
    found = libraries_of(python)
    if found.torch and not found.cuda:
        raise SettingsError(
            f"server.device={settings.server.device!r} with server.sglang_python={str(python)!r}: "
            f"its torch {found.torch} has no CUDA. Give the python of an environment with SGLang "
            "for GPUs (docs/servers.md)"
        )


def check_memory_saver(settings: Settings, environment: Mapping[str, str]) -> None:
    """Start a process as SGLang starts its schedulers: with the memory saver preloaded.

    A library that cannot be loaded ends each of them before it imports anything.

    Args:
        environment: of SGLang's processes.

    Raises:
        SettingsError: the process ended; the sentence has what the loader said.
    """
    python = find_python(settings.server.sglang_python)
    try:
        answer = _ask(python, _PRELOADED, environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SettingsError(f"{str(python)!r} cannot be asked: {error}") from error
    if answer.returncode != 0:
        said = (answer.stderr.strip().splitlines() or [f"exit_code={answer.returncode}"])[-1]
        raise SettingsError(
            f"the memory saver of {str(python)!r} cannot be loaded: {said}. Colocated servers need "
            "torch_memory_saver, libcudart of its release of CUDA and the driver's libcuda; put "
            "the folder of a missing library into LD_LIBRARY_PATH, or install the package"
        )


def _numbered(environment: Mapping[str, str]) -> dict[str, str]:
    """Name the visible GPUs by number: with several ranks SGLang reads CUDA_VISIBLE_DEVICES as
    numbers in the driver's order. A name without a number, that of a slice of a GPU, leaves all as
    they are."""
    if all(name.isdecimal() for name in visible_gpus(environment)):
        return {}
    numbers = [gpu.index for gpu in list_gpus(environment)]
    if any(number is None for number in numbers):
        return {}
    return {
        VISIBLE: ",".join(str(number) for number in numbers),
        # CUDA's own order begins with the fastest GPU.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }


def _cuda_runtimes(python: Path) -> list[Path]:
    """Folders with a libcudart. An environment made by pip has it in a folder that only torch
    knows, and a library that is preloaded is resolved before torch is there."""
    try:
        packages = _ask(python, _NVIDIA_PACKAGES).stdout.split("\n")
    except (OSError, subprocess.TimeoutExpired):
        packages = []
    folders = [lib for name in packages if name for lib in sorted(Path(name).glob("*/lib"))]
    return [lib for lib in (*folders, *_CUDA_FOLDERS) if any(lib.glob("libcudart.so*"))]


def _ask(
    python: Path, code: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), "-P", "-c", code],
        env=None if environment is None else dict(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_ASK_TIMEOUT_S,
        check=False,
    )
