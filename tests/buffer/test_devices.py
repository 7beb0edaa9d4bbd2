"""Who holds the devices that a trainer and servers share."""

import dataclasses
from typing import Any

import pytest

from outloop.buffer.records import ServerEntry


@pytest.fixture
def registry(faces: tuple[Any, Any]) -> Any:
    """Of a run on the twin, and on Redis."""
    return faces[1].registry


def entry() -> ServerEntry:
    """A server on two GPUs."""
    return ServerEntry(
        server_id="server-0",
        url="http://x",
        kind="sglang",
        policy_version=None,
        is_quarantined=False,
        gpus=("GPU-a", "GPU-b"),
    )


def test_a_server_starts_only_while_the_trainer_is_away(registry: Any) -> None:
    """And the trainer knows of every server that is starting, until it has started."""
    assert registry.claim_start("server-0", timeout_s=60)
    assert registry.claim_devices() == ("server-0",)
    assert not registry.claim_start("server-1", timeout_s=60)
    registry.end_start("server-0")
    assert registry.claim_devices() == ()
    registry.free_devices()
    assert registry.claim_start("server-1", timeout_s=60)


def test_a_start_that_never_ends_is_waited_for_no_longer_than_it_announced(registry: Any) -> None:
    """A process that was killed while it started says nothing."""
    assert registry.claim_start("server-0", timeout_s=-5)
    assert registry.claim_devices() == ()


def test_what_a_server_released_is_known_until_it_starts_again(registry: Any) -> None:
    """A version that is entered meanwhile does not change it."""
    registry.register_server(entry())
    registry.set_released("server-0", ["kv_cache", "weights"])
    registry.set_server_version("server-0", 3, quarantined=False)
    (found,) = registry.servers()
    assert found == dataclasses.replace(entry(), policy_version=3, released=("kv_cache", "weights"))
    registry.register_server(entry())
    assert registry.servers() == (entry(),)
