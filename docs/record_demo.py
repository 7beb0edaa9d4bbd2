"""Make the run that `outloop view --demo` shows from the folder of a real one.

    outloop train examples/calculator/run.toml --set trajectories.share=0.1
    python docs/record_demo.py runs/calculator

Its trajectories become one part; what names paths, keys or settings is left behind.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from outloop.buffer.trajectories.folder import FOLDER, Part, part_paths, read_manifest, writing
from outloop.buffer.trajectories.tables import write_tables
from outloop.buffer.trajectories.trained import TRAINED
from outloop.buffer.trajectories.vocabulary import VOCABULARY

DEMO = Path(__file__).resolve().parents[1] / "src/outloop/view/demo"


def record(run: Path, demo: Path) -> None:
    """Replace `demo` by what is shown of `run`."""
    shutil.rmtree(demo, ignore_errors=True)
    demo.mkdir()
    for name in ("metrics.jsonl", "events.jsonl"):
        shutil.copyfile(run / name, demo / name)
    source = run / FOLDER
    parts = read_manifest(source).parts
    paths = [part_paths(source, part) for part in parts]
    episodes = pa.concat_tables(pq.read_table(path) for path, _ in paths)
    turns = pa.concat_tables(pq.read_table(path) for _, path in paths)
    with writing(demo / FOLDER) as folder:
        num_bytes = folder.write_files("demo-0", lambda e, t: write_tables(episodes, turns, e, t))
        part = Part(
            name="demo-0",
            first=0,
            last=parts[-1].last,
            num_episodes=sum(part.num_episodes for part in parts),
            num_tokens=sum(part.num_tokens for part in parts),
            num_bytes=num_bytes,
            first_ended_at=parts[0].first_ended_at,
            last_ended_at=parts[-1].last_ended_at,
        )
        folder.commit([part])
    (demo / FOLDER / "lock").unlink()
    shutil.copyfile(source / VOCABULARY, demo / FOLDER / VOCABULARY)
    (demo / FOLDER / TRAINED).mkdir()
    for path in sorted((source / TRAINED).glob("*.parquet")):
        table = pq.read_table(path)
        kept = table.filter(pc.is_in(table["episode_id"], episodes["episode_id"]))
        if len(kept):
            pq.write_table(kept, demo / FOLDER / TRAINED / path.name, compression="zstd")


if __name__ == "__main__":
    record(Path(sys.argv[1]), DEMO)
