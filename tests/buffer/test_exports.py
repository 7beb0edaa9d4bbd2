"""The archive elsewhere: a folder for `datasets`, and copies in stores that fsspec knows."""

import json
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner
from fsspec.implementations.memory import MemoryFileSystem

from outloop.buffer.errors import Conflict, NotFound, SettingsError
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.run import load_run
from outloop.buffer.settings.trajectories import TrajectorySettings
from outloop.buffer.trajectories.archiver import Archiver, archive_run
from outloop.buffer.trajectories.folder import FOLDER, MANIFEST, read_manifest, writing
from outloop.buffer.trajectories.object_store import ObjectStore
from outloop.buffer.trajectories.query import query
from outloop.buffer.trajectories.tables import EPISODES, TURNS, Decoder
from outloop.cli import cli

IDS = "SELECT episode_id FROM episodes ORDER BY ALL"


class DyingFiles(MemoryFileSystem):
    """Accepts so many files, then none: a process that is killed, or a store that goes away."""

    protocol = "dying"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    left: ClassVar[list[int]] = [10**6]

    def pipe_file(self, path: str, value: bytes, **words: Any) -> None:
        """Writes it while any is left."""
        if self.left[0] == 0:
            raise OSError("the store went away")
        self.left[0] -= 1
        super().pipe_file(path, value, **words)


async def keep(loop: Any, run_dir: Path, version: int, **settings: Any) -> None:
    """Two trained groups more in the run's archive, in a part of their own."""
    loop.reader.trajectories.open(10**6)
    await loop.play_all(version=version)
    loop.reader.acknowledge(loop.train(loop.take(2, version=version), version + 1))
    with writing(run_dir / FOLDER) as folder:
        archiver = Archiver(
            loop.reader.trajectories, folder, TrajectorySettings(**settings), Decoder(None)
        )
        archiver.open()
        archiver.flush()


