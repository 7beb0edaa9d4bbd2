"""The group transport against server processes that die, hang, refuse, lie or never join."""

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fakes.deadly_tap import DeadlyTap
from fakes.interrupted_tensors import InterruptedTensors
from fakes.local_tensors import LocalTensors
from fakes.lying_server import PATHS
from outloop.buffer.errors import PublishFailed
from outloop.engine.publish.process_group import Rendezvous, join_group

TINY_BUCKET_MB = 0.05
SHORT_S = 9.0
"""Of a phase; long enough for a busy machine to answer within a third of it."""


@pytest.fixture
def publish_to(
    make_publisher: Callable[..., Any],
    registry: Any,
    other_weights: dict[str, torch.Tensor],
) -> Callable[..., Any]:
    """`publish_to({"a": url}, phase_timeout_s=...)` registers, gives `publish(version, source)`."""

    def start(urls: dict[str, str], **settings: Any) -> Callable[..., Any]:
        for server_id, url in urls.items():
            registry.add(server_id, url)
        settings = {"bucket_mb": TINY_BUCKET_MB, "fallback": "none"} | settings
        publisher = make_publisher(num_servers=len(urls), transport="collective", **settings)

        def publish(version: int, source: Any = None) -> Any:
            return publisher.publish(source or LocalTensors(other_weights), version)

        return publish

    return start


@pytest.fixture
def three(server_process: Callable[..., Any]) -> dict[str, Any]:
    """Three server processes by id."""
    return {f"server-{index}": server_process() for index in range(3)}


def _urls(servers: dict[str, Any]) -> dict[str, str]:
    return {server_id: server.url for server_id, server in servers.items()}


@pytest.mark.medium
def test_all_servers_take_what_is_broadcast(
    three: dict[str, Any],
    publish_to: Callable[..., Any],
    registry: Any,
    greedy: Any,
    expected_ids: list[int],
) -> None:
    """Three servers generate with the new weights under the version; the group serves twice."""
    publish = publish_to(_urls(three), phase_timeout_s=20.0)
    for version in (1, 2):
        report = publish(version)
        assert report.quarantined == ()
        assert report.num_buckets > 3
        assert report.peak_extra_buckets <= 2
    for server_id, server in three.items():
        assert registry.state(server_id) == (2, False)
        answer = greedy(server.url)
        assert answer["meta_info"]["weight_version"] == "2"
        assert answer["output_ids"] == expected_ids


@pytest.mark.medium
def test_a_member_lost_in_the_middle_costs_a_fallback_and_the_group_is_built_again(
    three: dict[str, Any],
    publish_to: Callable[..., Any],
    registry: Any,
    other_weights: dict[str, torch.Tensor],
    greedy: Any,
) -> None:
    """Killed between two buckets: the others load this version from disk, the next as a group."""
    publish = publish_to(_urls(three), phase_timeout_s=SHORT_S, fallback="disk")
    publish(1)

    def lose(index: int) -> None:
        if index == len(other_weights) // 2:
            three["server-1"].signal(signal.SIGKILL)

    began_at = time.monotonic()
    report = publish(2, InterruptedTensors(other_weights, lose))
    assert time.monotonic() - began_at < 6 * SHORT_S
    assert report.quarantined == ("server-1",)
    assert registry.state("server-1") == (None, True)
    assert publish(3).quarantined == ()
    for server_id in ("server-0", "server-2"):
        assert registry.state(server_id) == (3, False)
        assert greedy(three[server_id].url)["meta_info"]["weight_version"] == "3"


