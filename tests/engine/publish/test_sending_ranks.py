"""Weights that leave from several trainer ranks: every share arrives, whoever dies meanwhile.

The ranks are objects in this process; real ones are in tests/engine/train/test_sending_ranks.py.
"""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from fakes.sharing_ranks import SharingRanks
from outloop.buffer.errors import PublishFailed, RankKilled
from outloop.buffer.settings import Settings
from outloop.engine.publish.buckets.plan import TensorSpec
from outloop.engine.publish.sending.orders import Begin, Broadcast, Join, Order, Outcome
from outloop.engine.publish.sending.shares import share_out

SHORT_S = 9.0
TRANSPORTS = ["collective", "shared_memory", "disk"]


@pytest.fixture
def sharing(
    make_publisher: Callable[..., Any], other_weights: dict[str, torch.Tensor]
) -> Iterator[Callable[..., Any]]:
    """`sharing("disk", before=..., num_servers=1)`: a publisher, and three ranks to publish."""
    made: list[SharingRanks] = []

    def make(
        transport: str,
        before: Callable[[Order], None] = lambda order: None,
        ranks_type: type[SharingRanks] = SharingRanks,
        **settings: Any,
    ) -> tuple[Any, SharingRanks]:
        publish = {"transport": transport, "bucket_mb": 0.05, "fallback": "none"} | settings
        publisher = make_publisher(**publish)
        publish.pop("num_servers", None)
        tree = Settings(model={"path": "m"}, publish=publish)
        made.append(ranks_type(other_weights, tree, num_ranks=3, before=before))
        return publisher, made[-1]

    yield make
    for ranks in made:
        ranks.close()


class WithoutRoom(SharingRanks):
    """The last rank has no memory for a bucket."""

    def carry_out(self, transport: str, order: Order) -> Sequence[Outcome]:
        """As it would answer."""
        *others, last = super().carry_out(transport, order)
        if isinstance(order, Begin):
            last = Outcome(error="no room for a bucket")
        return [*others, last]


def _specs(*names: str, size: int = 10) -> list[TensorSpec]:
    return [TensorSpec(name=name, shape=(size,), dtype=torch.float32) for name in names]


def test_a_layer_leaves_from_one_rank_that_holds_it() -> None:
    """Two stages of two ranks: about the same for both ranks of a stage, nothing for the other."""
    layers = [f"model.layers.{n}.{part}" for n in range(8) for part in ("q", "k", "mlp.up")]
    specs = _specs("embed", *layers, "norm", "head")
    holders = {spec.name: {0, 1} for spec in specs[:13]} | {s.name: {2, 3} for s in specs[13:]}
    holders["norm"] = {2}
    shares = share_out(specs, holders, num_ranks=4, among=range(4))
    rank_of = {spec.name: rank for rank, share in enumerate(shares) for spec in share}
    assert rank_of.keys() == holders.keys()
    assert all(rank in holders[name] for name, rank in rank_of.items())
    for n in range(8):
        assert len({rank_of[name] for name in layers if f".{n}." in name}) == 1
    sizes = [len(share) for share in shares]
    assert max(sizes[:2]) - min(sizes[:2]) <= 3
    assert max(sizes[2:]) - min(sizes[2:]) <= 3


def test_what_no_allowed_rank_holds_leaves_from_any_of_them() -> None:
    """As in shared memory, where only ranks beside the servers can send."""
    specs = _specs("embed", "model.layers.0.q", "model.layers.1.q", "head")
    holders = {"embed": {0}, "model.layers.0.q": {0}, "model.layers.1.q": {2}, "head": {3}}
    shares = share_out(specs, holders, num_ranks=4, among=[0, 1])
    assert [[spec.name for spec in share] for share in shares] == [
        ["embed", "model.layers.0.q"],
        ["model.layers.1.q", "head"],
        [],
        [],
    ]


@pytest.mark.medium
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_share_arrives(
    transport: str,
    server_process: Callable[..., Any],
    sharing: Callable[..., Any],
    registry: Any,
    greedy: Any,
    expected_ids: list[int],
) -> None:
    """Two servers generate by all of the weights, and again after a second publish; the report has
    the bytes of each rank."""
    servers = {f"server-{index}": server_process() for index in range(2)}
    for server_id, server in servers.items():
        registry.add(server_id, server.url)
    publisher, ranks = sharing(transport, num_servers=2, phase_timeout_s=20.0)
    for version in (1, 2):
        report = publisher.publish(ranks, version)
        assert report.quarantined == ()
        shares = [sum(spec.num_bytes for spec in share) for share in ranks.shares]
        assert [rank.sent_bytes for rank in report.ranks] == shares
        assert min(shares) > 0
        assert report.num_bytes == sum(shares)
        assert report.peak_extra_buckets <= 2
    for server_id, server in servers.items():
        assert registry.state(server_id) == (2, False)
        assert greedy(server.url)["output_ids"] == expected_ids
    # The groups live from publish to publish.
    joins = [order for order in ranks.orders if isinstance(order, Join)]
    assert [order.rank for order in joins] == ([0, 1, 2] if transport == "collective" else [])


