"""Rank 0 and its followers: commands, samples as bytes, and who is named when one does not come."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from outloop.buffer.errors import RankKilled
from outloop.buffer.records import CheckpointMark
from outloop.engine.launch.torchrun import _what_failed
from outloop.engine.train.data.samples import Sample
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.ranks import controller


def test_a_batch_survives_its_bytes(make_samples: Callable[..., list[Sample]]) -> None:
    """Every field of every row, arrays with their dtype; an empty batch too."""
    assert len(TrainBatch.decode(TrainBatch.of([]).encode())) == 0
    samples = make_samples(5)
    batch = TrainBatch.decode(TrainBatch.of(samples).encode())
    for before, after in zip(samples, batch, strict=True):
        for name in Sample.__slots__:
            want, got = getattr(before, name), getattr(after, name)
            assert np.array_equal(want, got) if isinstance(want, np.ndarray) else want == got, name
            assert getattr(want, "dtype", None) == getattr(got, "dtype", None)


@pytest.mark.parametrize(
    "command",
    [
        controller.Idle(),
        controller.End("why"),
        controller.Build(3),
        controller.LoadBatch(b"s"),
        controller.SetColumn("advantages", b"s"),
        controller.ScoreReference([0, 1]),
        controller.RecomputeProximal([[0, 2], [1]]),
        controller.Update([0, 2], 7),
        controller.Update(),
        controller.Scores("policy", None),
        controller.ScorePrompts([[1, 2]]),
        controller.Save(
            4, CheckpointMark(fence=1, group_ids=("g",), next_slot=2, policy_version=3), ""
        ),
        controller.Read(["a", "b"]),
    ],
)
def test_commands_survive_their_bytes(command: Any) -> None:
    """What rank 0 says is what a follower hears."""
    data = msgspec.msgpack.encode(command)
    assert msgspec.msgpack.decode(data, type=controller.Command) == command


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
    assert str(_what_failed([(0, broken), (1, settings)])) == "a: b"
    assert isinstance(_what_failed([(0, broken), (1, _Failure(-9, ""))]), RankKilled)
    assert "rank 0" in str(_what_failed([(0, broken), (1, _Failure(-15, ""))]))
