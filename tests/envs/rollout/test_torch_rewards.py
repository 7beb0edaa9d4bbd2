"""Rewards that are torch's numbers."""

import msgspec
import pytest
import torch

from outloop.buffer.errors import RecordError
from outloop.buffer.records import Reward
from outloop.envs.rollout.episode_result import as_reward


@pytest.mark.parametrize(
    "number",
    [
        torch.tensor(1.0),
        torch.tensor(1, dtype=torch.int8),
        torch.tensor(1.0, dtype=torch.bfloat16, requires_grad=True),
    ],
)
def test_a_number_of_torch_is_a_reward(number: torch.Tensor) -> None:
    """It becomes a plain float, so that it can be encoded."""
    for reward in (as_reward(number, {}), as_reward(Reward(value=number), {})):
        assert msgspec.msgpack.encode(reward) == msgspec.msgpack.encode(Reward(value=1.0))


def test_a_truth_value_of_torch_is_no_reward() -> None:
    """As Python's."""
    with pytest.raises(RecordError):
        as_reward(torch.tensor(True), {})
