"""Rank 0 and its followers: commands, samples as bytes, and who is named when one does not come."""

import re
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch.distributed as dist

from outloop.buffer.errors import DeadlineExceeded, PartFailed, RankKilled, SettingsError
from outloop.buffer.records import CheckpointMark
from outloop.engine.launch.torchrun import _what_failed
from outloop.engine.train.data.sample_codec import decode_samples, encode_samples
from outloop.engine.train.data.samples import Sample
from outloop.engine.train.ranks import controller
from outloop.engine.train.ranks.rank_phases import Phases


def test_samples_survive_their_bytes(make_samples: Callable[..., list[Sample]]) -> None:
    """Every field of every sample, arrays with their dtype."""
    samples = make_samples(5)
    for before, after in zip(samples, decode_samples(encode_samples(samples)), strict=True):
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
        controller.Update(b"s", 7),
        controller.Update(b"s"),
        controller.Scores("reference", b"s"),
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


@pytest.fixture
def two() -> tuple[Phases, Phases]:
    """The phases of two ranks on one store."""
    store = dist.HashStore()
    return Phases(store, rank=0, num_ranks=2), Phases(store, rank=1, num_ranks=2)


def gone() -> RuntimeError:
    """What gloo raises when the other rank's process has ended."""
    return RuntimeError(
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:11653: "
        "Connection reset by peer. This is typically caused by a remote worker hanging"
    )


def late() -> RuntimeError:
    """What gloo raises when the other rank does not come before the deadline."""
    return RuntimeError(
        "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting "
        "3000ms for recv operation to complete"
    )


def fail_in(phases: Phases, phase: str, error: Exception) -> None:
    """A rank in whose phase something fails."""
    with phases.enter(phase):
        raise error


def test_a_rank_that_waits_in_vain_names_whom_and_where(two: tuple[Phases, Phases]) -> None:
    """The other is still two phases behind."""
    first, second = two
    for phases in two:
        with phases.enter("build"):
            pass
    with first.enter("tell"):
        pass
    with pytest.raises(DeadlineExceeded, match=r"rank 0 .*'update' .*rank 1 \(in phase='build'"):
        fail_in(first, "update", late())
    assert second is not None


def test_a_rank_that_is_gone_is_named(two: tuple[Phases, Phases]) -> None:
    """A connection that breaks without a word: the run may be started again."""
    with pytest.raises(RankKilled, match=r"rank 0 lost another rank .*rank 1 \(not started"):
        fail_in(two[0], "update", gone())


def test_the_sentence_of_the_rank_that_failed_first_is_told(two: tuple[Phases, Phases]) -> None:
    """Not the broken connection that it left behind; settings stay settings."""
    with pytest.raises(ValueError, match="NaN"):
        fail_in(two[1], "update", ValueError("NaN in layer 3"))
    with pytest.raises(PartFailed, match=r"rank 1 failed in phase='update': .*NaN in layer 3"):
        fail_in(two[0], "update", gone())


def test_a_refusal_of_one_rank_is_that_of_all(two: tuple[Phases, Phases]) -> None:
    """The same exception type, so the exit code says that settings are to be changed."""
    with pytest.raises(SettingsError):
        fail_in(two[1], "load", SettingsError("lacks a tensor"))
    with pytest.raises(SettingsError, match="lacks a tensor"):
        fail_in(two[0], "load", gone())


@pytest.mark.parametrize(
    "sentence",
    [
        "expected a connection string, got ''",
        "the user's timeout is negative",
        "peer review says: shape mismatch",
        "CUDA error: out of memory while allocating NCCL buffers of 0 bytes",
    ],
)
def test_an_error_of_this_rank_is_not_taken_for_anothers_death(
    sentence: str, two: tuple[Phases, Phases]
) -> None:
    """Words of an error decide nothing: the other ranks learn whose error it is."""
    with pytest.raises(RuntimeError, match="^" + re.escape(sentence) + "$"):
        fail_in(two[0], "update", RuntimeError(sentence))
    with pytest.raises(PartFailed, match="rank 0 failed in phase='update'"):
        fail_in(two[1], "update", dist.DistNetworkError("The client socket has failed"))


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
