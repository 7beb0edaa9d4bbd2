"""`outloop replay RUN --step N`: a step of a finished run is made again, bit by bit."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
Outloop = Callable[..., subprocess.CompletedProcess[str]]
WriteConfig = Callable[..., Path]


def hashes(text: str, when: str) -> list[str]:
    """Of the gradients of each update, as the command printed them."""
    return re.findall(rf"update \d+ {when} *:.* gradients (\w+)", text)


@pytest.mark.slow
def test_a_step_is_made_again(workspace: Path, write_config: WriteConfig, outloop: Outloop) -> None:
    """From a checkpoint; another recipe gives other gradients, from the
    same weights; the run is left as it is; what is not there is a sentence."""
    write_config(staleness=1, steps=4)
    more = (
        "trainer.checkpoint_every=2",
        "trainer.keep_checkpoints=9",
        "trainer.num_updates_per_take=2",
    )
    answer = outloop("train", "run.toml", *(word for one in more for word in ("--set", one)))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    folder = workspace / "runs/tiny"
    before = {path: path.stat().st_mtime_ns for path in sorted((folder / "checkpoints").rglob("*"))}

    last = outloop("replay", "runs/tiny", "--step", "4")
    assert last.returncode == 0, last.stdout + last.stderr
    assert "made steps 3 to 3 again" in last.stdout
    assert len(hashes(last.stdout, "then")) == 2
    assert hashes(last.stdout, "then") == hashes(last.stdout, "now")
    assert last.stdout.rstrip().endswith("equal")

    other = outloop("replay", "runs/tiny", "--step", "4", "--set", "trainer.recipe=rloo")
    assert other.returncode == 0, other.stdout + other.stderr
    assert hashes(other.stdout, "then") == hashes(last.stdout, "then")
    assert hashes(other.stdout, "now") != hashes(other.stdout, "then")
    same = outloop("replay", "runs/tiny", "--step", "4", "--set", "trainer.loss=ppo_clip")
    assert hashes(same.stdout, "now") == hashes(same.stdout, "then")

    after = {path: path.stat().st_mtime_ns for path in sorted((folder / "checkpoints").rglob("*"))}
    assert after == before
    gone = outloop("replay", "runs/tiny", "--step", "9")
    assert gone.returncode == 2
    assert "holds steps 1 to 4" in gone.stderr

    # Other groups give other gradients. The first step's, not one group less: a group without
    # signal adds nothing.
    path = folder / "trajectories/steps.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[3]["takes"] = rows[0]["takes"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changed = outloop("replay", "runs/tiny", "--step", "4")
    assert changed.returncode == 1
    assert "NOT equal" in changed.stdout


@pytest.mark.slow
def test_a_step_of_two_ranks_is_made_again_by_one(
    workspace: Path, write_config: WriteConfig, outloop: Outloop
) -> None:
    """From the model's folder, equal to rounding: loss and gradient norm."""
    write_config(staleness=1, steps=2)
    answer = outloop("train", "run.toml", "--set", "trainer.num_ranks=2")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    again = outloop("replay", "runs/tiny", "--step", "2")
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.rstrip().endswith("equal to rounding")
