"""Experts of tokens, packed: what comes back, what is refused, and which runs record them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from outloop.buffer.errors import RecordError, SettingsError
from outloop.buffer.records import Turn
from outloop.buffer.routed_experts import (
    RoutedExperts,
    RoutingShape,
    replayed_shape,
    routing_shape,
)
from outloop.buffer.settings import build_settings

SHAPE = RoutingShape(num_layers=2, top_k=2, num_experts=8)
MIXTURE = {"num_hidden_layers": 2, "num_experts_per_tok": 2, "num_experts": 8}


@given(
    st.sampled_from([2, 8, 255, 256, 257, 65535]),
    st.integers(0, 5),
    st.integers(0, 2**32),
    st.data(),
)
def test_every_expert_comes_back(
    num_experts: int, num_rows: int, seed: int, data: st.DataObject
) -> None:
    """In one byte or two; what is no expert of the model is unknown; rows join in their order."""
    shape = RoutingShape(num_layers=3, top_k=2, num_experts=num_experts)
    generator = np.random.default_rng(seed)
    given_experts = generator.integers(-2, num_experts + 2, (num_rows, 3, 2)).astype(np.int32)
    packed = RoutedExperts.of(shape, given_experts)
    assert packed.num_rows == num_rows
    assert len(packed.data) == num_rows * 6 * (1 if num_experts < 256 else 2)
    is_known = (given_experts >= 0) & (given_experts < num_experts)
    np.testing.assert_array_equal(packed.experts[is_known], given_experts[is_known])
    assert (packed.experts[~is_known] == shape.unknown).all()
    cut = data.draw(st.integers(0, num_rows))
    first, second = (RoutedExperts.of(shape, part) for part in np.split(given_experts, [cut]))
    assert first.followed_by(second) == packed


def test_rows_of_another_model_are_refused() -> None:
    """Another number of layers, experts, or a broken row."""
    with pytest.raises(RecordError, match=r"\(2, 2\)"):
        RoutedExperts.of(SHAPE, np.zeros((4, 3, 2)))
    with pytest.raises(RecordError, match="no rows of 4"):
        RoutedExperts(shape=SHAPE, data=b"12345")
    with pytest.raises(RecordError, match="no mixture"):
        RoutedExperts(shape=RoutingShape(num_layers=1, top_k=3, num_experts=2), data=b"")
    other = RoutingShape(num_layers=2, top_k=2, num_experts=9)
    with pytest.raises(RecordError, match="cannot follow"):
        RoutedExperts.of(SHAPE, np.zeros((1, 2, 2))).followed_by(
            RoutedExperts.of(other, np.zeros((1, 2, 2)))
        )


def with_experts(turn: Turn, num_rows: int) -> Turn:
    """The turn with so many rows."""
    experts = np.arange(num_rows * 4).reshape(num_rows, 2, 2) % 8
    return replace(turn, routed_experts=RoutedExperts.of(SHAPE, experts))


async def test_a_turn_keeps_its_experts_on_its_way_through_the_buffer(
    start: Callable[..., Any], make_turn: Callable[..., Turn]
) -> None:
    """What a router appends is what the trainer takes, byte by byte."""
    loop = await start()
    sent: dict[str, Turn] = {}
    for claim in (await loop.claim()).claims:
        episode_id = await loop.open(claim)
        for turn in (make_turn(episode_id), make_turn(episode_id, 1, parent=0)):
            sent[turn.turn_id] = with_experts(turn, 7 if turn.parent_turn_id else 6)
            await loop.writer.append_turn(sent[turn.turn_id])
        await loop.close(episode_id)
    taken = [t for lease in loop.take() for one in lease.group.trajectories for t in one.turns]
    assert len(taken) == len(sent) == 8
    assert all(turn.routed_experts == sent[turn.turn_id].routed_experts for turn in taken)


def test_a_turn_has_a_row_before_each_id(make_turn: Callable[..., Turn]) -> None:
    """One less for a root, before whose first id there is no token."""
    root, child = make_turn("e"), make_turn("e", 1, parent=0)
    assert with_experts(root, 6).routed_experts is not None
    assert with_experts(child, 7).routed_experts is not None
    for turn, num_rows in ((root, 7), (child, 6)):
        with pytest.raises(RecordError, match=f"has {num_rows} rows; {13 - num_rows} are due"):
            with_experts(turn, num_rows)


@pytest.mark.parametrize(
    ("config", "trainer", "expected"),
    [
        (MIXTURE, {}, SHAPE),
        (MIXTURE, {"routing_replay": False}, None),
        (MIXTURE | {"num_experts": 0}, {}, None),
        (MIXTURE, {"mode": "sft"}, None),
        ({"num_hidden_layers": 2, "num_experts_per_tok": 2, "n_routed_experts": 8}, {}, SHAPE),
    ],
)
def test_mixtures_are_replayed_unless_a_run_says_otherwise(
    config: dict[str, int], trainer: dict[str, Any], expected: RoutingShape | None, tmp_path: Path
) -> None:
    """Dense models and supervised fine-tuning never are."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    tree = {"model": {"path": str(tmp_path)}, "trainer": trainer}
    assert replayed_shape(build_settings(tree, source="test")) == expected


def test_replay_of_a_dense_model_is_refused(tmp_path: Path) -> None:
    """Asked for in so many words, it must be there."""
    tree = {"model": {"path": str(tmp_path)}, "trainer": {"routing_replay": True}}
    settings = build_settings(tree, source="test")
    with pytest.raises(SettingsError, match="cannot be read"):
        replayed_shape(settings)
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    with pytest.raises(SettingsError, match="has no experts"):
        replayed_shape(settings)
    assert routing_shape({"num_hidden_layers": 2}) is None
