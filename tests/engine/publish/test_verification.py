"""How a run's servers are verified, and what follows for turns in flight."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fakes.local_tensors import LocalTensors
from outloop.buffer.errors import PublishFailed, SettingsError
from outloop.buffer.settings import Settings, build_settings

GPU = {"kind": "sglang", "device": "cuda", "dtype": "bfloat16"}


def settings_of(server: dict[str, Any], **publish: Any) -> Settings:
    """Of a run with these servers."""
    tree = {"model": {"path": "m"}, "server": server, "publish": publish}
    return build_settings(tree, source="test")


@pytest.mark.parametrize(
    ("server", "publish", "verification", "mode"),
    [
        ({}, {}, "checksum", "in_place"),
        ({"kind": "sglang"}, {}, "checksum", "in_place"),
        (GPU, {}, "checksum", "in_place"),
        (GPU, {"verify": "probe"}, "probe", "abort"),
        (GPU, {"mode": "retract"}, "checksum", "retract"),
        (GPU | {"sglang": {"ep_size": 2}}, {}, "probe", "abort"),
        ({}, {"verify": "probe", "mode": "abort"}, "probe", "abort"),
        ({"device": "cuda"}, {}, "checksum", "in_place"),
        ({"kind": "sglang", "sglang": {"ep-size": 2}}, {}, "probe", "abort"),
        ({"kind": "sglang", "sglang": {"ep_size": 1}}, {}, "checksum", "in_place"),
        ({"kind": "sglang", "sglang": {"ep_size": 2}}, {"verify": "none"}, "none", "in_place"),
        ({}, {"verify": "none"}, "none", "in_place"),
    ],
)
def test_what_is_left_out_fits_the_servers(
    server: dict[str, Any], publish: dict[str, Any], verification: str, mode: str
) -> None:
    """A probe where SGLang's checksums are not known: of experts spread over ranks."""
    settings = settings_of(server, **publish)
    assert (settings.verification, settings.pause_mode) == (verification, mode)
    # The same in the processes that read it from the run's folder.
    again = Settings(**settings.model_dump(mode="json"))
    assert (again.verification, again.pause_mode) == (verification, mode)


@pytest.mark.parametrize("server", [GPU, {}])
def test_a_probe_among_turns_that_go_on_is_refused(server: dict[str, Any]) -> None:
    """They would be drawn by weights that nobody has verified."""
    publish = {"mode": "in_place", "verify": "probe"}
    with pytest.raises(SettingsError, match=r"publish\.mode='in_place' with .* a probe"):
        settings_of(server, **publish)


def test_float32_on_a_gpu_is_refused_for_sglang() -> None:
    """Unless attention kernels are named: those that SGLang chooses there have no float32."""
    server = GPU | {"dtype": "float32"}
    with pytest.raises(SettingsError, match=r'dtype="float32" .* set server.dtype = "bfloat16"'):
        settings_of(server)
    assert settings_of(server | {"sglang": {"attention-backend": "triton"}})
    assert settings_of({"device": "cuda"}).server.dtype == "float32"


@pytest.mark.parametrize("key", ["ep_size", "ep-size", "expert_parallel_size", "ep"])
def test_checksums_of_experts_that_are_spread_are_refused(key: str) -> None:
    """They would fail every publish."""
    server = {"kind": "sglang", "sglang": {key: 2}}
    with pytest.raises(SettingsError, match=r"verify=\"checksum\" with server\.sglang\.ep_size=2"):
        settings_of(server, verify="checksum")


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({"ep_size": 2}, r"has ep_size=2: .* set publish\.verify to \"probe\""),
        ({"ep_size": 1}, "differ from what was sent|were never sent"),
        ({}, "differ from what was sent|were never sent"),
    ],
)
def test_an_attached_server_that_spreads_experts_is_told_apart(
    lying_server: Callable[..., Any],
    make_publisher: Callable[..., Any],
    registry: Any,
    other_weights: dict[str, torch.Tensor],
    info: dict[str, Any],
    said: str,
) -> None:
    """Its checksums are no sign of wrong weights; it is quarantined, and what to set is said."""
    server = lying_server("wrong")
    server.info = info
    registry.add("spread", server.url, kind="sglang")
    with pytest.raises(PublishFailed, match=f"spread in phase=verify.*({said})"):
        make_publisher().publish(LocalTensors(other_weights), 1)
    assert registry.state("spread") == (None, True)
