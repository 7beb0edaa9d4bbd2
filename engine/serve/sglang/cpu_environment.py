"""The Python environment in which SGLang runs without a GPU, apart from the trainer's.

It is a folder in the cache, used only once it is complete; other pins make another folder. SGLang
pins other releases of transformers, openai and more than the trainer does. What it needs without a
GPU is in requirements-cpu.txt; the four packages below come without their dependencies, which would
bring CUDA or PyTorch 2.14.1.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

from packaging.requirements import Requirement
from rich.console import Console

from outloop.buffer.errors import SettingsError
from outloop.buffer.rich_terminal import show

SGLANG_VERSION = "0.5.23"
_REQUIREMENTS = Path(__file__).with_name("requirements-cpu.txt")
_WITHOUT_DEPENDENCIES = (
    f"sglang=={SGLANG_VERSION}",
    "torchvision==0.28.0",
    "triton==3.7.0",
    "xgrammar==0.2.7",
)
_COMPLETE = "complete"


def shims_folder() -> Path:
    """What is put on SGLang's PYTHONPATH where there is no GPU."""
    return Path(__file__).parent / "shims"


def cpu_requirements() -> tuple[str, ...]:
    """What SGLang imports without a GPU, PyTorch first."""
    lines = (line.partition("#")[0].strip() for line in _REQUIREMENTS.read_text().splitlines())
    found = [str(Requirement(line)) for line in lines if line]
    return tuple(sorted(found, key=lambda line: (not line.startswith("torch="), line)))


def cache_folder() -> Path:
    """`$OUTLOOP_CACHE_DIR`, or `outloop` in the user's cache."""
    given = os.environ.get("OUTLOOP_CACHE_DIR")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outloop"


def cpu_environment() -> Path:
    """Where the environment of today's pins lies or would lie."""
    pins = "\n".join((*cpu_requirements(), *_WITHOUT_DEPENDENCIES, sys.version.split()[0]))
    key = hashlib.sha256(pins.encode()).hexdigest()[:12]
    return cache_folder() / f"sglang-{SGLANG_VERSION}-{key}"


def find_python(given: Path | None) -> Path:
    """The interpreter that SGLang runs under: `given`, or that of the CPU environment.

    Raises:
        SettingsError: no such interpreter exists.
    """
    if given is not None:
        if not os.access(given, os.X_OK):
            raise SettingsError(
                f"server.sglang_python={str(given)!r} is not a program; "
                "give the python of an environment that holds SGLang"
            )
        return given
    folder = cpu_environment()
    if not (folder / _COMPLETE).is_file():
        raise SettingsError(
            f'server.kind="sglang" needs SGLang {SGLANG_VERSION}, and there is no environment at '
            f"{str(folder)!r}; run `make venv-sglang`, or set server.sglang_python to the python "
            "of an environment that holds it"
        )
    return folder / "bin" / "python"


def build(console: Console) -> Path:
    """Make the CPU environment unless it is there; about 2.5 GB. Returns its folder.

    Raises:
        SettingsError: a package could not be installed.
    """
    folder = cpu_environment()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        # Another process that builds it is waited for: its lock ends with it.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / _COMPLETE).is_file():
            return folder
        show(console, f"building {folder} (about 2.5 GB, once)")
        venv.EnvBuilder(with_pip=True, clear=False, symlinks=True).create(folder)
        required = cpu_requirements()
        torch = [line for line in required if line.startswith("torch=")]
        _install(console, folder, "PyTorch", *torch, *os.environ.get("TORCH_PIP_ARGS", "").split())
        _install(console, folder, "what SGLang imports", *required)
        _install(console, folder, "SGLang", "--no-deps", *_WITHOUT_DEPENDENCIES)
        (folder / _COMPLETE).touch()
    return folder


def _install(console: Console, folder: Path, what: str, *arguments: str) -> None:
    with console.status(f"installing {what}"):
        answer = subprocess.run(
            [
                *(str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"),
                *("--disable-pip-version-check", *arguments),
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    if answer.returncode != 0:
        raise SettingsError(
            f"pip could not install {what} into {str(folder)!r}:\n{answer.stderr[-2000:]}"
        )


if __name__ == "__main__":
    print(build(Console(stderr=True)))  # noqa: T201
