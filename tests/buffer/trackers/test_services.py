"""Real Weights & Biases (offline), MLflow (a server of its own) and trackio, in their environment.

Run by `make test-trackers`; OUTLOOP_TRACKERS_PYTHON is the interpreter that has them.
"""

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.ports import free_ports
from outloop.buffer.telemetry import MetricsWriter, read_metrics

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]


def run_python(arguments: list[str], environment: dict[str, str]) -> str:
    """What a program printed, by the interpreter that has the packages."""
    python = os.environ["OUTLOOP_TRACKERS_PYTHON"]
    answer = subprocess.run(
        [python, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    return answer.stdout


def send(folder: Path, name: str, environment: dict[str, str]) -> None:
    """What the part does: all that is new."""
    run_python(
        ["-m", "outloop.cli", "tracker", "--run", str(folder), "--name", name, "--once"],
        environment,
    )


def environment_of(home: Path, **more: str) -> dict[str, str]:
    """Without what this machine's user has set up."""
    return {"PATH": os.environ["PATH"], "HOME": str(home), **more}


def add_row(folder: Path) -> None:
    """A row after a resume, with a name of the user's own."""
    with MetricsWriter(folder) as writer:
        writer.write(1000, {"train/loss": 0.25, "user/speed": 3.0})


def test_wandb_keeps_an_offline_run(recorded: Path, tmp_path: Path) -> None:
    """Its file holds the settings, every row and tables; a second start goes on as the same run."""
    environment = environment_of(tmp_path, WANDB_MODE="offline", WANDB_SILENT="true")
    send(recorded, "wandb", environment)
    add_row(recorded)
    send(recorded, "wandb", environment)
    run_id = json.loads((recorded / "run.json").read_text())["run_id"]
    files = sorted(recorded.glob(f"wandb/offline-run-*/run-{run_id}.wandb"))
    assert files
    code = """
import json, sys
from wandb.proto import wandb_internal_pb2 as pb

def records(data, block=32768):
    # LevelDB's log behind seven bytes: checksum, length, and whether a record goes on.
    at, parts = 7, b""
    while at + 7 <= len(data):
        left = block - at % block
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""

rows, config, tables = [], {}, 0
for path in sys.argv[1:]:
    for data in records(open(path, "rb").read()):
        record = pb.Record.FromString(data)
        if record.HasField("run"):
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        if record.HasField("history"):
            names = {i.key or "/".join(i.nested_key): i.value_json for i in record.history.item}
            tables += "episodes" in names or any(n.startswith("episodes") for n in names)
            rows.append(names)
print(json.dumps({"rows": rows, "config": config, "tables": tables}))
"""
    found = json.loads(run_python(["-c", code, *map(str, files)], environment))
    steps = [float(row["step"]) for row in found["rows"] if "train/loss" in row]
    assert steps == [row["step"] for row in read_metrics(recorded) if "train/loss" in row]
    assert found["config"]["run"]["name"] == "recorded"
    assert found["tables"] > 0
    assert any("user/speed" in row for row in found["rows"])


@pytest.fixture
def mlflow_server(tmp_path: Path) -> Iterator[str]:
    """A real tracking server on loopback."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = [
        os.environ["OUTLOOP_TRACKERS_PYTHON"], "-m", "mlflow", "server", "--workers", "1",
        "--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db", "--host", "127.0.0.1",
        "--artifacts-destination", str(tmp_path / "artifacts"), "--port", str(port),
    ]  # fmt: skip
    with (tmp_path / "mlflow.log").open("wb") as log:
        server = subprocess.Popen(
            command, env=environment_of(tmp_path), stdout=log, stderr=log, cwd=tmp_path
        )
        try:
            deadline = time.monotonic() + 120.0
            while not answers(f"{url}/health"):
                assert server.poll() is None, (tmp_path / "mlflow.log").read_text()[-2000:]
                assert time.monotonic() < deadline
                time.sleep(0.2)
            yield url
        finally:
            server.terminate()
            server.wait(30)


def answers(url: str) -> bool:
    """Whether a server is there."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_mlflow_has_one_run_with_everything(
    recorded: Path, tmp_path: Path, mlflow_server: str
) -> None:
    """Metrics by step, settings as parameters, a table of episodes; a resume goes on as one run."""
    environment = environment_of(tmp_path, MLFLOW_TRACKING_URI=mlflow_server)
    send(recorded, "mlflow", environment)
    add_row(recorded)
    send(recorded, "mlflow", environment)
    code = """
import json
from mlflow import MlflowClient
client = MlflowClient()
experiment = client.get_experiment_by_name("outloop")
runs = client.search_runs([experiment.experiment_id])
run = runs[0]
history = client.get_metric_history(run.info.run_id, "train/reward_mean")
table = client.load_table(experiment.experiment_id, "episodes.json", [run.info.run_id])
print(json.dumps({
    "runs": len(runs), "steps": sorted(m.step for m in history), "params": run.data.params,
    "metrics": sorted(run.data.metrics), "columns": list(table.columns), "rows": len(table),
}))
"""
    found: dict[str, Any] = json.loads(run_python(["-c", code], environment).splitlines()[-1])
    assert found["runs"] == 1
    wanted = [row["step"] for row in read_metrics(recorded) if "train/reward_mean" in row]
    assert found["steps"] == sorted(wanted)
    assert found["params"]["run.name"] == "recorded"
    assert "user/speed" in found["metrics"]
    assert "text" in found["columns"]
    assert found["rows"] > 3


def test_an_mlflow_server_that_is_away_is_reported(recorded: Path, tmp_path: Path) -> None:
    """The command fails with the reason, and sends everything once the server is there."""
    environment = environment_of(
        tmp_path, MLFLOW_TRACKING_URI="http://127.0.0.1:1", MLFLOW_HTTP_REQUEST_MAX_RETRIES="0"
    )
    with pytest.raises(AssertionError, match="127.0.0.1"):
        send(recorded, "mlflow", environment)
    assert not (recorded / "trackers/tracker-mlflow.json").exists()


def test_trackio_keeps_the_run_in_its_folder(recorded: Path, tmp_path: Path) -> None:
    """Its database holds every row and a table, as one run."""
    environment = environment_of(tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"))
    send(recorded, "trackio", environment)
    add_row(recorded)
    send(recorded, "trackio", environment)
    run_id = json.loads((recorded / "run.json").read_text())["run_id"]
    code = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage
runs = SQLiteStorage.get_runs("outloop")
logs = SQLiteStorage.get_logs("outloop", sys.argv[1])
print(json.dumps({"runs": runs, "logs": logs}, default=str))
"""
    found = json.loads(run_python(["-c", code, run_id], environment).splitlines()[-1])
    assert found["runs"] == [run_id]
    rows = [row for row in found["logs"] if "train/reward_mean" in row]
    wanted = [row["step"] for row in read_metrics(recorded) if "train/reward_mean" in row]
    assert [row["step"] for row in rows] == wanted
    assert any("episodes" in row for row in found["logs"])
    assert any("user/speed" in row for row in found["logs"])
