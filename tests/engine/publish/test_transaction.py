"""Publishing to real servers, and to ones that fail or lie."""

import functools
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.interrupted_tensors import InterruptedTensors
from fakes.local_tensors import LocalTensors
from outloop.buffer.errors import DeadlineExceeded, PublishFailed
from outloop.buffer.events import read_events
from outloop.engine.publish.buckets.plan import TensorSpec, plan_buckets
from outloop.engine.publish.buckets.staging import SharedBuffer
from outloop.engine.publish.flattened_bucket import write_bucket
from outloop.engine.serve.torch_server.scheduler import Engine
from outloop.engine.serve.torch_server.weight_update import UpdateSession

TINY_BUCKET_MB = 0.05


@pytest.mark.parametrize(
    ("transport", "bucket_mb"), [("shared_memory", TINY_BUCKET_MB), ("disk", 64.0)]
)
def test_a_publish_changes_what_every_server_serves(
    expected_ids: Any,
    greedy: Any,
    make_model: Callable[..., Path],
    start_torch_server: Callable[..., Any],
    make_publisher: Callable[..., Any],
    registry: Any,
    other_weights: dict[str, torch.Tensor],
    transport: str,
    bucket_mb: float,
) -> None:
    """Both servers answer with the new weights and version; another publish goes the same way."""
    servers = [start_torch_server(make_model()) for _ in range(2)]
    for index, server in enumerate(servers):
        registry.add(f"server-{index}", server.url)
    publisher = make_publisher(num_servers=2, transport=transport, bucket_mb=bucket_mb)
    expected = expected_ids
    for version in (3, 4):
        report = publisher.publish(LocalTensors(other_weights), version)
        assert report.quarantined == ()
        assert report.num_bytes == sum(t.numel() * 4 for t in other_weights.values())
        assert 0 < report.pause_s <= report.duration_s
        assert (report.num_buckets > 2) == (transport == "shared_memory")
        for index, server in enumerate(servers):
            answer = greedy(server.url)
            assert answer["output_ids"] == expected
            assert answer["meta_info"]["weight_version"] == str(version)
            assert registry.state(f"server-{index}") == (version, False)


