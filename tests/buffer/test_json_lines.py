"""Files of lines whose writers are killed in the middle of one."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outloop.buffer import json_lines
from outloop.buffer.events import read_events, record_event
from outloop.buffer.telemetry import MetricsWriter, read_metrics
from outloop.buffer.trackers.following import Following
from outloop.buffer.trajectories.folder import FOLDER
from outloop.buffer.trajectories.steps import STEPS, StepRecord, read_steps, write_step

ROWS = st.lists(
    st.dictionaries(st.text(), st.text() | st.integers() | st.dictionaries(st.text(), st.none()))
)


@given(rows=ROWS, cuts=st.lists(st.floats(0, 1, exclude_max=True)))
def test_whole_lines_are_read_wherever_others_were_cut(
    tmp_path_factory: pytest.TempPathFactory, rows: list[object], cuts: list[float]
) -> None:
    """One writer after the other is killed; each that is not has its row read, in order."""
    path = tmp_path_factory.mktemp("lines") / "lines.jsonl"
    for number, row in enumerate(rows):
        line = json.dumps(row, ensure_ascii=False).encode()
        if number < len(cuts):
            with path.open("ab") as killed:
                killed.write((b"\n" + line)[: 1 + int(cuts[number] * len(line))])
        with json_lines.open_for_appending(path) as file:
            json_lines.append_line(file, line)
    assert json_lines.read_rows(path) == rows


def kill_in_the_middle(path: Path) -> None:
    """Leave the beginning of a line like the last one."""
    data = path.read_bytes()
    last = data.splitlines()[-1]
    path.write_bytes(data + last[: len(last) // 2])


def test_metrics_are_read_after_a_writer_was_killed(tmp_path: Path) -> None:
    """By those who read all, and by those who read what is new."""
    following = Following(tmp_path, tmp_path / "place.json")
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"train/loss": 1.0})
    kill_in_the_middle(tmp_path / "metrics.jsonl")
    assert [row.step for row in following.new_rows()] == [1]
    with MetricsWriter(tmp_path) as writer:
        writer.write(2, {"train/loss": 2.0})
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    assert [row.step for row in following.new_rows()] == [2]


def test_events_are_read_after_a_writer_was_killed(tmp_path: Path) -> None:
    record_event(tmp_path, "started")
    kill_in_the_middle(tmp_path / "events.jsonl")
    record_event(tmp_path, "stopped")
    assert [event["kind"] for event in read_events(tmp_path)] == ["started", "stopped"]


def test_steps_are_read_after_a_writer_was_killed(tmp_path: Path) -> None:
    def record(step: int) -> StepRecord:
        return StepRecord(
            step=step, policy_version=step, takes=[], depths={}, max_age=0, num_ranks=1, updates=[]
        )

    write_step(tmp_path, record(1))
    kill_in_the_middle(tmp_path / FOLDER / STEPS)
    write_step(tmp_path, record(2))
    assert sorted(read_steps(tmp_path)) == [1, 2]
