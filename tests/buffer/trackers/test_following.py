"""Trackers are given everything once, whatever fails, and never hold anybody up."""

import json
import threading
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import outloop
from fakes.noting_tracker import Noting, noted
from outloop.buffer.errors import SettingsError
from outloop.buffer.run import load_run_settings
from outloop.buffer.telemetry import MetricsWriter, read_metrics
from outloop.buffer.trackers.following import Following
from outloop.buffer.trackers.process import Forwarding, run_facts, send_once, watch
from outloop.buffer.trackers.tracker import factory_of
from outloop.buffer.trajectories.folder import FOLDER, part_paths, read_manifest


def forwarding(folder: Path) -> Forwarding:
    """The noting tracker over a run's folder."""
    facts = run_facts(folder, load_run_settings(folder), "r-1")
    return Forwarding("own", Noting, facts, Following(folder, folder / "trackers/own.json"))


def archived(folder: Path) -> dict[str, int]:
    """Episode -> number of its turns."""
    archive = folder / FOLDER
    found = {}
    for part in read_manifest(archive).parts:
        table = pq.read_table(part_paths(archive, part)[0], columns=["episode_id", "num_turns"])
        found |= {row["episode_id"]: row["num_turns"] for row in table.to_pylist()}
    return found


def given(folder: Path) -> tuple[list[int], list[tuple[str, int]]]:
    """(steps, episodes) that the tracker was given, in order."""
    rows = noted(folder)
    steps = [row[1] for row in rows if row[0] == "metrics"]
    episodes = [tuple(one) for row in rows if row[0] == "episodes" for one in row[1]]  # type: ignore[attr-defined]
    return steps, episodes  # type: ignore[return-value]


def test_everything_is_given_once(recorded: Path) -> None:
    """Rows and episodes, and nothing again when it is asked for again."""
    first = forwarding(recorded)
    first.hand_on()
    again = forwarding(recorded)
    again.hand_on()
    steps, episodes = given(recorded)
    assert steps == [row["step"] for row in read_metrics(recorded)]
    assert len(episodes) > 50
    assert dict(episodes) == archived(recorded)
    assert len(episodes) == len(dict(episodes))
    assert (again.num_rows, again.num_episodes) == (0, 0)


def test_open_names_reach_trackers(recorded: Path) -> None:
    """Components of a verifier and a user's own numbers are passed on as they are."""
    with MetricsWriter(recorded) as writer:
        writer.write(99, {"reward/tone": 0.5, "user/speed": 2.0})
        with pytest.raises(KeyError, match="undeclared"):
            writer.write(99, {"other/speed": 2.0})
    forwarding(recorded).hand_on()
    last = [row for row in noted(recorded) if row[0] == "metrics"][-1]
    assert last == ["metrics", 99, ["reward/tone", "user/speed"]]


def test_a_torn_row_is_given_when_it_is_complete(recorded: Path) -> None:
    """A row that is being written is left until its line ends."""
    follower = forwarding(recorded)
    with (recorded / "metrics.jsonl").open("a") as file:
        file.write('{"step": 77, "time": 1.0, ')
    follower.hand_on()
    assert 77 not in given(recorded)[0]
    with (recorded / "metrics.jsonl").open("a") as file:
        file.write('"train/loss": 1.0}\n')
    follower.hand_on()
    assert given(recorded)[0][-1] == 77


def wait_until(what: str, is_true: object, deadline_s: float = 20.0) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + deadline_s
    while not is_true():  # type: ignore[operator]
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.mark.medium
def test_a_failing_tracker_says_so_and_loses_nothing(recorded: Path) -> None:
    """Its failure is a sentence; when it works again it gets what it missed, and the sentence
    goes."""
    (recorded / "fail").touch()
    said: list[str] = []
    stop = threading.Event()
    thread = threading.Thread(
        target=watch,
        args=(forwarding(recorded),),
        kwargs={"stop": stop, "say": said.append, "timeout_s": 30.0},
    )
    thread.start()
    wait_until("a sentence", lambda: said)
    assert "the tracker's server is away" in said[0]
    (recorded / "fail").unlink()
    wait_until("the sentence's end", lambda: said[-1] == "")
    stop.set()
    thread.join(20.0)
    steps, episodes = given(recorded)
    assert sorted(set(steps)) == sorted({row["step"] for row in read_metrics(recorded)})
    assert dict(episodes) == archived(recorded)
    assert noted(recorded)[-1] == ["close"]


@pytest.mark.medium
def test_a_hanging_tracker_says_so_and_does_not_hold_the_end(recorded: Path) -> None:
    """A call that never returns is a sentence, and the end comes all the same."""
    (recorded / "hang").touch()
    said: list[str] = []
    stop = threading.Event()
    stop.set()
    began = time.monotonic()
    watch(forwarding(recorded), stop=stop, say=said.append, timeout_s=0.3)
    assert time.monotonic() - began < 15.0
    assert any("has not returned from log_metrics" in sentence for sentence in said)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("wandbee", "did you mean 'wandb'.*tensorboard, wandb, mlflow, trackio, otlp"),
        ("nowhere_at_all:thing", "there is no module 'nowhere_at_all'"),
        ("fakes.noting_tracker:nothing", "has no 'nothing'"),
    ],
)
def test_an_impossible_tracker_is_refused(name: str, sentence: str) -> None:
    """The sentence says what is allowed."""
    with pytest.raises(SettingsError, match=sentence):
        factory_of(name)


@pytest.mark.medium
def test_tensorboard_has_scalars_settings_and_episodes(recorded: Path) -> None:
    """Event files hold every metric of every row, the settings and a table of sample episodes."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import RecordWriter  # noqa: F401 - the package is there

    rows, episodes = send_once(recorded, load_run_settings(recorded), "tensorboard")
    assert rows == len(read_metrics(recorded))
    assert episodes == len(archived(recorded))
    (path,) = (recorded / "tensorboard").iterdir()
    scalars: dict[str, list[int]] = {}
    texts = b""
    data, at = path.read_bytes(), 0
    while at < len(data):
        # TFRecord: length, its checksum, the record, its checksum.
        length = int.from_bytes(data[at : at + 8], "little")
        event = Event.FromString(data[at + 12 : at + 12 + length])
        at += 16 + length
        for value in event.summary.value:
            if value.HasField("simple_value"):
                scalars.setdefault(value.tag, []).append(event.step)
            else:
                texts += value.tag.encode() + b"".join(value.tensor.string_val)
    names = {name for row in read_metrics(recorded) for name in row} - {"step", "time"}
    assert names <= {tag.replace("//", "/") for tag in scalars}
    assert b"num_sample_episodes" in texts
    assert next(iter(archived(recorded))).encode()[:4] in texts
    assert json.loads((recorded / "trackers/tracker-tensorboard.json").read_text())["offset"] > 0


def test_numbers_of_a_user_s_own_are_recorded(recorded: Path) -> None:
    """`outloop.Run.record` adds them at the last step, and a tracker is given them."""
    last = max(row["step"] for row in read_metrics(recorded))
    outloop.Run(recorded).record({"speed": 2.5})
    forwarding(recorded).hand_on()
    assert read_metrics(recorded)[-1]["user/speed"] == 2.5
    assert noted(recorded)[-1][0] == "episodes"
    assert ["metrics", last, ["user/speed"]] in noted(recorded)
