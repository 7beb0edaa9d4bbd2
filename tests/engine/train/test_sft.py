"""Supervised fine-tuning from stored conversations."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog.testing

from fakes.conversations import Conversations
from outloop.buffer.errors import DeadlineExceeded, SettingsError
from outloop.buffer.records import Trajectory, Turn
from outloop.buffer.run import Run, create_run
from outloop.buffer.settings import Settings
from outloop.buffer.telemetry import MetricsWriter
from outloop.engine.train.sft import batches, run_sft

MakeTurn = Callable[..., Turn]
MakeTrajectory = Callable[..., Trajectory]


@pytest.fixture
def conversations(make_turn: MakeTurn, make_trajectory: MakeTrajectory) -> list[Trajectory]:
    """Twelve conversations whose answer is a function of the question."""
    return [
        make_trajectory(
            [make_turn("a", prompt=[7, 10 + index], output=[50 + index, 99, 99], logprobs=None)],
            purpose="sft",
            group_id=None,
            reward=None,
            episode_id=f"c{index}",
        )
        for index in range(12)
    ]


@pytest.fixture
def train(tmp_path: Path, tiny_folder: Callable[..., Path], make_ranks: Any) -> Any:
    """Run SFT with a fake reader: rows of metrics.jsonl."""

    def run_it(reader: Any, stop: threading.Event | None = None, **trainer: Any) -> list[Any]:
        settings = Settings(
            model={"path": tiny_folder()}, trainer={"mode": "sft", "learning_rate": 1e-2} | trainer
        )
        run: Run = create_run(settings, tmp_path / "run", "unix:///nowhere")

        with MetricsWriter(run.dir) as metrics:
            run_sft(
                run,
                make_ranks(run),
                reader=reader,
                metrics=metrics,
                stop=stop or threading.Event(),
            )
        return [json.loads(x) for x in (run.dir / "metrics.jsonl").read_text().splitlines()]

    return run_it


@pytest.mark.medium
def test_sft_reduces_the_loss_and_exports(
    conversations: list[Trajectory], train: Any, tmp_path: Path
) -> None:
    """Twenty epochs fit twelve conversations; the folder appears and the run is finished."""
    reader = Conversations(conversations)
    rows = train(reader, num_epochs=20, groups_per_step=4, num_steps=1000)
    assert len(rows) == 60
    assert rows[-1]["train/loss"] < 0.2 * rows[0]["train/loss"]
    assert rows[0]["train/trained_tokens"] == 12
    assert reader.states == ["running", "finished"]
    assert reader.statuses[-1]["step"] == "60/60"
    assert (tmp_path / "run/hf/model.safetensors").is_file()


def test_num_steps_is_an_upper_bound(conversations: list[Trajectory], train: Any) -> None:
    """Fewer steps than the epochs would give."""
    rows = train(Conversations(conversations), num_epochs=5, groups_per_step=4, num_steps=2)
    assert [row["step"] for row in rows] == [1, 2]


def test_every_conversation_is_used_once_per_epoch() -> None:
    """Each epoch is a permutation; the same seed gives the same order, another one another."""

    def steps_of(seed: int) -> list[list[int]]:
        trainer = {"mode": "sft", "groups_per_step": 4, "num_epochs": 3, "num_steps": 9}
        return batches(10, Settings(model={"path": "m"}, run={"seed": seed}, trainer=trainer))

    steps = steps_of(1)
    assert [len(members) for members in steps] == [4, 4, 2] * 3
    for epoch in range(3):
        members = [i for step in steps[3 * epoch : 3 * epoch + 3] for i in step]
        assert sorted(members) == list(range(10))
    assert steps == steps_of(1)
    assert steps != steps_of(2)


def test_steps_follow_from_the_conversations_where_they_are_left_out() -> None:
    """All passes are made; a given number bounds them, and RL needs one."""
    trainer = {"mode": "sft", "groups_per_step": 4, "num_epochs": 3}
    settings = Settings(model={"path": "m"}, trainer=trainer)
    assert settings.trainer.num_steps == 0
    assert len(batches(1000, settings)) == 750
    bounded = Settings(model={"path": "m"}, trainer=trainer | {"num_steps": 9})
    assert len(batches(1000, bounded)) == 9
    assert Settings(model={"path": "m"}).trainer.num_steps == 40
    with pytest.raises(ValueError, match="num_steps=0"):
        Settings(model={"path": "m"}, trainer={"num_steps": 0})


@pytest.mark.parametrize(("rate", "is_warned"), [(1e-6, True), (1e-2, False)])
def test_a_loss_that_hardly_moves_is_a_warning(
    conversations: list[Trajectory], train: Any, rate: float, is_warned: bool
) -> None:
    """The default rate of a large model does not warm a small one up, and the run says so."""
    with structlog.testing.capture_logs() as logs:
        rows = train(Conversations(conversations), learning_rate=rate, num_epochs=40)
    assert rows[-1]["step"] == 40
    said = [entry["sentence"] for entry in logs if entry["event"] == "hardly_learned"]
    assert bool(said) == is_warned
    if said:
        assert "Raise trainer.learning_rate=1e-06" in said[0]


@pytest.mark.medium
def test_conversations_that_never_end_are_a_deadline(
    conversations: list[Trajectory], train: Any
) -> None:
    """The error names the runner and how many were stored."""
    with pytest.raises(DeadlineExceeded, match="12 stored.*runner"):
        train(Conversations(conversations, ends=False), take_timeout_s=0.2)


def test_a_stop_while_waiting_writes_nothing(
    conversations: list[Trajectory], train: Any, tmp_path: Path
) -> None:
    """The trainer ends without a folder and without an end of the run."""
    stop = threading.Event()
    stop.set()
    reader = Conversations(conversations, ends=False)
    assert train(reader, stop) == []
    assert reader.states == ["running"]
    assert not (tmp_path / "run/hf").exists()


def test_foreign_token_ids_are_refused(
    make_turn: MakeTurn, make_trajectory: MakeTrajectory, train: Any
) -> None:
    """A tokenizer of another model is named as the likely cause."""
    turn = make_turn("a", output=[400], logprobs=None)
    with pytest.raises(SettingsError, match="vocab_size=400"):
        train(Conversations([make_trajectory([turn], purpose="sft")]))


def test_conversations_beyond_the_budget_are_left_out_with_a_warning(
    conversations: list[Trajectory],
    make_turn: MakeTurn,
    make_trajectory: MakeTrajectory,
    train: Any,
) -> None:
    """The others are trained."""
    long = make_trajectory([make_turn("a", output=[5] * 50, logprobs=None)], purpose="sft")
    with structlog.testing.capture_logs() as logs:
        rows = train(Conversations([*conversations, long]), max_microbatch_tokens=40)
    assert "1 conversations" in logs[0]["sentence"]
    assert rows[-1]["train/samples"] == 12


def test_no_conversation_at_all_is_refused(train: Any) -> None:
    """The sentence names the setting."""
    with pytest.raises(SettingsError, match=r"env\.conversations"):
        train(Conversations([]))
