"""Versions of the policy that a run keeps as Hugging Face folders: `versions/N` in its own.

They are for servers that hold one of them while the run goes on. The trainer writes and removes
them; a folder is there complete or not at all.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from outloop.buffer.settings.server import ServerSettings


def version_folder(run_dir: Path, policy_version: int) -> Path:
    """Where a version is kept."""
    return run_dir / "versions" / str(policy_version)


def kept_versions(run_dir: Path) -> list[int]:
    """Those that are there, oldest first."""
    folders = (run_dir / "versions").glob("*/config.json")
    return sorted(int(file.parent.name) for file in folders if file.parent.name.isdecimal())


def due_version(server: ServerSettings, run_dir: Path, index: int) -> int | None:
    """What server `index` of server.num_frozen is to hold; None: nothing is kept for it yet."""
    own = [version for version in kept_versions(run_dir) if server.holder_of(version) == index]
    return max(own, default=None)


def remove_needless(server: ServerSettings, run_dir: Path) -> None:
    """Remove what no server is to hold any more."""
    due = {due_version(server, run_dir, index) for index in range(server.num_frozen)}
    for version in kept_versions(run_dir):
        if version not in due:
            shutil.rmtree(version_folder(run_dir, version), ignore_errors=True)


def remove_from(run_dir: Path, policy_version: int) -> None:
    """Remove this version and later ones: a run never used their numbers before, so that they are
    another run's."""
    for version in kept_versions(run_dir):
        if version >= policy_version:
            shutil.rmtree(version_folder(run_dir, version), ignore_errors=True)
