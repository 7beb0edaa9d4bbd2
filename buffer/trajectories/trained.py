"""What an update gave each token: written by the trainer beside the archive, a file for a version.

A policy_version is never used twice, so the file of an episode's `trained_version` is that of the
update that trained it. The files are for people: losing one loses nothing of the run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outloop.buffer.records import Float32
from outloop.buffer.settings.trajectories import TrajectorySettings
from outloop.buffer.trajectories.folder import FOLDER
from outloop.buffer.whole_file import whole_file

TRAINED = "trained"
"""The folder inside that of the archive."""


def keeps_trajectories(settings: TrajectorySettings) -> bool:
    """Whether a run keeps them: its settings want it, and pyarrow is there."""
    return settings.enabled is not False and importlib.util.find_spec("pyarrow") is not None


def trained_path(archive: Path, policy_version: int) -> Path:
    """The file of the update whose weights were published as `policy_version`."""
    return archive / TRAINED / f"{policy_version:010d}.parquet"


def write_trained(
    run_dir: Path,
    policy_version: int,
    *,
    episode_ids: Sequence[str],
    branches: Sequence[int],
    starts: Sequence[int],
    trained: np.ndarray[Any, np.dtype[np.bool_]],
    advantages: Float32,
    policy_logprobs: Float32,
) -> None:
    """Write the rows of an update.

    Args:
        episode_ids, branches: [R]: whose branch, by `Trajectory.branches()`, a row is.
        starts: [R + 1]: row r is tokens starts[r] to starts[r + 1].
        trained: [T] bool: tokens with loss.
        advantages: [T] float32.
        policy_logprobs: [T] float32: before the update; NaN where no update trained the token.

    Raises:
        OSError: it cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    offsets = pa.array(np.asarray(starts, np.int64))
    table = pa.table(
        {
            "episode_id": pa.array(episode_ids, pa.string()),
            "branch": pa.array(branches, pa.int32()),
            "trained": pa.LargeListArray.from_arrays(offsets, pa.array(trained)),
            "advantages": pa.LargeListArray.from_arrays(offsets, pa.array(advantages)),
            "policy_logprobs": pa.LargeListArray.from_arrays(
                offsets, pa.array(policy_logprobs, mask=np.isnan(policy_logprobs))
            ),
        }
    )
    path = trained_path(run_dir / FOLDER, policy_version)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as writing:
        pq.write_table(table, writing, compression="zstd", row_group_size=256)


def read_trained(archive: Path, policy_version: int, episode_id: str) -> list[dict[str, Any]]:
    """The rows of an episode: branch, trained [T], advantages [T] and, but for archives of older
    releases, policy_logprobs [T]; none if there is no file."""
    import pyarrow.parquet as pq

    path = trained_path(archive, policy_version)
    if not path.exists():
        return []
    found: list[dict[str, Any]] = pq.read_table(
        path, filters=[("episode_id", "=", episode_id)]
    ).to_pylist()
    return found


def remove_trained_before(archive: Path, unix: float) -> None:
    """Remove the files that were written before `unix` seconds."""
    for path in (archive / TRAINED).glob("*.parquet"):
        if path.stat().st_mtime < unix:
            path.unlink(missing_ok=True)
