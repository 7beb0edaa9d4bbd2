"""A run's folder on a full disk: nothing is left torn, and who must write waits for room."""

import errno
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fakes.full_disk import longest_file
from outloop.buffer.errors import DiskFull
from outloop.buffer.events import read_events, record_event
from outloop.buffer.issued_version import IssuedVersion
from outloop.buffer.room import wait_for_room
from outloop.buffer.telemetry import MetricsWriter, read_metrics


@pytest.mark.medium
def test_a_row_waits_for_room_and_is_written_once(tmp_path: Path) -> None:
    """Though a part of it fitted; the sentence says where there is none."""
    sentences = []
    with MetricsWriter(tmp_path, max_full_s=30, on_full=lambda text: on_full(text)) as writer:
        writer.write(1, {"train/loss": 1.0})
        size = (tmp_path / "metrics.jsonl").stat().st_size
        with longest_file(size + 10) as lift:

            def on_full(text: str) -> None:
                assert len(read_metrics(tmp_path)) == 1
                assert (tmp_path / "metrics.jsonl").stat().st_size == size
                lift()
                sentences.append(text)

            writer.write(2, {"train/loss": 2.0})
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    (sentence,) = sentences
    assert sentence.startswith(f"disk full at {tmp_path} (")
    assert sentence.endswith("free space there; the trainer waits for room")


@pytest.mark.medium
def test_the_wait_ends_at_its_bound(tmp_path: Path) -> None:
    """With what to do; the note before stays."""
    issued = IssuedVersion(tmp_path, max_full_s=0.6, on_full=lambda sentence: None)
    issued.note(3)
    began_at = time.monotonic()
    with longest_file(0), pytest.raises(DiskFull, match=r"max_outage_s=0\.6; start the same"):
        issued.note(4)
    assert time.monotonic() - began_at >= 0.6
    assert issued.read() == 3
    issued.note(4)
    assert issued.read() == 4


def test_other_errors_are_not_waited_for(tmp_path: Path) -> None:
    """A folder that may not be written to stays so."""

    def write() -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(PermissionError):
        wait_for_room(write, tmp_path / "file", max_s=30, on_full=lambda sentence: None)


def test_an_event_without_room_is_dropped_whole(tmp_path: Path) -> None:
    """Whoever reads the others is not disturbed."""
    record_event(tmp_path, "started")
    with longest_file((tmp_path / "events.jsonl").stat().st_size + 5):
        record_event(tmp_path, "stopped")
    record_event(tmp_path, "finished")
    assert [event["kind"] for event in read_events(tmp_path)] == ["started", "finished"]


LOGGING = """
import structlog
from outloop.buffer.telemetry import configure_logging
configure_logging("trainer", "info")
structlog.get_logger().warning("said")
print("alive")
"""


@pytest.mark.medium
def test_a_part_outlives_the_disk_of_its_log(tmp_path: Path) -> None:
    """What it says is dropped; elsewhere it is not."""
    with Path("/dev/full").open("wb") as full:
        words = [sys.executable, "-c", LOGGING]
        answer = subprocess.run(words, stdout=subprocess.PIPE, stderr=full, check=False)
    assert answer.stdout == b"alive\n"
    answer = subprocess.run(words, capture_output=True, check=True)
    assert json.loads(answer.stderr)["event"] == "said"