@pytest.mark.medium
@pytest.mark.parametrize(
    ("behaviour", "phase"),
    [
        ("hang", "join"),
        ("claim", "join"),
        ("error", "join"),
        ("refuse", "join"),
        ("hang", "first_byte"),
        ("refuse", "first_byte"),
    ],
)
def test_a_member_that_never_joins_is_quarantined(
    server_process: Callable[..., Any],
    lying_server: Callable[..., Any],
    publish_to: Callable[..., Any],
    registry: Any,
    behaviour: str,
    phase: str,
) -> None:
    """It does not answer, says it has joined and has not, or refuses: the other one loads them.

    Or it joins, and does not answer or refuses when the group is to carry its first byte.
    """
    urls = {"good": server_process().url, "bad": lying_server(behaviour, phase).url}
    began_at = time.monotonic()
    report = publish_to(urls, phase_timeout_s=SHORT_S)(1)
    assert time.monotonic() - began_at < 6 * SHORT_S
    assert report.quarantined == ("bad",)
    (bad,) = [result for result in report.results if result.is_quarantined]
    assert bad.failed_phase == "join"
    assert registry.state("good") == (1, False)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("behaviour", "phase"),
    [
        ("hang", "broadcast"),
        ("claim", "broadcast"),
        ("error", "broadcast"),
        ("refuse", "broadcast"),
        ("wrong", "broadcast"),
        ("claim", "first_byte"),
    ],
)
def test_a_member_that_joined_and_does_not_take_buckets_is_quarantined(
    server_process: Callable[..., Any],
    lying_server: Callable[..., Any],
    publish_to: Callable[..., Any],
    registry: Any,
    behaviour: str,
    phase: str,
) -> None:
    """It hangs, refuses, acknowledges what it did not receive, or holds something else.

    The other one loads the version, from disk where the broadcast broke.
    """
    urls = {"good": server_process().url, "bad": lying_server(behaviour, phase).url}
    report = publish_to(urls, phase_timeout_s=SHORT_S, fallback="disk")(1)
    assert ("bad", None, True) in registry.history
    assert "good" not in report.quarantined
    assert registry.state("good") == (1, False)


@pytest.fixture
def stopping_server(
    server_process: Callable[..., Any],
) -> Iterator[Callable[[], str]]:
    """The URL of a server process that is stopped (SIGSTOP) before the first byte of a group."""
    taps: list[DeadlyTap] = []

    def start() -> str:
        server = server_process()
        stopped = SimpleNamespace(url=server.url, kill=lambda: server.signal(signal.SIGSTOP))
        taps.append(DeadlyTap(stopped, PATHS["begin"], "after"))
        return taps[-1].url

    yield start
    for tap in taps:
        tap.close()


@pytest.mark.medium
@pytest.mark.parametrize("is_late", [False, True])
def test_a_member_that_was_stopped_is_found_by_the_first_byte(
    server_process: Callable[..., Any],
    stopping_server: Callable[[], str],
    publish_to: Callable[..., Any],
    registry: Any,
    greedy: Any,
    is_late: bool,
) -> None:
    """In the first group, and in one that is made anew for a latecomer: no weights were sent to
    it, and the other takes them as a group, without a fallback."""
    urls = {"good": server_process().url}
    if not is_late:
        urls["stopped"] = stopping_server()
    publish = publish_to(urls, phase_timeout_s=SHORT_S)
    if is_late:
        assert publish(1).quarantined == ()
        registry.add("stopped", stopping_server())
    began_at = time.monotonic()
    report = publish(2)
    # The byte's third of a phase, and what it costs to leave a server alone that does not answer.
    assert time.monotonic() - began_at < 3 * SHORT_S
    (bad,) = [result for result in report.results if result.is_quarantined]
    assert (bad.server_id, bad.failed_phase) == ("stopped", "join")
    assert registry.state("good") == (2, False)
    assert greedy(urls["good"])["meta_info"]["weight_version"] == "2"


@pytest.mark.medium
def test_no_server_left_is_an_error_within_the_deadline(
    server_process: Callable[..., Any],
    publish_to: Callable[..., Any],
    registry: Any,
    other_weights: dict[str, torch.Tensor],
) -> None:
    """The only member is killed between two buckets: PublishFailed, and it is quarantined."""
    server = server_process()
    publish = publish_to({"server-0": server.url}, phase_timeout_s=SHORT_S)

    def kill(index: int) -> None:
        if index == len(other_weights) // 2:
            server.kill()

    source = InterruptedTensors(other_weights, kill)
    with pytest.raises(PublishFailed, match="server-0 in phase=bucket"):
        publish(1, source)
    assert registry.state("server-0") == (None, True)