def run_command(*words: str | Path) -> str:
    """What `outloop trajectories` prints."""
    answer = CliRunner().invoke(cli, ["trajectories", *map(str, words)], catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    return answer.output


async def test_a_store_holds_the_archive_after_any_death(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    """Whoever reads it meanwhile finds it as it was before; copying again makes it whole."""
    fsspec.register_implementation("dying", DyingFiles, clobber=True)
    store, run_dir = ObjectStore(f"dying://{tmp_path.name}/run"), tmp_path / "run"
    loop = await start(num_tasks=40)
    with pytest.raises(NotFound, match="holds no trajectories/manifest.json"):
        store.fetch(tmp_path / "none")
    await keep(loop, run_dir, 0)
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    assert store.update(run_dir) == 3
    assert store.update(run_dir) == 0
    before = query(run_dir / FOLDER, IDS)
    await keep(loop, run_dir, 1)
    for time, number_left in enumerate((0, 1, 1)):
        DyingFiles.left[0] = number_left
        with pytest.raises(OSError, match="went away"):
            store.update(run_dir)
        fetched = tmp_path / f"fetched-{time}"
        store.fetch(fetched)
        assert query(fetched / FOLDER, IDS) == before
    DyingFiles.left[0] = 10**6
    store.update(run_dir)
    store.fetch(tmp_path / "whole")
    assert query(tmp_path / "whole" / FOLDER, IDS) == query(run_dir / FOLDER, IDS) != before
    assert (tmp_path / "whole/metrics.jsonl").read_text() == '{"step": 1}\n'


async def test_retention_holds_in_the_store_too(start: Callable[..., Any], tmp_path: Path) -> None:
    """What the archive removed is read there no more, and what no manifest names is removed."""
    url, run_dir = f"file://{tmp_path}/store", tmp_path / "run"
    store, loop = ObjectStore(url), await start(num_tasks=40)
    for version in range(3):
        await keep(loop, run_dir, version, max_episodes=8)
        store.update(run_dir)
    left_over = tmp_path / "store" / FOLDER / "episodes-0000000000-dead.parquet"
    left_over.write_bytes(b"")
    store.update(run_dir)
    assert not left_over.exists()
    store.fetch(tmp_path / "fetched")
    kept = query(tmp_path / "fetched" / FOLDER, IDS)
    assert kept == query(run_dir / FOLDER, IDS)
    assert len(kept) <= 8
    assert read_manifest(tmp_path / "fetched" / FOLDER).num_removed == 12 - len(kept)


async def test_the_archiver_copies_while_it_archives(
    server: EmbeddedRedis, loop_on: Callable[..., Any], tmp_path: Path
) -> None:
    """`trajectories.copy_to`; what is fetched elsewhere is queried and shown like a run."""
    url = f"file://{tmp_path}/store"
    loop = await loop_on(server.url, trajectories__copy_to=url)
    loop.reader.trajectories.open(10**6)
    await loop.play_all()
    loop.reader.acknowledge(loop.train(loop.take(2), 1))
    stop = threading.Event()
    stop.set()
    archive_run(load_run(tmp_path / "t"), stop=stop)
    counted = run_command(
        tmp_path / "new", "--fetch", url, "--sql", f"SELECT count(*) FROM ({IDS})"
    )
    assert "fetched 3 files into" in counted
    assert counted.split()[-1] == "4"
    with pytest.raises(Conflict, match="is the folder of a run"):
        ObjectStore(url).fetch(tmp_path / "t")


def test_what_cannot_be_copied_to_is_refused() -> None:
    """Before anything starts: a scheme that nobody knows, and copies of nothing."""
    with pytest.raises(SettingsError, match="copy_to='nowhere://x'.*fsspec knows"):
        ObjectStore("nowhere://x")
    with pytest.raises(ValueError, match="nothing is kept that could be copied"):
        TrajectorySettings(enabled=False, copy_to="file:///x")


async def test_a_dataset_has_the_columns_of_the_archive(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    """A card that names both tables, one row for each chosen episode and for each of its turns."""
    loop, run_dir, out = await start(num_tasks=40), tmp_path / "run", tmp_path / "set"
    for version in range(2):
        await keep(loop, run_dir, version)
    where = "trained_version = 2"
    assert "wrote 4 episodes" in run_command(run_dir, "--export-dataset", out, "--where", where)
    card = yaml.safe_load((out / "README.md").read_text().split("---\n")[1])
    for config, schema in zip(card["configs"], (EPISODES, TURNS), strict=True):
        (files,) = config["data_files"]
        tables = [pq.read_table(path) for path in sorted(out.glob(files["path"]))]
        assert [table.schema for table in tables] == [schema] * len(tables)
        assert {one for table in tables for one in table["episode_id"].to_pylist()} == {
            row["episode_id"]
            for row in query(run_dir / FOLDER, f"SELECT * FROM episodes WHERE {where}")
        }
    again = CliRunner().invoke(cli, ["trajectories", str(run_dir), "--export-dataset", str(out)])
    assert "is not empty" in str(again.exception)


LOADED = """
import sys
from datasets import load_dataset
episodes = load_dataset(sys.argv[1], split="train")
turns = load_dataset(sys.argv[1], "turns", split="train")
print(len(episodes), sorted(set(turns["episode_id"])) == sorted(episodes["episode_id"]))
print(turns[0]["output_ids"], turns[0]["behavior_logprobs"] is not None)
"""
COPIED = """
import os, pathlib, sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(port=0)
server.start()
host, port = server.get_host_and_port()
os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
import s3fs
s3fs.S3FileSystem().mkdir("kept")
from outloop.buffer.trajectories.object_store import ObjectStore
run, other = map(pathlib.Path, sys.argv[1:])
store = ObjectStore("s3://kept/runs/one")
print(store.update(run), store.update(run), store.fetch(other))
server.stop()
"""


@pytest.mark.clients
async def test_datasets_and_s3_take_what_is_written(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    """The real packages (`make test-trackers`), the second with an S3 server on this machine."""
    loop, run_dir, out = await start(num_tasks=40), tmp_path / "run", tmp_path / "set"
    await keep(loop, run_dir, 0)
    run_command(run_dir, "--export-dataset", out)
    environment = {
        **os.environ, "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip

    def run_python(program: str, *words: Path) -> str:
        python = os.environ["OUTLOOP_TRACKERS_PYTHON"]
        answer = subprocess.run(
            [python, "-c", program, *map(str, words)], env=environment, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert answer.returncode == 0, answer.stderr[-3000:]
        return answer.stdout

    first, second = run_python(LOADED, out).splitlines()[-2:]
    assert first == "4 True"
    assert json.loads(second.rpartition(" ")[0])
    assert run_python(COPIED, run_dir, tmp_path / "other").splitlines()[-1] == "2 0 3"
    assert query(tmp_path / "other" / FOLDER, IDS) == query(run_dir / FOLDER, IDS)
    assert (tmp_path / "other" / FOLDER / MANIFEST).exists()
