"""A run's folder can be read from any working directory, and after it was moved or copied."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import outloop
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.run import load_run
from outloop.buffer.trajectories.archiver import archive_run
from outloop.cli import cli

READS: dict[tuple[str, ...], str] = {
    ("episodes", "--run", "RUN"): "5 episodes shown",
    ("tail", "RUN", "--old"): "left  train",
    ("status", "RUN"): "launcher on this machine",
    ("evaluations", "RUN"): "",
    ("ratings", "RUN"): "",
    ("trajectories", "RUN"): "g0-1-0",
    ("doctor", "--drift", "RUN"): "episodes",
    ("buffer", "stats", "--run", "RUN"): "buffer/",
    ("buffer", "dead", "list", "--run", "RUN"): "",
    ("buffer", "dead", "inspect", "--run", "RUN", "nothing"): "",
    ("buffer", "limits", "--run", "RUN"): "max_staleness",
    ("buffer", "export", "--run", "RUN", "out.jsonl"): "1 trajectories written",
    ("buffer", "show", "--run", "RUN", "left"): "left",
    ("tasks", "weights", "--run", "RUN"): "",
    ("keys", "list", "--run", "RUN"): "",
}
"""Command lines that read a run -> words of the answer; empty: it may refuse what is asked of this
run, but not for where its files are."""
OTHERS = {
    *("view", "viewer"),  # tests/view reads copied folders
    *("router", "server", "runner", "trainer", "archiver", "monitor", "tracker"),  # parts
    "replay",  # of recorded steps: tests/e2e/test_replay_run.py
    *("buffer import", "buffer purge"),  # write into a run
    *("buffer dead requeue", "buffer dead drop", "keys add", "keys revoke", "keys replace-admin"),
}


def commands(group: click.Group, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command below a group that takes the folder of a run."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*before, name))
        elif {"run_dir", "runs", "drift"} & {one.name for one in command.params}:
            yield (*before, name)


def test_every_command_that_takes_a_run_is_in_the_table() -> None:
    """A new one is tried from another folder too."""
    known = {" ".join(words) for words in commands(cli)}
    named = {" ".join(word for word in line if word.islower()) for line in READS}
    tried = {one for one in known if any(f"{name} ".startswith(f"{one} ") for name in named)}
    assert known - tried == OTHERS & known
    assert not OTHERS - known


@pytest.fixture
async def run_dir(
    tmp_path: Path, loop_on: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A run that was started in tmp_path/project with relative paths, and is over."""
    project = tmp_path
    (project / "policy").mkdir()
    words = {"one ": 0, "two ": 1, "three ": 2, "four ": 3}
    Tokenizer(WordLevel(words, unk_token="one ")).save(str(project / "policy/tokenizer.json"))
    monkeypatch.chdir(project)
    with EmbeddedRedis(project / "t" / "redis", max_memory_mb=64) as server:
        paths = {"run__dir": ".", "model__path": "policy", "run__keys_file": "keys.json"}
        loop = await loop_on(server.url, env__import_dir=str(project), **paths)
        loop.reader.trajectories.open(10**6)
        await loop.play_all()
        loop.reader.acknowledge(loop.train(loop.take(2), 1))
        stop = threading.Event()
        stop.set()
        archive_run(load_run(project / "t"), stop=stop)
        (claim,) = (await loop.claim(1)).claims
        await loop.open(claim, "left")
        await loop.close("left", 0.0, outcome="failed", failure_kind="agent", error="broke")
        loop.reader.set_run_state("finished")
    return project / "t"


@pytest.mark.parametrize("words", READS, ids=" ".join)
@pytest.mark.parametrize("place", ["where it was", "moved with its project", "copied alone"])
async def test_a_run_is_read_from_another_folder(
    run_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    place: str,
) -> None:
    """Absolute or not, up or not: the folder is enough."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)
    folder = run_dir
    if place == "moved with its project":
        folder = elsewhere / "project" / "t"
        shutil.move(run_dir.parent, elsewhere / "project")
    elif place == "copied alone":
        folder = elsewhere / "copy"
        shutil.copytree(run_dir, folder)
    line = [str(folder) if word == "RUN" else word for word in words]
    result = CliRunner().invoke(cli, line)
    said = result.output + str(result.exception or "")
    if READS[words]:
        assert result.exit_code == 0, said
        assert READS[words] in said
    assert "cannot be read" not in said
    assert "does not exist" not in said


async def test_a_run_is_read_by_python_from_another_folder(
    run_dir: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a notebook that was started anywhere."""
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    run = outloop.Run(run_dir)
    assert [one.episode_id for one in run.episodes(failed=True)] == ["left"]
    assert len(run.episodes()) == 5
    assert json.loads((run_dir / "settings.json").read_text())["model"]["path"] == "policy"