def test_nothing_is_left_in_shared_memory_or_on_disk(
    post: Any,
    make_publisher: Callable[..., Any],
    registry: Any,
    torch_server: Any,
    other_weights: dict[str, torch.Tensor],
    make_model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """After close, /dev/shm and the run folder are as before; staging is reused in between."""
    mark = f"torch_{os.getpid()}_"

    def names() -> set[str]:
        return {name for name in os.listdir("/dev/shm") if name.startswith(mark)}

    before = names()
    registry.add("server-0", torch_server.url)
    publisher = make_publisher(bucket_mb=TINY_BUCKET_MB)
    publisher.publish(LocalTensors(other_weights), 1)
    during = names()
    assert len(during - before) == 2
    publisher.publish(LocalTensors(other_weights), 2)
    assert names() == during
    publisher.close()
    assert names() == before
    disk = make_publisher(transport="disk")
    disk.publish(LocalTensors(other_weights), 3)
    disk.close()
    assert not list((tmp_path / "run" / "publish").glob("*"))
    post(torch_server.url, "/update_weights_from_disk", {"model_path": str(make_model())})


@pytest.mark.medium
@pytest.mark.parametrize("phase", ["pause", "begin", "bucket", "end", "verify", "version"])
@pytest.mark.parametrize("behaviour", ["error", "refuse"])
def test_a_failing_server_is_quarantined_and_the_others_go_on(
    greedy: Any,
    make_model: Callable[..., Path],
    torch_server: Any,
    lying_server: Callable[..., Any],
    make_publisher: Callable[..., Any],
    registry: Any,
    other_weights: dict[str, torch.Tensor],
    behaviour: str,
    phase: str,
) -> None:
    """In any phase; the good one holds the version and serves."""
    registry.add("good", torch_server.url)
    registry.add("bad", lying_server(behaviour, phase).url)
    report = make_publisher(num_servers=2).publish(LocalTensors(other_weights), 7)
    assert report.quarantined == ("bad",)
    (result,) = [r for r in report.results if r.is_quarantined]
    assert result.failed_phase == phase
    assert registry.state("good") == (7, False)
    assert registry.state("bad") == (None, True)
    assert greedy(torch_server.url)["meta_info"]["weight_version"] == "7"


@pytest.mark.medium
def test_wrong_weights_are_detected(
    lying_server: Callable[..., Any],
    make_publisher: Callable[..., Any],
    registry: Any,
    other_weights: dict[str, torch.Tensor],
) -> None:
    """A server that acknowledges everything and holds other weights is not said to hold them."""
    liar = lying_server("wrong")
    registry.add("liar", liar.url)
    with pytest.raises(PublishFailed, match="liar in phase=verify.*differ from what was sent"):
        make_publisher().publish(LocalTensors(other_weights), 1)
    assert registry.state("liar") == (None, True)
    assert "/update_weight_version" not in liar.calls
    liar.behaviour = ""
    make_publisher().publish(LocalTensors(other_weights), 2)
    assert registry.state("liar") == (2, False)


def test_a_server_that_holds_wrong_weights_is_told_of_once_and_counted(
    torch_server: Any,
    lying_server: Callable[..., Any],
    make_publisher: Callable[..., Any],
    registry: Any,
    other_weights: dict[str, torch.Tensor],
    tmp_path: Path,
) -> None:
    """A sentence and an event at the first time, and a number that grows."""
    liar = lying_server("wrong")
    registry.add("good", torch_server.url)
    registry.add("liar", liar.url)
    publisher = make_publisher(num_servers=2, verify="checksum", fallback="none")
    rows = []
    for version in range(1, 5):
        report = publisher.publish(LocalTensors(other_weights), version)
        rows.append(report.wrong_in_a_row)
        assert report.quarantined == ("liar",)
    assert rows == [1, 2, 3, 4]
    (sentence,) = registry.warnings
    assert sentence.startswith("liar held other weights than were sent, says publish.verify=")
    (event,) = [e for e in read_events(tmp_path / "run") if e["kind"] == "wrong_weights"]
    assert (event["server"], event["policy_version"], event["sentence"]) == ("liar", 1, sentence)


def test_a_row_of_wrong_weights_ends_with_a_right_publish(
    torch_server: Any,
    lying_server: Callable[..., Any],
    make_publisher: Callable[..., Any],
    registry: Any,
    other_weights: dict[str, torch.Tensor],
) -> None:
    """What the fallback brings is no proof that the transport works."""
    liar = lying_server("wrong")
    registry.add("good", torch_server.url)
    registry.add("liar", liar.url)
    publisher = make_publisher(num_servers=2, verify="checksum")
    rows = []
    # The fallback has every second publish: what was quarantined is fed in full.
    for version, behaviour in enumerate(["wrong", "", "wrong", "", "wrong", "", ""], start=1):
        liar.behaviour = behaviour
        rows.append(publisher.publish(LocalTensors(other_weights), version).wrong_in_a_row)
    assert rows == [1, 1, 2, 2, 3, 3, 0]
    liar.behaviour = "wrong"
    assert publisher.publish(LocalTensors(other_weights), 8).wrong_in_a_row == 1
    assert len(registry.warnings) == 2


def test_a_server_that_fails_otherwise_is_not_told_of_as_wrong(
    torch_server: Any,
    lying_server: Callable[..., Any],
    make_publisher: Callable[..., Any],
    registry: Any,
    other_weights: dict[str, torch.Tensor],
) -> None:
    """It broke, and says nothing of weights."""
    registry.add("good", torch_server.url)
    registry.add("bad", lying_server("error", "end").url)
    report = make_publisher(num_servers=2).publish(LocalTensors(other_weights), 1)
    assert report.quarantined == ("bad",)
    assert (report.wrong_in_a_row, registry.warnings) == (0, [])


def test_a_run_that_verifies_nothing_is_warned_at_the_start(
    make_publisher: Callable[..., Any], registry: Any
) -> None:
    """Before the first publish; with a verification there is no sentence."""
    make_publisher()
    assert registry.warnings == []
    make_publisher(verify="none")
    (sentence,) = registry.warnings
    assert sentence.startswith('publish.verify="none": no server is asked')


@pytest.mark.medium
def test_a_server_that_hangs_costs_one_deadline(
    torch_server: Any,
    lying_server: Callable[..., Any],
    make_publisher: Callable[..., Any],
    registry: Any,
    other_weights: dict[str, torch.Tensor],
) -> None:
    """It is quarantined when the phase's deadline passes; no server waits longer."""
    registry.add("good", torch_server.url)
    registry.add("bad", lying_server("hang", "end").url)
    publisher = make_publisher(num_servers=2, phase_timeout_s=3.0)
    began_at = time.monotonic()
    report = publisher.publish(LocalTensors(other_weights), 1)
    assert time.monotonic() - began_at < 4 * 3.0
    assert report.quarantined == ("bad",)
    assert "bad at http" in report.results[1].error
    assert registry.state("good") == (1, False)


class SilentHost:
    """A port that takes connections and never answers, as a machine that is stopped."""

    def __init__(self) -> None:
        self.num_connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._held: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        while True:
            try:
                self._held.append(self._listener.accept()[0])
            except OSError:
                return
            self.num_connections += 1

    def close(self) -> None:
        """Be gone."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for connection in self._held:
            connection.close()


@pytest.fixture
def silent() -> Iterator[list[SilentHost]]:
    """Eight of them."""
    hosts = [SilentHost() for _ in range(8)]
    yield hosts
    for host in hosts:
        host.close()


@pytest.mark.medium
def test_servers_that_are_gone_cost_one_probe_together_and_once(
    torch_server: Any,
    silent: list[SilentHost],
    make_publisher: Callable[..., Any],
    registry: Any,
    other_weights: dict[str, torch.Tensor],
) -> None:
    """All are asked at once, and the next publish asks none of them again."""
    for index, host in enumerate(silent):
        registry.add(f"silent-{index}", host.url)
    registry.add("good", torch_server.url)
    publisher = make_publisher(num_servers=1)
    began_at = time.monotonic()
    publisher.publish(LocalTensors(other_weights), 1)
    assert time.monotonic() - began_at < 2.0 * len(silent) * 0.6
    publisher.publish(LocalTensors(other_weights), 2)
    assert [host.num_connections for host in silent] == [1] * len(silent)
    assert registry.state("good") == (2, False)
    assert registry.state("silent-3") == (None, True)


def test_a_server_that_enters_again_is_asked_at_once(
    torch_server: Any,
    make_publisher: Callable[..., Any],
    registry: Any,
    start_torch_server: Callable[..., Any],
    make_model: Callable[..., Path],
    other_weights: dict[str, torch.Tensor],
) -> None:
    """Though it did not answer a moment before, as a server that was started again."""
    registry.add("good", torch_server.url)
    registry.add("late", "http://127.0.0.1:9")
    publisher = make_publisher(num_servers=1)
    publisher.publish(LocalTensors(other_weights), 1)
    assert registry.state("late") == (None, True)
    registry.add("late", start_torch_server(make_model()).url)
    publisher.publish(LocalTensors(other_weights), 2)
    assert registry.state("late") == (2, False)


@pytest.mark.medium
def test_a_server_killed_in_the_middle_of_a_publish(
    server_process: Callable[..., Any],
    make_publisher: Callable[..., Any],
    registry: Any,
    other_weights: dict[str, torch.Tensor],
) -> None:
    """kill -9 between two buckets: PublishFailed at once, and the server is quarantined."""
    process = server_process()
    registry.add("server-0", process.url)
    publisher = make_publisher(bucket_mb=TINY_BUCKET_MB, phase_timeout_s=10.0)
    publisher.publish(LocalTensors(other_weights), 0)

    def kill(index: int) -> None:
        if index == len(other_weights) // 2:
            process.kill()

    began_at = time.monotonic()
    with pytest.raises(PublishFailed, match="server-0 in phase=bucket"):
        publisher.publish(InterruptedTensors(other_weights, kill), 1)
    assert time.monotonic() - began_at < 10
    assert registry.state("server-0") == (None, True)


def test_a_quarantined_server_is_fed_in_full_again(
    expected_ids: Any,
    greedy: Any,
    make_model: Callable[..., Path],
    start_torch_server: Callable[..., Any],
    make_publisher: Callable[..., Any],
    registry: Any,
    other_weights: dict[str, torch.Tensor],
) -> None:
    """Left half-fed, paused and in an open session, it holds the whole next version."""
    server = start_torch_server(make_model())
    registry.add("server-0", server.url)
    publisher = make_publisher(bucket_mb=TINY_BUCKET_MB)

    items = list(other_weights.items())
    broken = dict(items[:5]) | {"no.such.tensor": items[5][1]}

    with pytest.raises(PublishFailed, match="no.such.tensor"):
        publisher.publish(LocalTensors(broken), 1)
    assert registry.state("server-0") == (None, True)
    publisher.publish(LocalTensors(other_weights), 2)
    assert registry.state("server-0") == (2, False)
    assert greedy(server.url)["output_ids"] == expected_ids


def test_weights_that_are_not_all_of_the_model_are_refused(
    make_model: Callable[..., Path],
    start_torch_server: Callable[..., Any],
    make_publisher: Callable[..., Any],
    registry: Any,
    other_weights: dict[str, torch.Tensor],
) -> None:
    """A tensor that was forgotten is found by the checksums' names."""
    registry.add("server-0", start_torch_server(make_model()).url)
    some = dict(list(other_weights.items())[1:])
    with pytest.raises(PublishFailed, match="1 tensors were never sent"):
        make_publisher().publish(LocalTensors(some), 1)


@pytest.mark.parametrize("cut", [(slice(None), slice(1)), (slice(1),)])
def test_weights_of_another_shape_are_refused(
    make_model: Callable[..., Path],
    start_torch_server: Callable[..., Any],
    make_publisher: Callable[..., Any],
    registry: Any,
    other_weights: dict[str, torch.Tensor],
    cut: tuple[slice, ...],
) -> None:
    """The tensor whose rows or columns are missing is named; the right weights mend the server."""
    registry.add("server-0", start_torch_server(make_model()).url)
    name = next(n for n in other_weights if n.endswith("q_proj.weight"))
    publisher = make_publisher()
    wrong = other_weights | {name: other_weights[name][cut].contiguous()}
    with pytest.raises(PublishFailed, match="q_proj"):
        publisher.publish(LocalTensors(wrong), 1)
    assert registry.state("server-0") == (None, True)
    publisher.publish(LocalTensors(other_weights), 2)
    assert registry.state("server-0") == (2, False)


def test_a_source_that_raises_leaves_no_server_in_use(
    make_model: Callable[..., Path],
    start_torch_server: Callable[..., Any],
    make_publisher: Callable[..., Any],
    registry: Any,
    other_weights: dict[str, torch.Tensor],
) -> None:
    """The trainer's own error comes through; the servers that were paused are quarantined."""
    registry.add("server-0", start_torch_server(make_model()).url)

    def fail(index: int) -> None:
        if index:
            raise ZeroDivisionError

    source = InterruptedTensors(other_weights, fail)
    with pytest.raises(ZeroDivisionError):
        make_publisher(bucket_mb=TINY_BUCKET_MB).publish(source, 1)
    assert registry.state("server-0") == (None, True)


def test_a_half_fed_update_is_never_served(
    post: Any,
    greedy: Any,
    make_model: Callable[..., Path],
    start_torch_server: Callable[..., Any],
    other_weights: dict[str, torch.Tensor],
) -> None:
    """Between begin and end the old weights answer; corrupt payloads change and kill nothing."""
    url = start_torch_server(make_model()).url
    before = greedy(url)["output_ids"]
    buffer = SharedBuffer()
    name, tensor = next(iter(other_weights.items()))
    spec = TensorSpec(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)
    ((place,),) = plan_buckets([spec], 1 << 20)
    staged = buffer.reserve(place.end)
    staged.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    payload = write_bucket(staged, [place])
    body = {"serialized_named_tensors": [payload], "load_format": "flattened_bucket"}
    assert post(url, "/begin_weight_update", {})[0] == 200
    assert post(url, "/update_weights_from_tensor", body)[0] == 200
    assert greedy(url)["output_ids"] == before
    for damaged in ("", "????", payload[: len(payload) // 2], "AAAA" + payload):
        status, answer = post(
            url, "/update_weights_from_tensor", body | {"serialized_named_tensors": [damaged]}
        )
        assert (status, answer["success"]) == (400, False)
    assert greedy(url)["output_ids"] == before
    assert post(url, "/end_weight_update", {})[0] == 200
    assert greedy(url)["output_ids"] != before
    buffer.close()


@pytest.mark.medium
def test_no_server_is_a_deadline(
    make_publisher: Callable[..., Any],
    registry: Any,
    other_weights: dict[str, torch.Tensor],
) -> None:
    """No server registered, or none answers: the error names what waited, and for what."""
    publisher = make_publisher(start_timeout_s=0.2)
    with pytest.raises(DeadlineExceeded, match=r"publisher waited .*\(0 registered"):
        publisher.publish(LocalTensors(other_weights), 0)
    registry.add("gone", "http://127.0.0.1:9")
    with pytest.raises(DeadlineExceeded, match=r"\(1 registered, none answering"):
        publisher.publish(LocalTensors(other_weights), 0)


SPOILED = "model.layers.1.mlp.up_proj.weight"
SPOILS = 0.125
"""Where the first element of SPOILED is this, another element is changed."""


class SpoilingUpdate(UpdateSession):
    """Changes an element of the weights that it has made live."""

    def end(self) -> None:
        super().end()
        weights = self.live.named[SPOILED].view(-1)
        if weights[0] == SPOILS:
            weights[5] += 1


@pytest.mark.parametrize("num_before", [0, 3])
def test_a_server_that_spoils_its_weights_after_storing_them_is_quarantined(
    make_model: Callable[..., Path],
    start_torch_server: Callable[..., Any],
    make_publisher: Callable[..., Any],
    registry: Any,
    other_weights: dict[str, torch.Tensor],
    num_before: int,
) -> None:
    """One element, between the last bucket and the checksums: at once, and after good publishes."""
    makers = {"make_engine": functools.partial(Engine, make_update=SpoilingUpdate)}
    registry.add("server-0", start_torch_server(make_model(), makers=makers).url)
    registry.add("server-1", start_torch_server(make_model()).url)
    publisher = make_publisher(num_servers=2)
    for version in range(num_before):
        publisher.publish(LocalTensors(other_weights), version)
    spoiled = other_weights | {SPOILED: torch.full_like(other_weights[SPOILED], SPOILS)}
    report = publisher.publish(LocalTensors(spoiled), 8)
    assert report.quarantined == ("server-0",)
    assert [registry.state(f"server-{n}") for n in range(2)] == [(None, True), (8, False)]
    (error,) = [result.error for result in report.results if result.is_quarantined]
    assert re.search(f"1 tensors differ.*{SPOILED}", error)
    publisher.publish(LocalTensors(other_weights), 9)
    assert registry.state("server-0") == (9, False)
