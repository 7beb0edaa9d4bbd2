"""The calculator example on real SGLang: trained, crashed, replaced, trained on."""

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from fakes.tls_front import tls_settings
from outloop.buffer.reader import BufferReader
from outloop.buffer.run import load_run
from outloop.buffer.telemetry import read_metrics

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/calculator"
PATIENCE_S = 400
WARM_START = {"run.name": "warm", "trainer.num_steps": 250, "model.path": "policy"}
RL = {
    "run.name": "rl",
    "model.path": "runs/warm/hf",
    "server.kind": "sglang",
    "server.start_timeout_s": PATIENCE_S,
    "publish.verify": "probe",
    "trainer.num_steps": 4,
    "trainer.groups_per_step": 8,
    "trainer.take_timeout_s": PATIENCE_S,
    "buffer.group_size": 4,
    # Episodes wait while a crashed server is replaced.
    "env.episode_deadline_s": PATIENCE_S,
    "eval.every": 0,
}
UNKNOWN_ID = 10**6


def command(config: str, settings: dict[str, object]) -> list[str]:
    """`outloop train` of an example's config with settings of our own."""
    words = [sys.executable, "-m", "outloop.cli", "train", str(EXAMPLE / config)]
    settings = {"run.dir": "runs", **settings}
    for key, value in settings.items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    return words


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the calculator's warm-started policy."""
    folder = tmp_path_factory.mktemp("calculator")
    make = [sys.executable, "-m", "outloop.cli", "new-policy", "--out", "policy"]
    make += ["--conversations", "tasks:conversations", "--import-dir", str(EXAMPLE)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for words in (make, command("warm_start.toml", WARM_START)):
        subprocess.run(words, cwd=folder, check=True, timeout=PATIENCE_S, env=environment)
    return folder


def sglang_of(run_dir: Path) -> list[psutil.Process]:
    """The SGLang processes that this run's servers became, oldest first."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if not any(word.endswith("sglang/entrypoint.py") for word in words):
            continue
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = process.parent()
            if parent is not None and str(run_dir) in parent.cmdline():
                found.append(process)
    return found


def wait_for(what: str, is_true: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Return once `is_true`; fail when the run ends or takes too long."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        assert process.poll() is None, f"the run ended before: {what}"
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def crash(run_dir: Path) -> None:
    """Ask the run's server for an id outside the vocabulary, past the router that refuses it."""
    run = load_run(run_dir)
    reader = BufferReader.connect(run)
    (entry,) = reader.registry.servers()
    reader.close()
    body = {"input_ids": [1, UNKNOWN_ID], "sampling_params": {"max_new_tokens": 4}}
    request = urllib.request.Request(
        entry.url + "/generate",
        data=json.dumps(body).encode(),
        headers={
            "Content-Type": "application/json",
            "Authorization": f"Bearer {run.server_key}",
        },
    )
    # The connection closes without an answer: that it may also be an error status is all the same.
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        urllib.request.urlopen(request, timeout=PATIENCE_S).read()


def test_the_calculator_example_trains_on_sglang(workspace: Path) -> None:
    """Rewards, versions and logprobs are right, and a crashed or orphaned SGLang is replaced.

    Verified by a probe: the contract suite compares checksums.
    """
    run_dir = workspace / "runs/rl"
    steps = run_dir / "metrics.jsonl"
    with subprocess.Popen(
        command("run.toml", RL),
        cwd=workspace,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            wait_for(
                "first step",
                lambda: steps.exists() and "train/loss" in steps.read_text(),
                process,
            )
            (first,) = sglang_of(run_dir)
            crash(run_dir)
            wait_for("crashed SGLang is gone", lambda: not first.is_running(), process)
            wait_for("another SGLang", lambda: bool(sglang_of(run_dir)), process)
            (second,) = sglang_of(run_dir)
            second.parent().kill()
            wait_for("orphaned SGLang is gone", lambda: not second.is_running(), process)
            output, _ = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    log = (run_dir / "logs/server-0.log").read_text()[-3000:]
    assert process.returncode == 0, output + log
    assert output.count("part_restarted") == 2
    rows = [json.loads(line) for line in steps.read_text().splitlines()]
    rows = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["train/policy_version"] for row in rows] == [1, 2, 3, 4]
    assert all(row["train/episodes"] == 32 for row in rows)
    assert any(0 < row["train/reward_mean"] <= 1 for row in rows)
    gaps = [row["train/logprob_gap_max"] for row in rows]
    assert max(gap for gap in gaps if gap is not None) < 1e-4, gaps
    left = [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(workspace)]
    assert not psutil.wait_procs(left, timeout=20)[1]


def test_a_run_whose_router_and_sglang_speak_https_trains(workspace: Path) -> None:
    """With an authority of its own: nobody speaks to either of them in the clear."""
    settings = {**RL, **tls_settings(workspace), "run.name": "https", "trainer.num_steps": 2}
    answer = subprocess.run(
        command("run.toml", settings),
        cwd=workspace,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    logs = workspace / "runs/https/logs"
    served = (logs / "server-0.log").read_text()
    assert answer.returncode == 0, answer.stdout + answer.stderr + served[-3000:]
    rows = [row for row in read_metrics(logs.parent) if "train/loss" in row]
    assert [row["train/policy_version"] for row in rows] == [1, 2]
    for log in (served, (logs / "router-0.log").read_text()):
        (ready,) = (json.loads(line) for line in log.splitlines() if '"part_ready"' in line)
        assert ready["url"].startswith("https://127.0.0.1:")


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"mem_fraction_statc": 0.5}, "mem_fraction_static"),
        ({"mem_fraction_static": "much"}, "mem-fraction-static"),
        ({"enable_deterministic_inference": True}, "torch_native"),
    ],
)
def test_arguments_that_sglang_refuses_are_named_before_anything_starts(
    table: dict[str, object], sentence: str, workspace: Path
) -> None:
    """Unknown names, wrong values and contradictions come back as SGLang's own sentence, code 2."""
    settings = {**RL, "run.name": "refused"}
    words = command("run.toml", settings)
    for key, value in table.items():
        words += ["--set", f"server.sglang.{key}={json.dumps(value)}"]
    answer = subprocess.run(
        words, cwd=workspace, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert answer.returncode == 2, answer.stdout + answer.stderr
    assert sentence in answer.stderr
    assert "Traceback" not in answer.stderr
    assert not (workspace / "runs/refused").exists()
