"""Releases of megatron-core that the trainer was tried with, and where they differ.

Everything that differs between them is here; names that one of them lacks are added by cpu_backend,
where they are not there. Nothing of megatron-core, nor torch, is imported with this module.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import partial
from importlib import metadata
from typing import Any

from outloop.buffer.errors import SettingsError

TRIED: Mapping[str, tuple[str, ...]] = {"0.16.1": ("3.11", "3.12"), "0.19.2": ("3.12",)}
"""Release -> releases of Python that the trainer's tests passed with."""


def installed_release() -> str:
    """What the package says of itself."""
    return metadata.version("megatron-core")


def check_release(installed: str) -> None:
    """Refuse a release that the replacements for the CPU were not compared with.

    Raises:
        SettingsError: names those that were.
    """
    if installed not in TRIED:
        python = ".".join(platform.python_version_tuple()[:2])
        best = [release for release, pythons in TRIED.items() if python in pythons]
        raise SettingsError(
            f"megatron-core=={installed} is installed; {' and '.join(TRIED)} are allowed. "
            f"Run: pip install megatron-core=={(best or list(TRIED))[-1]}"
        )


def parts_of(module: Any) -> Any:
    """The parts of a module's specification: 0.16 has a ModuleSpec, 0.19 a partial constructor."""
    if isinstance(module, partial):
        return module.keywords["submodules"]
    return module.submodules