@pytest.mark.medium
def test_a_server_lost_in_the_middle_costs_a_fallback_and_all_groups_are_built_again(
    server_process: Callable[..., Any], sharing: Callable[..., Any], registry: Any
) -> None:
    """Killed before the second rank's bucket: the other server loads this version from disk, the
    next over groups without the dead one."""
    servers = {f"server-{index}": server_process() for index in range(2)}
    for server_id, server in servers.items():
        registry.add(server_id, server.url)

    def lose(order: Order) -> None:
        is_second = isinstance(order, Broadcast) and (order.rank, order.index) == (1, 0)
        if is_second and not joined:
            servers["server-1"].signal(signal.SIGKILL)

    joined: list[Order] = []
    publisher, ranks = sharing(
        "collective", lose, num_servers=2, fallback="disk", phase_timeout_s=SHORT_S
    )
    began_at = time.monotonic()
    report = publisher.publish(ranks, 1)
    assert time.monotonic() - began_at < 6 * SHORT_S
    assert report.quarantined == ("server-1",)
    assert registry.state("server-0") == (1, False)
    joined += ranks.orders
    assert publisher.publish(ranks, 2).quarantined == ()
    assert registry.state("server-0") == (2, False)
    again = [order for order in ranks.orders[len(joined) :] if isinstance(order, Join)]
    assert [(order.rank, order.world_size) for order in again] == [(0, 2), (1, 2), (2, 2)]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("behaviour", "phase"),
    [("refuse", "join"), ("claim", "join"), ("refuse", "first_byte"), ("hang", "first_byte")],
)
def test_a_server_that_fails_one_group_is_left_out_of_all(
    server_process: Callable[..., Any],
    lying_server: Callable[..., Any],
    sharing: Callable[..., Any],
    registry: Any,
    behaviour: str,
    phase: str,
) -> None:
    """The other one takes the weights over groups of its own, without a fallback."""
    registry.add("good", server_process().url)
    registry.add("bad", lying_server(behaviour, phase).url)
    publisher, ranks = sharing("collective", num_servers=2, phase_timeout_s=SHORT_S)
    report = publisher.publish(ranks, 1)
    (bad,) = [result for result in report.results if result.is_quarantined]
    assert (bad.server_id, bad.failed_phase) == ("bad", "join")
    assert registry.state("good") == (1, False)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("transport", "kind"),
    [
        *[("collective", kind) for kind in ("Join", "Begin", "Fill", "Broadcast", "Await")],
        *[("collective", "Report"), ("shared_memory", "Describe"), ("disk", "Write")],
    ],
)
@pytest.mark.parametrize("number", [0, 2])
def test_a_rank_that_dies_ends_the_publish_and_no_server_goes_on_with_half_of_it(
    lying_server: Callable[..., Any],
    sharing: Callable[..., Any],
    registry: Any,
    transport: str,
    kind: str,
    number: int,
) -> None:
    """At the first order of a kind, or the third: no rank gets a further order, which would wait
    for the dead one, and servers that were asked for anything are quarantined."""
    server = lying_server("honest")
    registry.add("server-0", server.url)
    seen: list[Order] = []

    def die(order: Order) -> None:
        if type(order).__name__ == kind:
            seen.append(order)
            if len(seen) == number + 1 or kind in ("Begin", "Report"):
                raise RankKilled("trainer rank 1 was killed")

    publisher, ranks = sharing(transport, die)
    with pytest.raises(RankKilled, match="rank 1 was killed"):
        publisher.publish(ranks, 1)
    assert ranks.orders[-1] is seen[-1]
    assert registry.state("server-0") == (None, True)
    assert "/continue_generation" not in server.calls


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_without_room_is_named(
    lying_server: Callable[..., Any],
    sharing: Callable[..., Any],
    registry: Any,
    transport: str,
) -> None:
    """Nothing is sent, and nobody waits for what it would have sent."""
    registry.add("server-0", lying_server("honest").url)
    publisher, ranks = sharing(transport, ranks_type=WithoutRoom)
    with pytest.raises(PublishFailed, match="trainer rank 2: no room for a bucket"):
        publisher.publish(ranks, 1)
    assert registry.state("server-0") == (None, True)
