"""Trainer and servers whose releases of NCCL differ are refused before anything starts.

Another environment is a program that answers as its torch would; real ones differ in gigabytes.
"""

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from outloop.buffer.errors import SettingsError
from outloop.buffer.records import Libraries
from outloop.buffer.settings import Settings
from outloop.engine.launch.doctor import examine
from outloop.engine.launch.nccl_release import check_nccl
from outloop.engine.machine.gpu_libraries import libraries_of, own_libraries
from outloop.engine.machine.gpu_library_probe import release_in

GPU = {"kind": "sglang", "device": "cuda", "dtype": "bfloat16"}


@pytest.fixture
def python_with(tmp_path: Path) -> Callable[[str], Path]:
    """An interpreter whose torch has this release of NCCL: `python_with("2 30 7")`."""

    def make(release: str) -> Path:
        path = tmp_path / f"python-{release.replace(' ', '.')}"
        told = json.dumps({"torch": "2.13.0", "cuda": "13.0", "nccl": release.replace(" ", ".")})
        path.write_text(f"#!/bin/sh\necho of others\necho 'OUTLOOP-LIBRARIES {told}'\n")
        path.chmod(0o755)
        return path

    return make


def settings_of(python: Path, **publish: Any) -> Settings:
    """Of a run with one SGLang server in another environment."""
    return Settings(
        model={"path": "m"},
        server=GPU | {"sglang_python": python},
        publish={"transport": "collective"} | publish,
    )


@pytest.mark.medium
def test_a_release_is_what_torch_loads(python_with: Callable[[str], Path]) -> None:
    """Without CUDA there is none; a program that cannot be started has none that is known."""
    assert libraries_of(python_with("2 30 7")) == Libraries(
        torch="2.13.0", cuda="13.0", nccl="2.30.7"
    )
    assert libraries_of(python_with("")).nccl == ""
    assert libraries_of(Path("/nowhere/python")) == Libraries()
    assert libraries_of(Path(sys.executable)) == own_libraries()
    assert own_libraries().torch == torch.__version__


def test_another_release_is_refused_with_the_remedy(
    python_with: Callable[[str], Path],
) -> None:
    """Where weights go by NCCL only; what cannot be known is not refused."""
    ours = python_with("2 29 7")
    sentence = "the trainer has NCCL 2.29.7.* and .* NCCL 2.30.7.*nvidia-nccl-cu13==2.30.7"
    with pytest.raises(SettingsError, match=sentence):
        check_nccl(settings_of(python_with("2 30 7")), trainer_python=ours)
    check_nccl(settings_of(ours), trainer_python=ours)
    check_nccl(settings_of(python_with("")), trainer_python=ours)
    by_memory = settings_of(python_with("2 30 7"), transport="shared_memory")
    check_nccl(by_memory, trainer_python=ours)


def test_a_release_is_that_of_the_loaded_library() -> None:
    """Not what torch was compiled with: nvidia-nccl-cu13 is replaced beneath it."""

    class Library:
        def __init__(self, code: int, status: int = 0) -> None:
            self._code, self._status = code, status

        def ncclGetVersion(self, out: Any) -> int:  # noqa: N802 - NCCL's name
            out[0] = self._code
            return self._status

    assert release_in(Library(23007)) == "2.30.7"
    assert release_in(Library(22100)) == "2.21.0"
    assert release_in(Library(23007, status=3)) == ""


def test_doctor_says_who_sits_where_and_which_nccl(
    python_with: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """For a settings file, with the GPUs that the driver lists."""
    driver = tmp_path / "nvidia-smi"
    lines = "\n".join(f"{n}, GPU-{n}, NVIDIA H100, 81559" for n in range(2))
    driver.write_text(f"#!/bin/sh\ncat <<END\n{lines}\nEND\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    ours = python_with("2 29 7")

    def report(python: Path) -> str:
        console = Console(record=True, width=250, file=io.StringIO())
        examine(console, settings_of(python), trainer_python=ours)
        return re.sub(r"\s+", " ", console.export_text())

    same = report(ours)
    assert "2 x NVIDIA H100, 80 GiB" in same
    assert "server-0: GPU 0 (NVIDIA H100); trainer rank 0: GPU 1 (NVIDIA H100)" in same
    assert "2.29.7" in same
    assert "NCCL 2.30.7" in report(python_with("2 30 7"))
