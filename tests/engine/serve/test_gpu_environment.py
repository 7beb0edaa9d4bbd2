"""What SGLang's processes are told of GPUs, and whether they can load its memory saver.

The driver is a program that lists GPUs. The loader and the libraries are real ones: the memory
saver is a library of numpy's, moved away from the one that it needs.
"""

import io
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from rich.console import Console

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings
from outloop.engine.launch.doctor import examine
from outloop.engine.serve.sglang.arguments import process_environment
from outloop.engine.serve.sglang.gpu_environment import refuse_torch_without_cuda

CUDA = {"kind": "sglang", "device": "cuda", "dtype": "bfloat16"}
NVIDIA_SMI = """#!/bin/sh
echo '0, GPU-aa, NVIDIA H100, 81559, 9.0, 00000000:1B:00.0'
echo '1, GPU-bb, NVIDIA H100, 81559, 9.0, 00000000:3B:00.0'
echo '2, GPU-cc, NVIDIA H100, 81559, 9.0, 00000000:5B:00.0'
"""
SAVER = """\
import contextlib, os

@contextlib.contextmanager
def configure_subprocess():
    os.environ["LD_PRELOAD"] = {library!r}
    yield
"""


@pytest.fixture(autouse=True)
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An nvidia-smi that lists three GPUs; no variable of CUDA is set."""
    folder = tmp_path / "driver"
    folder.mkdir()
    (folder / "nvidia-smi").write_text(NVIDIA_SMI)
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LD_LIBRARY_PATH", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def python_with(tmp_path: Path) -> Callable[..., Path]:
    """An interpreter with torch_memory_saver: `python_with(has_runtime=True)` beside the library
    that it needs, in a folder of NVIDIA's packages."""

    def make(*, has_runtime: bool) -> Path:
        packages = tmp_path / f"packages-{has_runtime}"
        lib = packages / "nvidia" / "cu13" / "lib"
        lib.mkdir(parents=True)
        (needed,) = numpy_library("libquadmath*").parent.glob("libquadmath*")
        if has_runtime:
            shutil.copy(needed, lib)
            (lib / "libcudart.so.13").touch()
        library = packages / "memory_saver.so"
        shutil.copy(numpy_library("libgfortran*"), library)
        (packages / "torch_memory_saver.py").write_text(SAVER.format(library=str(library)))
        python = packages / "python"
        python.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} "$@"\n')
        python.chmod(0o755)
        return python

    return make


def numpy_library(pattern: str) -> Path:
    """A library that numpy's wheel brings."""
    (found,) = Path(numpy.__file__).parent.with_name("numpy.libs").glob(pattern)
    return found


def environment_of(visible: str | None, monkeypatch: pytest.MonkeyPatch, **server: Any) -> Any:
    """The variables of SGLang's processes where the part sees these GPUs."""
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return process_environment(Settings(model={"path": "m"}, server=CUDA | server))


@pytest.mark.parametrize(
    ("visible", "numbers"),
    [
        ("GPU-bb,GPU-cc", "1,2"),
        ("GPU-cc,GPU-aa", "2,0"),
        ("GPU-bb", "1"),
        ("1,GPU-aa", "1,0"),
    ],
)
def test_sglang_reads_its_gpus_as_numbers(
    visible: str, numbers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the driver's order, which CUDA is told to take; the part itself keeps the names."""
    environment = environment_of(visible, monkeypatch)
    assert environment["CUDA_VISIBLE_DEVICES"] == numbers
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible


@pytest.mark.parametrize("visible", [None, "", "0,2", "MIG-1", "GPU-bb,MIG-1"])
def test_gpus_that_have_no_number_keep_their_names(
    visible: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers stay in the order that they were given for, and so does an environment without."""
    environment = environment_of(visible, monkeypatch)
    assert environment.get("CUDA_VISIBLE_DEVICES") == visible
    assert "CUDA_DEVICE_ORDER" not in environment


def test_a_server_on_the_cpu_is_told_nothing_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its variables name no GPU."""
    environment = environment_of("GPU-bb", monkeypatch, device="cpu", dtype="float32")
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-bb"
    assert "CUDA_DEVICE_ORDER" not in environment


def shared(python: Path, **sglang: Any) -> Settings:
    """A run whose server shares the trainer's GPU."""
    return Settings(
        model={"path": "m"},
        server=CUDA | {"sglang_python": python, "sglang": sglang},
        trainer={"is_colocated": True, "gpus": (0,), "num_ranks": 1},
        publish={"transport": "cuda_ipc"},
    )


def test_a_server_that_frees_memory_frees_its_graphs_and_finds_cudas_runtime(
    python_with: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By variables of SGLang's process; a server with a GPU of its own has neither."""
    python = python_with(has_runtime=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/given")
    environment = process_environment(shared(python))
    assert environment["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "1"
    given, added, *_ = environment["LD_LIBRARY_PATH"].split(":")
    assert (given, added) == ("/given", str(python.parent / "nvidia" / "cu13" / "lib"))
    apart = Settings(model={"path": "m"}, server=CUDA | {"sglang_python": python})
    environment = process_environment(apart)
    assert environment["LD_LIBRARY_PATH"] == "/given"
    assert "SGLANG_MEMORY_SAVER_CUDA_GRAPH" not in environment
    by_hand = apart.server.model_copy(update={"sglang": {"enable-memory-saver": True}})
    asked = apart.model_copy(update={"server": by_hand})
    assert process_environment(asked)["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "1"


@pytest.mark.parametrize("has_runtime", [True, False])
def test_doctor_loads_the_memory_saver(has_runtime: bool, python_with: Callable[..., Path]) -> None:
    """As SGLang does for its schedulers; a library that is missing is named."""
    console = Console(record=True, width=400, file=io.StringIO())
    examine(console, shared(python_with(has_runtime=has_runtime)))
    said = re.sub(r"\s+", " ", console.export_text())
    assert ("memory saver │ can be loaded" in said) is has_runtime
    assert ("libquadmath" in said and "LD_LIBRARY_PATH" in said) is not has_runtime


def test_servers_on_gpus_need_a_torch_with_cuda() -> None:
    """That of this environment may have none: then it is refused before SGLang is asked."""
    server = CUDA | {"sglang_python": Path(sys.executable)}
    if torch.version.cuda is not None:
        refuse_torch_without_cuda(Settings(model={"path": "m"}, server=server))
        return
    with pytest.raises(SettingsError, match=r"has no CUDA.*docs/servers\.md"):
        refuse_torch_without_cuda(Settings(model={"path": "m"}, server=server))
    refuse_torch_without_cuda(
        Settings(model={"path": "m"}, server=server | {"device": "cpu", "dtype": "float32"})
    )
