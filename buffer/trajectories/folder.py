"""The files of the archive, and the manifest that says which of them count.

A part is a pair of Parquet files, `episodes-NAME.parquet` and `turns-NAME.parquet`. A part counts
when `manifest.json` names it; the manifest is replaced by a rename, after the files of its parts
are on disk. So a writer that is killed at any point leaves the archive as it was before, or after;
what the manifest does not name is removed by the next writer. Readers need nothing but the folder.
"""

from __future__ import annotations

import fcntl
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from outloop.buffer.errors import Conflict, SchemaMismatch

FOLDER = "trajectories"
"""Inside the folder of a run."""
MANIFEST = "manifest.json"
SCHEMA = 1
_OBSOLETE_S = 120.0
"""How long files stay that a new manifest names no more: readers may be reading them."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A pair of files."""

    name: str
    first: int
    """Number of its first entry of the queue; `last` is that of its last one."""
    last: int
    level: int = 0
    """How many times it was merged from smaller parts."""
    num_episodes: int
    num_tokens: int
    num_bytes: int
    first_ended_at: float
    last_ended_at: float


class _Obsolete(msgspec.Struct, frozen=True):
    name: str
    since: float


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The parts that count, oldest first."""

    schema: int = SCHEMA
    parts: tuple[Part, ...] = ()
    obsolete: tuple[_Obsolete, ...] = ()
    """Parts that do not count any more and are removed soon."""
    num_removed: int = 0
    """Episodes that retention removed."""


def read_manifest(folder: Path) -> Manifest:
    """The manifest of an archive; an empty one if there is no archive yet.

    Raises:
        SchemaMismatch: written by another release.
    """
    try:
        data = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        return Manifest()
    manifest = msgspec.json.decode(data, type=Manifest)
    if manifest.schema != SCHEMA:
        raise SchemaMismatch(
            f"{folder / MANIFEST} was written with schema={manifest.schema}, this release reads "
            f"schema={SCHEMA}; read it with the release that wrote it"
        )
    return manifest


def part_paths(folder: Path, part: Part) -> tuple[Path, Path]:
    """(episodes, turns)."""
    return _paths(folder, part.name)


def _paths(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"episodes-{name}.parquet", folder / f"turns-{name}.parquet"


class Folder:
    """The archive's folder, for the one process that writes it; see `writing`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self._remove_unnamed()

    def new_name(self, first: int) -> str:
        """A name for the files of a part."""
        return f"{first:010d}-{uuid.uuid4().hex[:8]}"

    def write_files(self, name: str, write: Callable[[Path, Path], None]) -> int:
        """Have `write(episodes, turns)` write a part's files; returns their bytes.

        They are on disk afterwards, and do not count before the manifest names them.

        Raises:
            OSError: they cannot be written; nothing is left of them.
        """
        paths = _paths(self.folder, name)
        try:
            write(*paths)
            for path in paths:
                _sync(path)
        except OSError:
            self._remove(name)
            raise
        return sum(path.stat().st_size for path in paths)

    def commit(self, parts: Sequence[Part], *, num_removed: int = 0) -> None:
        """From now on exactly `parts` count."""
        now = time.time()
        kept = {part.name for part in parts}
        gone = [_Obsolete(p.name, now) for p in self.manifest.parts if p.name not in kept]
        old = [one for one in self.manifest.obsolete if now - one.since < _OBSOLETE_S]
        for one in self.manifest.obsolete:
            if one not in old:
                self._remove(one.name)
        manifest = Manifest(
            parts=tuple(parts),
            obsolete=(*old, *gone),
            num_removed=self.manifest.num_removed + num_removed,
        )
        temporary = self.folder / f"{MANIFEST}.tmp"
        temporary.write_bytes(msgspec.json.encode(manifest))
        _sync(temporary)
        temporary.replace(self.folder / MANIFEST)
        _sync(self.folder)
        self.manifest = manifest

    def _remove(self, name: str) -> None:
        for path in _paths(self.folder, name):
            path.unlink(missing_ok=True)

    def _remove_unnamed(self) -> None:
        """What a writer left that was killed."""
        named = {part.name for part in self.manifest.parts}
        named |= {one.name for one in self.manifest.obsolete}
        for path in self.folder.glob("*-*.parquet"):
            if path.stem.partition("-")[2] not in named:
                path.unlink()


@contextmanager
def writing(folder: Path) -> Iterator[Folder]:
    """The folder, made if it is not there, and locked against other writers on this machine.

    Raises:
        Conflict: another process writes it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Conflict(
                f"folder={str(folder)!r} is written by another archiver; stop that one"
            ) from error
        yield Folder(folder)
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
