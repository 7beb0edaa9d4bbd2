"""What rank 0 announces to the others, and what becomes of a rank that fails."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from outloop.buffer.errors import RankKilled
from outloop.buffer.records import CheckpointMark
from outloop.engine.launch.torchrun import cause_of_failure
from outloop.engine.train.algorithms.credit import ScoredEpisode, ScoredGroup, ScoredTurn
from outloop.engine.train.checkpoint.checkpoint_format import Checkpoint
from outloop.engine.train.data.batch_builder import Credit
from outloop.engine.train.data.samples import Sample
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.ranks.controller import Call
from outloop.engine.train.ranks.rank_worker import RankWorker


def test_a_batch_survives_its_bytes(make_samples: Callable[..., list[Sample]]) -> None:
    """Every column, absent ones too, arrays with their dtype; an empty batch too."""
    assert len(TrainBatch.decode(TrainBatch.of([]).encode())) == 0
    samples = make_samples(5)
    given = TrainBatch.of(samples)
    given = given.with_columns(correction=np.full(given.token_ids.shape, 0.25, np.float32))
    batch = TrainBatch.decode(given.encode())
    assert batch.reference_logprobs is None
    assert (batch.correction == 0.25).all()
    samples = list(given)
    for before, after in zip(samples, batch, strict=True):
        for name in (field.name for field in fields(Sample)):
            want, got = getattr(before, name), getattr(after, name)
            assert np.array_equal(want, got) if isinstance(want, np.ndarray) else want == got, name
            assert getattr(want, "dtype", None) == getattr(got, "dtype", None)


class Recorder(RankWorker):
    """A worker that writes down what it is asked to do."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or name == "calls":
            return super().__getattribute__(name)
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


def test_a_step_reaches_every_rank_whole(make_samples: Callable[..., list[Sample]]) -> None:
    """Rows, updates and rewards in one message."""
    turn = ScoredTurn(
        turn_id="t",
        parent=None,
        request=0,
        num_tokens=3,
        oldest_version=None,
        is_cut=True,
        spans=((0, 2, 0.5),),
    )
    episodes = (
        ScoredEpisode(episode_id="a", reward=0.0, turns=(turn,), branches=((0,),)),
        ScoredEpisode(episode_id="b", reward=1.0, components={"form": 0.5}),
    )
    group = ScoredGroup(group_id="g", task_id="t", source="easy", episodes=episodes)
    credit = Credit(groups=(group,), teaches=(True,), rows={0: ((0, 1), (2,))})
    batch = TrainBatch.of(make_samples(5))
    ids = np.arange(2 * len(batch.token_ids), dtype=np.int32).reshape(-1, 2)
    test_every_rank_gets_the_arguments_that_rank_0_gave(
        RankWorker.train_step,
        {
            "batch": batch.with_columns(teacher_top_ids=ids),
            "updates": [[0, 2], [1]],
            "credit": credit,
            "contexts": {"a": (3, 4)},
            "step": 2,
            "policy_version": 7,
        },
    )


MARK = CheckpointMark(fence=1, group_ids=("g",), next_slot=2, policy_version=3)
CHECKPOINT = Checkpoint(
    path=Path("checkpoints/step_2"), step=2, num_updates=3, mark=MARK, model={"num_layers": 2}
)


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        (RankWorker.build, {"num_updates": 3}),
        (RankWorker.load_reference, {"pinned_hash": "x", "checkpoint": CHECKPOINT}),
        (RankWorker.load_teacher, {}),
        (RankWorker.score_prompts, {"prompts": [[1, 2], [3]]}),
        (RankWorker.save, {"step": 4, "mark": MARK, "reference_hash": ""}),
        (RankWorker.load, {"checkpoint": CHECKPOINT}),
        (RankWorker.send_weights, {"names": ["a", "b"]}),
        (RankWorker.leave_device, {"keeps_weights": True}),
    ],
)
def test_every_rank_gets_the_arguments_that_rank_0_gave(
    operation: Callable[..., Any], arguments: dict[str, Any]
) -> None:
    """Each operation of the worker survives its way as bytes, by the types that it declares."""
    assert set(arguments) == set(inspect.signature(operation).parameters) - {"self"}
    data = msgspec.msgpack.encode(Call.of(operation, **arguments))
    recorder = Recorder()
    msgspec.msgpack.decode(data, type=Call).perform(recorder)
    ((name, _, given),) = recorder.calls
    assert name == operation.__name__
    for key, value in arguments.items():
        if isinstance(value, TrainBatch):
            assert given[key].encode() == value.encode()
        else:
            assert given[key] == value


class _Failure:
    def __init__(self, exitcode: int, message: Any) -> None:
        self.exitcode = exitcode
        self.message = message

    def signal_name(self) -> str:
        return "SIGKILL"


def test_torchruns_failures_become_one_cause() -> None:
    """A killed rank first, then settings, then others; torchrun's own SIGTERM last."""
    settings = _Failure(2, {"message": "SettingsError: a: b", "extraInfo": {}})
    broken = _Failure(1, {"message": "RuntimeError: connection", "extraInfo": {}})
    assert str(cause_of_failure([(0, broken), (1, settings)])) == "a: b"
    assert isinstance(cause_of_failure([(0, broken), (1, _Failure(-9, ""))]), RankKilled)
    assert "rank 0" in str(cause_of_failure([(0, broken), (1, _Failure(-15, ""))]))
