"""A copy of the archive in an object store, or in any folder that fsspec knows.

The store holds what the archive's folder holds, and the manifest last: whoever reads the store
finds each file that its manifest names. Copying again after a kill, or after the store was away,
copies what is missing. The run never waits for the store.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import structlog

from outloop.buffer.errors import Conflict, NotFound, SettingsError
from outloop.buffer.trajectories.folder import FOLDER, MANIFEST, read_manifest
from outloop.buffer.trajectories.steps import STEPS
from outloop.buffer.trajectories.trained import TRAINED
from outloop.buffer.trajectories.vocabulary import VOCABULARY
from outloop.buffer.whole_file import whole_file

_BESIDE = ("metrics.jsonl", "events.jsonl")
"""What `outloop view` shows besides the archive."""
_KINDS = ("episodes", "turns")
_INTERVAL_S = 15.0
_CLOSE_S = 120.0
_log = structlog.get_logger()


class ObjectStore:
    """The folder at `url`, into which one run's archive is copied, or from which it is read."""

    def __init__(self, url: str) -> None:
        """Raises SettingsError if fsspec is not installed, or does not know the URL."""
        try:
            from fsspec.core import url_to_fs

            self._files, self._root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise SettingsError(
                f"trajectories.copy_to={url!r}: {error}; give a URL that fsspec knows, such as "
                "s3://BUCKET/FOLDER with the packages fsspec and s3fs, or file:///FOLDER"
            ) from error
        self._url = url

    def update(self, run_dir: Path) -> int:
        """Make the store hold what the archive of `run_dir` holds now; how many files were copied.

        Raises:
            Exception: what the store's own package raises; the store is whole as it was before.
        """
        source = run_dir / FOLDER
        manifest = read_manifest(source)
        parts = [f"{kind}-{one.name}.parquet" for one in manifest.parts for kind in _KINDS]
        trained = [f"{TRAINED}/{path.name}" for path in (source / TRAINED).glob("*.parquet")]
        names = [f"{FOLDER}/{name}" for name in (*parts, *trained, VOCABULARY, STEPS)]
        there = self._sizes()
        copied = 0
        for name in (*names, *_BESIDE):
            path = run_dir / name
            if path.exists() and path.stat().st_size != there.get(name):
                self._make_folder(name)
                # A copy of a file that grows is as long as the file was.
                self._files.pipe_file(f"{self._root}/{name}", path.read_bytes())
                copied += 1
        last = f"{FOLDER}/{MANIFEST}"
        self._make_folder(last)
        self._files.pipe_file(f"{self._root}/{last}", msgspec.json.encode(manifest))
        # Readers of the manifest before may be reading what is obsolete.
        old = {
            f"{FOLDER}/{kind}-{one.name}.parquet" for one in manifest.obsolete for kind in _KINDS
        }
        kept = {*names, *old, last}
        for name in there:
            if name.startswith(f"{FOLDER}/") and name not in kept:
                self._files.rm_file(f"{self._root}/{name}")
        return copied

    def fetch(self, run_dir: Path) -> int:
        """Copy what the store holds into `run_dir`; how many files those are.

        Raises:
            Conflict: `run_dir` is the folder of a run, whose own archive would be lost.
            NotFound: the store holds no archive.
        """
        if (run_dir / "run.json").exists():
            raise Conflict(
                f"run_dir={str(run_dir)!r} is the folder of a run, which has an archive of its "
                "own; give a new folder"
            )
        there = self._sizes()
        last = f"{FOLDER}/{MANIFEST}"
        if last not in there:
            raise NotFound(
                f"url={self._url!r} holds no {last}; give the URL of trajectories.copy_to"
            )
        names = [*(name for name in there if name != last), last]
        for name in names:
            path = run_dir / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as writing:
                writing.write_bytes(self._files.cat_file(f"{self._root}/{name}"))
        return len(names)

    def _sizes(self) -> dict[str, int]:
        """Name below the root -> bytes."""
        self._files.invalidate_cache()
        found: dict[str, Any] = self._files.find(self._root, detail=True)
        root = self._root.rstrip("/") + "/"
        return {path.removeprefix(root): int(facts["size"]) for path, facts in found.items()}

    def _make_folder(self, name: str) -> None:
        self._files.makedirs(f"{self._root}/{name}".rpartition("/")[0], exist_ok=True)


@contextmanager
def copied_to(url: str | None, run_dir: Path) -> Iterator[None]:
    """Copy the archive of `run_dir` to `url` again and again, beside what is done inside `with`.

    At the end once more, for two minutes at most. None: nothing is copied.

    Raises:
        SettingsError: `url` is not known.
    """
    if url is None:
        yield
        return
    store, stop = ObjectStore(url), threading.Event()

    def work() -> None:
        is_last = False
        while not is_last:
            is_last = stop.wait(_INTERVAL_S)
            try:
                store.update(run_dir)
            except Exception as error:  # noqa: BLE001 - each store's package raises its own
                _log.warning("archive_copy_waits", url=url, reason=str(error))

    # A store that hangs must not keep the process.
    copier = threading.Thread(target=work, name="archive-copier", daemon=True)
    copier.start()
    try:
        yield
    finally:
        stop.set()
        copier.join(_CLOSE_S)
        if copier.is_alive():
            _log.warning("archive_copy_not_complete", url=url, waited_s=_CLOSE_S)
