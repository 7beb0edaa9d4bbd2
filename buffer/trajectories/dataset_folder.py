"""The archive as a folder that Hugging Face's `datasets.load_dataset` opens."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from outloop.buffer.errors import SettingsError
from outloop.buffer.trajectories.folder import part_paths, read_manifest
from outloop.buffer.trajectories.tables import EPISODES, TURNS

_CARD = """\
---
pretty_name: Episodes of {name}
tags: [outloop, reinforcement-learning, agents]
configs:
- config_name: episodes
  data_files: [{{split: train, path: episodes/*.parquet}}]
  default: true
- config_name: turns
  data_files: [{{split: train, path: turns/*.parquet}}]
---

# Episodes of {name}

{num_episodes} episodes and {num_turns} turns of a policy that outloop trained.

```python
from datasets import load_dataset

episodes = load_dataset("{folder}", "episodes", split="train")
turns = load_dataset("{folder}", "turns", split="train")  # token ids, logprobs, versions
```

A row of `turns` belongs to the row of `episodes` with its `episode_id`; `turn_index` is its place.
`prompt_ids` are the tokens that a turn added to its parent's, `output_ids` those that were sampled,
`behavior_logprobs` their logprobs when they were. `version_spans` is (policy version, start, end)
of each span behind each other, `loss_spans` (start, end) of what may be trained.
`reward_components`, `metadata` and `sampling` are JSON.
"""


def write_dataset(folder: Path, out: Path, episode_ids: Collection[str], *, name: str) -> int:
    """Write `episode_ids` of the archive in `folder` to `out`, with a card; how many there are.

    `out`/episodes and `out`/turns hold Parquet files with the columns of EPISODES and TURNS, a file
    each for a part of the archive.

    Raises:
        SettingsError: `out` holds something, or cannot be written.
        SchemaMismatch: the archive was written by another release.
    """
    try:
        if out.is_dir() and any(out.iterdir()):
            raise SettingsError(f"--export-dataset={str(out)!r} is not empty; give a new folder")
        number = _write_tables(folder, out, episode_ids, name)
    except OSError as error:
        raise SettingsError(f"--export-dataset={str(out)!r} cannot be written: {error}") from error
    return number


def _write_tables(folder: Path, out: Path, episode_ids: Collection[str], name: str) -> int:
    wanted = pa.array(sorted(episode_ids), pa.string())
    counts = {"episodes": 0, "turns": 0}
    for kind in counts:
        (out / kind).mkdir(parents=True, exist_ok=True)
    parts = read_manifest(folder).parts
    for index, part in enumerate(parts):
        paths = part_paths(folder, part)
        for kind, schema, path in zip(counts, (EPISODES, TURNS), paths, strict=True):
            table = pq.read_table(path, schema=schema)
            kept = table.filter(pc.is_in(table["episode_id"], wanted))
            # At least one file says what the columns are.
            if len(kept) or index == len(parts) - 1:
                pq.write_table(kept, out / kind / f"{index:05d}.parquet", compression="zstd")
            counts[kind] += len(kept)
    (out / "README.md").write_text(
        _CARD.format(
            name=name, folder=out.name, num_episodes=counts["episodes"], num_turns=counts["turns"]
        )
    )
    return counts["episodes"]
