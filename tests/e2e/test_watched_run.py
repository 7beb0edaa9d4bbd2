"""A real run that is watched: alarms reach the terminal, the events and a webhook; trackers get
every step, and one that fails or is away costs nothing but a line; one page shows every part."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fakes.noting_tracker import noted
from fakes.receiver import receiver
from outloop.buffer.events import read_events
from outloop.buffer.monitor.page import prometheus_name
from outloop.buffer.telemetry import METRICS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
WriteConfig = Callable[..., Path]
ReadMetrics = Callable[[Path], list[dict[str, float]]]
ROOT = Path(__file__).resolve().parents[2]


def wait_for(what: str, found: Callable[[], Any], deadline_s: float = 120.0) -> Any:
    """What `found` gives once it is something."""
    deadline = time.monotonic() + deadline_s
    while not (value := found()):
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.1)
    return value


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """Its address, and what was posted to it."""
    with receiver() as opened:
        yield opened


@pytest.mark.slow
def test_a_run_is_watched(
    workspace: Path,
    write_config: WriteConfig,
    read_metrics: ReadMetrics,
    webhook: tuple[str, list[tuple[str, bytes]]],
    allow: Callable[..., None],
) -> None:
    """Two steps with three trackers (one away), a webhook and the page of metrics."""
    # Too few steps for an alarm about them, and the run does not end.
    write_config(steps=40, held_s=100)
    allow(3)
    hook, posted = webhook
    (workspace / "hook").write_text(f"{hook}/key")
    trackers = '["fakes.noting_tracker:Noting", "tensorboard", "otlp"]'
    settings = (
        f"telemetry.trackers={trackers}", "telemetry.prometheus_port=0", "telemetry.view_port=0",
        "telemetry.tracker_timeout_s=5", "alarms.min_disk_gb=1000000", "alarms.webhook_file=hook",
    )  # fmt: skip
    command = [sys.executable, "-m", "outloop.cli", "train", "run.toml"]
    for one in settings:
        command += ["--set", one]
    folder = workspace / "runs/tiny"
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "tests"),
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
    }
    with (workspace / "out").open("wb") as out:
        run = subprocess.Popen(
            command, cwd=workspace, env=environment, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        log = folder / "logs/monitor.log"
        found = wait_for(
            "the page",
            lambda: log.exists() and re.search(r"http://[^\"]+/metrics", log.read_text()),
        )
        wait_for(
            "two steps",
            lambda: (folder / "metrics.jsonl").exists() and len(read_metrics(folder)) > 2,
        )

        def page() -> dict[str, list[Any]]:
            with urllib.request.urlopen(found.group(0), timeout=10) as answer:
                text = answer.read().decode()
            return {f.name: f.samples for f in text_string_to_metric_families(text)}

        shown = wait_for(
            "a step on the page",
            lambda: (p := page()).get(prometheus_name("train/reward_mean")) and p,
        )
        link = wait_for(
            "the link of the run's page",
            lambda: re.search(r"its page (http://\S+)\?key=(\S+)", (workspace / "out").read_text()),
        )
        headers = {"Authorization": f"Bearer {link.group(2)}"}
        request = urllib.request.Request(link.group(1) + "api/runs", headers=headers)
        with urllib.request.urlopen(request, timeout=10) as runs:
            assert [run["name"] for run in json.load(runs)] == ["tiny"]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(link.group(1) + "api/runs", timeout=10)
        wait_for("the tracker that is away", lambda: b"OTLP" in (workspace / "out").read_bytes())
        wait_for("the webhook", lambda: posted)
    finally:
        allow()
        run.terminate()
        run.wait(90)
    out_text = (workspace / "out").read_text()
    assert run.returncode == 130, out_text

    assert {s.labels["part"] for s in shown["outloop_part_up"] if s.value == 1} >= {
        "router",
        "server-0",
    }
    assert shown["router_turns"][0].labels["part"].startswith("router")
    assert [s.value for s in shown["outloop_alarm"] if s.labels["alarm"] == "disk_low"] == [1]
    known = {prometheus_name(name) for name in METRICS}
    assert known & shown.keys()

    assert "warning from monitor: disk_low" in out_text
    assert "otlp failed" in out_text
    alarms = [event["name"] for event in read_events(folder) if event["kind"] == "alarm"]
    assert alarms == ["disk_low"]
    assert [json.loads(body)["name"] for _, body in posted] == ["disk_low"]

    rows = noted(folder)
    steps = [row[1] for row in rows if row[0] == "metrics"]
    assert steps == [row["step"] for row in read_metrics(folder)]
    assert rows[-1] == ["close"]
    ids = [one[0] for row in rows if row[0] == "episodes" for one in row[1]]  # type: ignore[attr-defined]
    assert len(ids) == len(set(ids)) > 0
    assert list((folder / "tensorboard").iterdir())
