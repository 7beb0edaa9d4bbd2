"""Ids that tokens were sampled among, packed: what comes back, what is refused."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.records import trajectory_of
from outloop.buffer.codec.jsonl import format_line, parse_line
from outloop.buffer.codec.records_codec import decode_turn, encode_turn
from outloop.buffer.errors import RecordError, SettingsError
from outloop.buffer.records import Sampling, Turn, VersionSpan
from outloop.buffer.sampling_support import SamplingSupport
from outloop.buffer.settings import build_settings

CUT = Sampling(temperature=1.0, top_p=0.9)
LEFT = SamplingSupport.of([[3, 9], [8, 4, 70_000]])


def turn(**changed: Any) -> Turn:
    """Two tokens, sampled among two and three ids."""
    fields: dict[str, Any] = {
        "turn_id": "a",
        "episode_id": "e",
        "parent_turn_id": None,
        "prompt_ids": np.array([1], np.int32),
        "output_ids": np.array([3, 4], np.int32),
        "behavior_logprobs": np.array([-0.5, -0.25], np.float32),
        "version_spans": (VersionSpan(0, 0, 2),),
        "loss_spans": ((0, 2),),
        "sampling": CUT,
        "finish_reason": "stop",
        "started_at": 0.0,
        "finished_at": 0.0,
        "support": LEFT,
    }
    return Turn(**fields | changed)


@given(st.lists(st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 2**16 - 1), max_size=5)))
def test_every_id_comes_back(ids: list[list[int]]) -> None:
    """In two bytes or four, by token, empty lists too."""
    packed = SamplingSupport.of(ids)
    assert packed.lists() == ids
    assert packed.counts.tolist() == [len(some) for some in ids]
    is_short = max((one for some in ids for one in some), default=0) < 2**16
    assert len(packed.data) == sum(map(len, ids)) * (2 if is_short else 4)


def test_a_turn_keeps_it_in_every_format() -> None:
    """As Redis and as JSON lines hold it."""
    assert decode_turn(encode_turn(turn())).support == LEFT
    (read,) = parse_line(format_line(trajectory_of([turn()]))).turns
    assert read.support == LEFT


def test_bytes_that_are_no_support_are_refused() -> None:
    """Counts and ids that do not fit together, and too many ids of one token."""
    with pytest.raises(RecordError, match="do not describe"):
        SamplingSupport(num_ids=b"\x02\x00", data=b"\x01\x00")
    with pytest.raises(RecordError, match="do not describe"):
        SamplingSupport(num_ids=b"\x02", data=b"\x01\x00")
    with pytest.raises(RecordError, match="at most 65535"):
        SamplingSupport.of([range(2**16)])


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"support": SamplingSupport.of([[3, 9]])}, "support of 1 tokens for 2"),
        ({"support": SamplingSupport.of([[3, 9], [8, 5]])}, "lacks, or repeats"),
        ({"support": SamplingSupport.of([[3, 3], [4]])}, "lacks, or repeats"),
        ({"support": SamplingSupport.of([[3], []])}, "whose support"),
        ({"sampling": Sampling(temperature=1.0)}, "cut by top_p"),
        ({"sampling": Sampling(temperature=0.0, top_p=0.9)}, "cut by top_p"),
        ({"sampling": Sampling(temperature=1.0, top_p=0.9, presence_penalty=1.0)}, "cut by top_p"),
    ],
)
def test_a_turn_that_contradicts_its_support_is_refused(
    changed: dict[str, Any], sentence: str
) -> None:
    """A sampled id that is not in it, a trained token without one, a whole distribution."""
    assert turn().is_behavior_known
    assert not turn(support=None).is_behavior_known
    assert turn(support=SamplingSupport.of([[3], []]), loss_spans=((0, 1),)).is_behavior_known
    with pytest.raises(RecordError, match=sentence):
        turn(**changed)


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ({"sampling": {"top_k": 1}}, "no alternative"),
        ({"sampling": {"top_k": 2000}}, "max_support_ids=1024"),
        ({"sampling": {"top_p": 0.9, "max_support_ids": 0}}, "would not be trained"),
        ({"sampling": {"top_p": 0.9}, "server": {"kind": "sglang"}}, "set sampling.top_k"),
        (
            {
                "sampling": {"top_p": 0.9, "top_k": 256},
                "server": {"kind": "sglang", "sglang": {"sampling-mask-max-tokens": 128}},
            },
            "from 2 to 128",
        ),
        (
            {
                "sampling": {"top_p": 0.9},
                "trainer": {"teacher": {"path": "teacher"}},
            },
            "a teacher scores the whole vocabulary",
        ),
    ],
)
def test_a_cut_that_would_not_be_trained_is_refused(tree: dict[str, Any], sentence: str) -> None:
    """With what to set instead."""
    with pytest.raises(SettingsError, match=sentence):
        build_settings({"model": {"path": "policy"}, **tree}, source="test")