@pytest.mark.medium
def test_latecomers_and_the_quarantined_are_fed_from_disk(
    server_process: Callable[..., Any],
    publish_to: Callable[..., Any],
    registry: Any,
    greedy: Any,
    expected_ids: list[int],
) -> None:
    """They hold the same version as the group's members, who are left in peace meanwhile."""
    first, second = server_process(), server_process()
    publish = publish_to({"first": first.url}, fallback="disk", phase_timeout_s=20.0)
    publish(1)
    registry.history.clear()
    registry.add("second", second.url)
    assert publish(1).quarantined == ()
    assert registry.history == [("second", 1, False)]
    registry.set_server_version("second", None, quarantined=True)
    assert publish(2).quarantined == ()
    for server_id, server in (("first", first), ("second", second)):
        assert registry.state(server_id) == (2, False)
        assert greedy(server.url)["output_ids"] == expected_ids


@pytest.mark.medium
def test_names_that_do_not_match_are_refused_by_every_member(
    server_process: Callable[..., Any],
    publish_to: Callable[..., Any],
    registry: Any,
    other_weights: dict[str, torch.Tensor],
    greedy: Any,
) -> None:
    """A tensor that the model does not have: no server holds the version, the old weights stay."""
    server = server_process()
    publish = publish_to({"server-0": server.url}, phase_timeout_s=20.0)
    publish(1)
    before = greedy(server.url)
    wrong = {name.replace("layers.1", "layers.7"): t for name, t in other_weights.items()}
    with pytest.raises(PublishFailed, match=r"layers\.7.*is not in this model"):
        publish(2, LocalTensors(wrong))
    assert registry.state("server-0") == (None, True)
    assert before["meta_info"]["weight_version"] == "1"


def _join_as_sglang_does(port: int, name: str, sender: Any) -> None:
    from torch.distributed import PrefixStore, broadcast, rendezvous
    from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world

    timeout = timedelta(seconds=30)
    store, rank, size = next(rendezvous(f"tcp://127.0.0.1:{port}", 1, 2, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = _new_process_group_helper(
        size, rank, [], Backend("gloo"), PrefixStore(name, store), group_name=name, timeout=timeout
    )
    _world.pg_group_ranks[group] = {0: 0, 1: 1}
    content = torch.empty(1000, dtype=torch.uint8)
    broadcast(content, src=0, group=group)
    sender.send(content.tolist())


@pytest.fixture
def sglang_member() -> Iterator[Callable[[int, str], Any]]:
    """A process that joins through torch's own helper; gives the pipe of what it received."""
    started: list[Any] = []

    def start(port: int, name: str) -> Any:
        context = multiprocessing.get_context("forkserver")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_join_as_sglang_does, args=(port, name, sender))
        process.start()
        started.append(process)
        return receiver

    yield start
    for process in started:
        process.kill()
        process.join()


@pytest.mark.medium
def test_the_group_is_joined_by_torchs_own_helper(sglang_member: Callable[..., Any]) -> None:
    """SGLang's members come through torch's helper: keys, ranks and the broadcast are the same."""
    rendezvous = Rendezvous("127.0.0.1")
    receiver = sglang_member(rendezvous.port, "some-group")
    group = join_group(
        rendezvous.host,
        rendezvous.port,
        rank=0,
        world_size=2,
        name="some-group",
        backend="gloo",
        timeout_s=60.0,
    )
    content = torch.arange(1000, dtype=torch.uint8)
    group.broadcast(content, timeout_s=30.0)
    assert receiver.poll(30.0)
    assert receiver.recv() == content.tolist()
    group.close()
    rendezvous.close()


def test_a_rendezvous_at_an_address_of_another_machine_is_refused() -> None:
    """publish.host must be an address of this one; the error says so."""
    with pytest.raises(PublishFailed, match=r"cannot listen on publish\.host='192\.0\.2\.1'"):
        Rendezvous("192.0.2.1")
