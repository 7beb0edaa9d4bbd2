"""Buckets handed over on the GPU where they will be read: whose copy each server's ranks get.

The trainer's ranks are one object that names its payloads by rank, and servers are what takes any
call: real ranks stage in tests/engine/train/test_several_ranks.py.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor

from fakes.receiver import receiver
from outloop.buffer.errors import PublishFailed
from outloop.buffer.records import Float32, ServerEntry
from outloop.engine.publish.buckets.plan import Place, TensorSpec
from outloop.engine.publish.server_fanout import Fanout
from outloop.engine.publish.transports.per_device import PerDevice

SPECS = tuple(TensorSpec(name=f"t{n}", shape=(300,), dtype=torch.float32) for n in range(3))
BUCKET_BYTES = 1200


class NamedCopies:
    """Trainer ranks whose payloads are "GPU/bucket/reader"."""

    specs = SPECS
    gpus = ("a", "b", "c")

    def __init__(self) -> None:
        self.num_readers: list[list[int]] = []
        self.is_over = False

    def read(self, specs: Sequence[TensorSpec], into: object = None) -> Iterator[Tensor]:
        """Nothing is gathered in one place."""
        raise AssertionError

    def score_prompts(self, prompts: Sequence[Sequence[int]]) -> Sequence[Float32]:
        """There is no probe."""
        raise AssertionError

    def leave(self) -> None:
        """It is not called."""
        raise AssertionError

    def stage(
        self, places: Sequence[Place], *, index: int, num_bytes: int, num_readers: Sequence[int]
    ) -> tuple[Tensor, list[list[str]]]:
        """A payload for each reader of each rank."""
        self.num_readers.append(list(num_readers))
        names = [
            [f"{gpu}/{index}/{reader}" for reader in range(num)]
            for gpu, num in zip(self.gpus, num_readers, strict=True)
        ]
        return torch.zeros(num_bytes, dtype=torch.uint8), names

    def end_staging(self) -> None:
        """Readers are done."""
        self.is_over = True


def publish(
    source: NamedCopies, *gpus_of_servers: tuple[str, ...]
) -> tuple[list[list[list[str]]], dict[str, str]]:
    """The payloads that each server was posted, bucket by bucket, and the servers' failures."""
    with ExitStack() as stack:
        servers = [stack.enter_context(receiver()) for _ in gpus_of_servers]
        entries = [
            ServerEntry(
                server_id=f"server-{index}",
                url=url,
                kind="sglang",
                policy_version=None,
                is_quarantined=False,
                gpus=gpus,
            )
            for index, ((url, _), gpus) in enumerate(zip(servers, gpus_of_servers, strict=True))
        ]
        failed: list[str] = []
        with Fanout(entries, phase_timeout_s=20.0, on_failure=failed.append) as fanout:
            transport = PerDevice(
                bucket_bytes=BUCKET_BYTES, dtype=torch.float32, num_ranks=len(gpus_of_servers[0])
            )
            transport.prepare(source, fanout, [])
            sent = transport.send(fanout)
            transport.end()
            results = fanout.results
        assert (sent.num_buckets, sent.peak_bytes) == (3, 2 * BUCKET_BYTES)
        posted = [
            [
                json.loads(body)["serialized_named_tensors"]
                for path, body in received
                if path == "/update_weights_from_tensor"
            ]
            for _, received in servers
        ]
        return posted, {r.server_id: r.error for r in results if r.is_quarantined}


def test_every_rank_of_a_server_gets_the_copy_on_its_own_gpu() -> None:
    """In the order of its ranks, whichever that is; each copy's handle has one reader."""
    source = NamedCopies()
    posted, failures = publish(source, ("a", "b"), ("c", "a"))
    assert not failures
    assert source.num_readers == [[2, 1, 1]] * 3
    for index in range(3):
        first, second = posted[0][index], posted[1][index]
        assert [name[:3] for name in first] == [f"a/{index}", f"b/{index}"]
        assert [name[:3] for name in second] == [f"c/{index}", f"a/{index}"]
        assert len({*first, *second}) == 4
    assert source.is_over


@pytest.mark.medium
def test_a_server_without_a_trainer_rank_beside_it_is_left_out() -> None:
    """By name, before a byte is staged for it; the others are served."""
    source = NamedCopies()
    posted, failures = publish(source, ("b",), ("x",), ())
    assert posted == [[["b/0/0"], ["b/1/0"], ["b/2/0"]], [], []]
    assert source.num_readers == [[0, 1, 0]] * 3
    assert failures.keys() == {"server-1", "server-2"}
    assert (
        "server-1 has GPUs ['x'], the trainer's ranks have ['a', 'b', 'c']" in failures["server-1"]
    )
    with pytest.raises(PublishFailed, match=r"each of its 1 needs a rank beside it"):
        publish(NamedCopies(), ("x",))
