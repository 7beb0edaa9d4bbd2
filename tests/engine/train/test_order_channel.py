"""Orders of a publish beside training: what another rank answers, fails with, or leaves open."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from outloop.buffer.errors import DeadlineExceeded, PartFailed, PublishFailed
from outloop.engine.train.ranks.order_channel import OrderChannel

WAIT_S = 30.0


@pytest.fixture
def channels() -> Iterator[Callable[..., list[OrderChannel]]]:
    """`channels(timeout_s=1.0, is_broken=...)`: the ends of rank 0 and of two others."""
    made: list[OrderChannel] = []
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def make(
        timeout_s: float = WAIT_S, is_broken: Callable[[], bool] = lambda: False
    ) -> list[OrderChannel]:
        common: dict[str, Any] = {"num_ranks": 3, "timeout_s": timeout_s, "is_broken": is_broken}
        made.extend(OrderChannel(store, rank=rank, **common) for rank in range(3))
        return made

    yield make
    for channel in made:
        channel.close()


def test_every_rank_answers_in_the_order_of_ranks(
    channels: Callable[..., list[OrderChannel]],
) -> None:
    """Order by order."""
    first, *others = channels()
    for rank, channel in enumerate(others, start=1):
        channel.follow(lambda order, rank=rank: order + str(rank).encode())
    for order in (b"a", b"b"):
        answers = first.ask(order, lambda own: own + b"0")
        assert answers == [order + b"0", order + b"1", order + b"2"]


def test_a_rank_that_fails_says_why(channels: Callable[..., list[OrderChannel]]) -> None:
    """Its sentence is rank 0's error."""
    first, good, bad = channels()

    def fail(order: bytes) -> bytes:
        raise PublishFailed("no such bucket")

    good.follow(lambda order: order)
    bad.follow(fail)
    with pytest.raises(PartFailed, match="trainer rank 2 failed in a publish: no such bucket"):
        first.ask(b"a", lambda own: own)


@pytest.mark.medium
def test_a_rank_that_does_not_answer_costs_the_deadline(
    channels: Callable[..., list[OrderChannel]],
) -> None:
    """And is named."""
    first, good, _ = channels(timeout_s=1.0)
    good.follow(lambda order: order)
    with pytest.raises(DeadlineExceeded, match="trainer rank 2"):
        first.ask(b"a", lambda own: own)


@pytest.mark.medium
def test_a_rank_that_the_training_lost_is_not_waited_for(
    channels: Callable[..., list[OrderChannel]],
) -> None:
    """Well before the deadline."""
    lost = threading.Event()
    first, good, _ = channels(timeout_s=600.0, is_broken=lost.is_set)
    good.follow(lambda order: order)
    lost.set()
    began_at = time.monotonic()
    with pytest.raises(PartFailed, match="lost during a publish"):
        first.ask(b"a", lambda own: own)
    assert time.monotonic() - began_at < WAIT_S
