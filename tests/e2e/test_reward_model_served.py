"""A reward model from preferences, through every real process: trained, served, and asked."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
EXAMPLE = Path(__file__).resolve().parents[2] / "examples/calculator"
ReadMetrics = Callable[[Path], list[dict[str, float]]]
_START_S = 90


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """`outloop reward-server`; its /score."""
    command = ("reward-server", "reward_model.toml", str(folder), "--conversation")
    process = subprocess.Popen(
        [sys.executable, "-m", "outloop.cli", *command, "preferences:conversation"],
        cwd=EXAMPLE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "reward model at" in line, line
        yield line.split()[-1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


def post(url: str, body: dict[str, object]) -> dict[str, float]:
    """One call."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_START_S) as answer:
        found: dict[str, float] = json.loads(answer.read())
        return found


@pytest.mark.slow
def test_a_trained_reward_model_is_served_and_right_about_what_it_never_saw(
    tmp_path: Path, model_folder: Path, read_metrics: ReadMetrics
) -> None:
    """The server orders held-out preferences as the training measured, before and after a
    refresh."""
    trained = subprocess.run(
        [
            *(sys.executable, "-m", "outloop.cli", "train", "reward_model.toml"),
            *("--set", f"run.dir={tmp_path}", "--set", f"model.path={model_folder}"),
            *("--set", "trainer.num_steps=40", "--set", "trainer.learning_rate=3e-3"),
        ],
        cwd=EXAMPLE,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert trained.returncode == 0, trained.stdout + trained.stderr
    rows = read_metrics(tmp_path / "calculator-reward")
    accuracy = [
        r["reward_model/held_out_accuracy"] for r in rows if "reward_model/held_out_accuracy" in r
    ]
    assert accuracy[0] == 0.5
    assert accuracy[-1] > 0.6
    folder = tmp_path / "calculator-reward" / "hf"
    sys.path.insert(0, str(EXAMPLE))
    try:
        from preferences import pairs
    finally:
        sys.path.remove(str(EXAMPLE))
    with serving(folder) as url:
        right = []
        for row in pairs()[-40:]:
            better, worse = (
                post(url, {"task": {"messages": row[kind]}, "answer": ""})
                for kind in ("chosen", "rejected")
            )
            right.append(better["score"] > worse["score"])
        assert sum(right) / len(right) > 0.6
        assert post(url.replace("/score", "/load"), {"path": str(folder)}) == {"version": 1}
        again = post(url, {"messages": row["chosen"], "tools": row["tools"]})
        assert again == {"score": pytest.approx(better["score"], abs=1e-4), "version": 1}
