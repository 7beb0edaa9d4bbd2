"""Revisions of a git repository as folders that sandboxes begin with.

A revision's folder holds its files and nothing of its history. Files that are equal in several
revisions are one file on disk, linked into each folder, so that many revisions cost what changed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

from outloop.buffer.errors import EnvironmentFailure, SettingsError
from outloop.buffer.owned_folder import OwnedFolder
from outloop.envs.sandbox.host_users import base_owner

_EXECUTABLE, _LINK, _SUBMODULE = "100755", "120000", "160000"


class Repository:
    """A git repository, and a store of folders of its revisions.

    Several processes may use one store; a folder appears in it whole or not at all.

    Args:
        path: the repository, with a work tree or bare.
        store: where the folders are kept. Every user can read it. A temporary folder, which `close`
            removes, when left out.

    Raises:
        SettingsError: git is not on PATH, or `path` is no repository.
    """

    def __init__(self, path: str | Path, store: str | Path | None = None) -> None:
        self._path = Path(path)
        if shutil.which("git") is None:
            raise SettingsError("there is no git on PATH; install the package git")
        self._git("rev-parse", "--git-dir")
        self._folder: OwnedFolder | None = None
        if store is None:
            self._folder = OwnedFolder("outloop-repository")
            store = self._folder.path
        self._store = Path(store).resolve()
        for folder in (self._store, self._store / "files", self._store / "revisions"):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o755)

    def folder(self, revision: str) -> Path:
        """The files of `revision`, any name that git knows; not to be changed.

        Raises:
            SettingsError: git does not know it, or it holds submodules.
            EnvironmentFailure: the folder cannot be written.
        """
        tree = self._git("rev-parse", "--verify", f"{revision}^{{tree}}").decode().strip()
        made = self._store / "revisions" / tree
        if not made.is_dir():
            try:
                self._make(tree, made)
            except OSError as error:
                raise EnvironmentFailure(f"revision={revision!r}: {error}") from error
        return made

    def names(self, revision: str) -> frozenset[str]:
        """The paths of its files and folders.

        Raises:
            SettingsError: git does not know the revision.
        """
        listed = self._git("ls-tree", "-r", "-t", "-z", "--name-only", "--full-tree", revision)
        return frozenset(os.fsdecode(name) for name in listed.split(b"\0")[:-1])

    def close(self) -> None:
        """Remove the store, if it is a temporary one."""
        if self._folder is not None:
            self._folder.close()

    def _make(self, tree: str, made: Path) -> None:
        listed = self._git("ls-tree", "-r", "-z", "--full-tree", tree).split(b"\0")[:-1]
        entries = [_Entry.read(line) for line in listed]
        for entry in entries:
            if entry.mode == _SUBMODULE:
                raise SettingsError(
                    f"repository={str(self._path)!r}: {entry.name!r} is a submodule; revisions "
                    "without submodules are allowed"
                )
        self._keep({(entry.blob, entry.mode) for entry in entries})
        half = made.with_name(f"{tree}.{uuid.uuid4().hex}")
        _new_folder(half)
        try:
            for entry in entries:
                path = half / entry.name
                for parent in reversed(Path(entry.name).parents):
                    if not (half / parent).is_dir():
                        _new_folder(half / parent)
                if entry.mode == _LINK:
                    path.symlink_to(os.fsdecode(self._kept(entry.blob, _LINK).read_bytes()))
                    _give(path)
                else:
                    _link(self._kept(entry.blob, entry.mode), path)
            half.rename(made)
        except OSError:
            if not made.is_dir():  # otherwise another process was faster
                raise
        finally:
            shutil.rmtree(half, ignore_errors=True)

    def _kept(self, blob: str, mode: str) -> Path:
        return self._store / "files" / (f"{blob}-x" if mode == _EXECUTABLE else blob)

    def _keep(self, wanted: set[tuple[str, str]]) -> None:
        """Put the blobs that the store lacks into it, by one process of git."""
        missing = sorted(one for one in wanted if not self._kept(*one).is_file())
        with tempfile.TemporaryFile() as asked:
            asked.write("".join(f"{blob}\n" for blob, _ in missing).encode())
            asked.seek(0)
            command = ["git", "-C", str(self._path), "cat-file", "--batch"]
            with subprocess.Popen(command, stdin=asked, stdout=subprocess.PIPE) as git:
                assert git.stdout is not None
                for blob, mode in missing:
                    # "BLOB blob SIZE", the content, and an end of line.
                    head = git.stdout.readline().split()
                    if len(head) != 3:
                        raise EnvironmentFailure(
                            f"repository={str(self._path)!r}: git does not give {blob}: {head}"
                        )
                    kept = self._kept(blob, mode)
                    half = kept.with_name(f"{kept.name}.{uuid.uuid4().hex}")
                    try:
                        half.write_bytes(git.stdout.read(int(head[2])))
                        git.stdout.read(1)
                        half.chmod(0o755 if mode == _EXECUTABLE else 0o644)
                        _give(half)
                        # A kept file is never replaced: Linux refuses a link to a file that loses
                        # its last name meanwhile, and equal files would be two on disk.
                        with contextlib.suppress(FileExistsError):
                            kept.hardlink_to(half)
                    finally:
                        half.unlink(missing_ok=True)

    def _git(self, *arguments: str) -> bytes:
        answer = subprocess.run(
            ["git", "-C", str(self._path), *arguments], capture_output=True, check=False
        )
        if answer.returncode:
            words = " ".join(answer.stderr.decode(errors="replace").split())
            raise SettingsError(f"repository={str(self._path)!r}: git {arguments[0]}: {words}")
        return answer.stdout


@dataclass(frozen=True, slots=True)
class _Entry:
    """A file of a tree."""

    name: str
    mode: str
    blob: str

    @classmethod
    def read(cls, line: bytes) -> _Entry:
        """A line of `git ls-tree -r -z`."""
        about, _, name = line.partition(b"\t")
        mode, _, blob = about.decode().split()
        return cls(os.fsdecode(name), mode, blob)


def _new_folder(path: Path) -> None:
    path.mkdir()
    path.chmod(0o755)
    _give(path)


def _link(kept: Path, path: Path) -> None:
    """Give a kept file the name `path`, or a copy of it where it has all the links it can have."""
    try:
        path.hardlink_to(kept)
    except OSError as error:
        if error.errno != errno.EMLINK:  # on ext4 at 65,000, which an empty file may reach
            raise
        shutil.copy(kept, path)
        _give(path)


def _give(path: Path) -> None:
    """Make it the owner's of such folders, so that a session needs a layer and no copy."""
    owner = base_owner()
    if owner is not None:
        os.chown(path, owner, owner, follow_symlinks=False)
