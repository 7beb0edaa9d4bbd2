"""Servers are compared with the trainer by the release of NCCL that they registered with.

No CUDA is needed: who cannot join is known before a group is made.
"""

from collections.abc import Callable
from typing import Any

import pytest
import structlog
import torch

from fakes.local_tensors import LocalTensors
from outloop.buffer.errors import PublishFailed
from outloop.buffer.records import Libraries, ServerEntry
from outloop.engine.publish.nccl_compatibility import NcclCompatibility

OURS = Libraries(torch="2.13.0+cu130", cuda="13.0", nccl="2.29.7")
THEIRS = Libraries(torch="2.14.1+cu130", cuda="13.0", nccl="2.30.7")
REMEDY = r"nvidia-nccl-cu13==2\.30\.7 in the trainer's environment, or set publish\.transport"


def entry(server_id: str, libraries: Libraries) -> ServerEntry:
    """A server that told this."""
    return ServerEntry(
        server_id=server_id,
        url=f"http://{server_id}",
        kind="sglang",
        policy_version=None,
        is_quarantined=False,
        libraries=libraries,
    )


def test_equal_and_unknown_releases_may_join_and_others_not() -> None:
    """Each is said once: what is wrong with the remedy, what is not known in one sentence."""
    compatibility = NcclCompatibility(OURS)
    entries = [entry("same", OURS), entry("other", THEIRS), entry("untold", Libraries())]
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            refusals = compatibility.refusals(entries)
    assert list(refusals) == ["other"]
    assert "NCCL 2.29.7, torch 2.13.0+cu130, CUDA 13.0" in refusals["other"]
    assert "other at http://other has NCCL 2.30.7" in refusals["other"]
    said = {log["server_id"]: log["reason"] for log in logs}
    assert (len(logs), sorted(said)) == (2, ["other", "untold"])
    assert "untold at http://untold does not tell its release of NCCL" in said["untold"]


def test_nothing_is_refused_where_the_trainer_has_no_nccl() -> None:
    """Then the group itself is refused, with its own sentence."""
    with structlog.testing.capture_logs() as logs:
        assert NcclCompatibility(Libraries()).refusals([entry("other", THEIRS)]) == {}
    assert logs == []


@pytest.mark.medium
def test_a_server_of_another_release_is_fed_by_the_fallback(
    server_process: Callable[..., Any],
    make_publisher: Callable[..., Any],
    other_weights: dict[str, torch.Tensor],
    registry: Any,
) -> None:
    """In every publish, without ever being quarantined."""
    registry.add("other", server_process().url, libraries=THEIRS)
    publisher = make_publisher(
        transport="collective", device="cuda", libraries=OURS, phase_timeout_s=20.0
    )
    for version in (1, 2):
        assert publisher.publish(LocalTensors(other_weights), version).quarantined == ()
    assert registry.history == [("other", 1, False), ("other", 2, False)]


def test_without_a_fallback_a_server_of_another_release_is_refused(
    lying_server: Callable[..., Any],
    make_publisher: Callable[..., Any],
    other_weights: dict[str, torch.Tensor],
    registry: Any,
) -> None:
    """With the remedy, before it is asked to join or paused."""
    server = lying_server("claim")
    registry.add("other", server.url, libraries=THEIRS)
    publisher = make_publisher(
        transport="collective", device="cuda", libraries=OURS, fallback="none"
    )
    with pytest.raises(PublishFailed, match=REMEDY):
        publisher.publish(LocalTensors(other_weights), 1)
    assert registry.state("other") == (None, True)
    assert server.calls == []
