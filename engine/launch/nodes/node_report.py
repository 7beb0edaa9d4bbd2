"""`python -m outloop.engine.launch.nodes.node_report --parts PARTS SETTINGS_JSON`: a node as it is.

Prints one NodeReport. It changes nothing on the node and imports torch and the user's code in
processes of their own.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import click

from outloop.buffer.settings import Settings, build_settings
from outloop.engine.launch.deploy.parts import gpus_of_server, gpus_of_trainer_node
from outloop.engine.launch.deploy.run_nodes import CONTROL
from outloop.engine.launch.doctor import examine_machine
from outloop.engine.launch.finding import Finding, bad, good
from outloop.engine.launch.nccl_release import uses_nccl
from outloop.engine.launch.nodes.answers import FolderIdentity, NodeReport, line_of
from outloop.engine.launch.run_readiness import examine_run
from outloop.engine.machine.gpu_libraries import libraries_of
from outloop.engine.machine.visible_gpus import list_gpus
from outloop.engine.serve.sglang.cpu_environment import find_python

SERVERS_NCCL = "NCCL of server.sglang_python"
_SHORT_FILE_BYTES = 1_000_000
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def report_node(settings: Settings, parts: Sequence[str]) -> NodeReport:
    """What this node is for a run whose `parts` would be here."""
    has_routers = CONTROL in parts
    return NodeReport(
        machine=_BOOT_ID.read_text().strip() if _BOOT_ID.exists() else platform.node(),
        findings=(
            *examine_machine(has_redis=has_routers and settings.buffer.redis_url is None),
            *_gpus(settings, parts),
            *examine_run(settings, has_routers=has_routers),
        ),
        releases=_releases(settings),
        run_folder=identity_of(settings.run.dir / settings.run.name),
        model=_fingerprint(settings.model.path),
    )


def _gpus(settings: Settings, parts: Sequence[str]) -> list[Finding]:
    """Whether the engine gives the node's part its GPUs; a part without is not reported."""
    of_part = {"trainer": gpus_of_trainer_node, "server": gpus_of_server}
    part = next((part for part in of_part if part in parts), None)
    wanted = of_part[part](settings) if part else 0
    if not wanted:
        return []
    there = len(list_gpus())
    found = f"{there} given, {wanted} for the {part}"
    if there >= wanted:
        return [good("GPUs", found)]
    return [bad("GPUs", found, "see what the engine knows of the node's GPUs, and its driver")]


def _releases(settings: Settings) -> dict[str, str]:
    own = libraries_of(Path(sys.executable))
    found = {
        "Python": platform.python_version(),
        "outloop": metadata.version("outloop"),
        "torch": own.torch,
        "megatron-core": _installed("megatron-core"),
        "NCCL": own.nccl,
    }
    if uses_nccl(settings):
        found[SERVERS_NCCL] = libraries_of(find_python(settings.server.sglang_python)).nccl
    return found


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def identity_of(folder: Path) -> FolderIdentity:
    """That of a folder, or of the nearest one above it that is there."""
    path = folder.absolute()
    while not path.exists():
        path = path.parent
    return FolderIdentity(
        path=str(path), inode=path.stat().st_ino, filesystem=_filesystem(path.resolve())
    )


def _filesystem(path: Path) -> str:
    """The kind of the mount that a path is in; empty where the system does not say."""
    mounts = Path("/proc/self/mounts")
    best, kind = Path(), ""
    for line in mounts.read_text().splitlines() if mounts.exists() else []:
        _, place, found, *_ = line.split(" ")
        # Spaces and the like are written as octal numbers.
        mount = Path(os.fsdecode(place.encode().decode("unicode_escape").encode("latin-1")))
        if path.is_relative_to(mount) and len(mount.parts) >= len(best.parts):
            best, kind = mount, found
    return kind


def _fingerprint(folder: Path) -> str:
    if not folder.is_dir():
        return ""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        if size <= _SHORT_FILE_BYTES:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@click.command()
@click.option("--parts", required=True, help="That would be on this node, with commas.")
@click.argument("settings_json")
def main(parts: str, settings_json: str) -> None:
    """Print what this node is for a run of these settings."""
    settings = build_settings(json.loads(settings_json), source="settings")
    sys.stdout.write(line_of(report_node(settings, parts.split(","))))


if __name__ == "__main__":
    main()
