"""The folder of a run that is over: a piece of the demo of `outloop view`, with own settings."""

import shutil
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import outloop.view
from outloop.buffer.run import create_run
from outloop.buffer.settings import build_settings
from outloop.buffer.trajectories.folder import FOLDER, Part, part_paths, read_manifest, writing
from outloop.buffer.trajectories.tables import write_tables

NUM_EPISODES = 90


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Its folder; the archive has two parts."""
    tree = {"run": {"name": "recorded", "dir": tmp_path}, "model": {"path": "policy"}}
    folder = tmp_path / "recorded"
    folder.mkdir()
    create_run(build_settings(tree, source="test"), folder, "redis://nowhere")
    demo = Path(outloop.view.__file__).parent / "demo"
    shutil.copy(demo / "metrics.jsonl", folder)
    (whole,) = read_manifest(demo / FOLDER).parts
    episodes, turns = (pq.read_table(path) for path in part_paths(demo / FOLDER, whole))
    with writing(folder / FOLDER) as archive:
        parts = []
        for first in range(0, NUM_EPISODES, NUM_EPISODES // 2):
            some = episodes.slice(first, NUM_EPISODES // 2)
            theirs = turns.filter(pc.is_in(turns["episode_id"], some["episode_id"]))
            name = archive.new_name(first)
            num_bytes = archive.write_files(
                name, lambda e, t, some=some, theirs=theirs: write_tables(some, theirs, e, t)
            )
            times = some["ended_at"].to_pylist()
            parts.append(
                Part(
                    name=name, first=first, last=first + len(some) - 1, num_episodes=len(some),
                    num_tokens=1, num_bytes=num_bytes, first_ended_at=min(times),
                    last_ended_at=max(times),
                )
            )  # fmt: skip
        archive.commit(parts)
    return folder
