"""A disk without room for a server's data, and room again.

Owns: a file system of its own in memory where this user may mount one, else a limit on the size of
the server's files. Does not own: the server. Invariant: after the block nothing is mounted.
"""

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outloop.buffer.redis.embedded import SERVER_VARIABLE, find_server

_SIZE_MB = 32


class SmallDisk:
    """`folder` has room until `fill`, and again from `make_room` on."""

    def __init__(self, folder: Path, *, is_mounted: bool) -> None:
        self.folder = folder
        self._is_mounted = is_mounted
        self._ballast = folder / "ballast"
        self._limited: list[int] = []

    def fill(self, pid: int | None = None) -> None:
        """Not a byte more fits; of a limit on files, `pid` alone notices."""
        if not self._is_mounted:
            assert pid is not None
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
            self._limited.append(pid)
            return
        with self._ballast.open("wb", buffering=0) as file:
            for size in (2**20, 2**12, 1):
                try:
                    while file.write(bytes(size)):
                        pass
                except OSError:
                    continue

    def make_room(self) -> None:
        """Files may grow again."""
        self._ballast.unlink(missing_ok=True)
        for pid in self._limited:
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
        self._limited.clear()


@contextmanager
def small_disk(folder: Path, patch: pytest.MonkeyPatch, *, mounts: bool) -> Iterator[SmallDisk]:
    """Makes the folder, before a server is started there; skips the test where it `mounts` and may
    not."""
    folder.mkdir(parents=True)
    if not mounts:
        program = folder.parent / "server-that-lives-on"
        # The signal of a file that is too long would end the server; a full disk sends none.
        program.write_text(f"#!/bin/sh\ntrap '' XFSZ\nexec '{find_server()}' \"$@\"\n")
        program.chmod(0o755)
        patch.setenv(SERVER_VARIABLE, str(program))
        yield SmallDisk(folder, is_mounted=False)
        return
    if not can_mount():
        pytest.skip("mounting a file system needs root")
    words = ("mount", "-t", "tmpfs", "-o", f"size={_SIZE_MB}m,mode=700", "outloop-test")
    subprocess.run([*words, str(folder)], check=True)
    try:
        yield SmallDisk(folder, is_mounted=True)
    finally:
        # Whoever still has files there keeps them.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def can_mount() -> bool:
    """Whether this user may mount a file system here: not in most containers."""
    if os.geteuid() != 0:
        return False
    words = ("unshare", "--mount", "mount", "-t", "tmpfs", "outloop-test", "/mnt")
    try:
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
