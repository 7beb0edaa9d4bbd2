"""How a run's servers are verified, and what follows for turns in flight."""

from typing import Any

import pytest

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings, build_settings

GPU = {"kind": "sglang", "device": "cuda"}


def settings_of(server: dict[str, Any], **publish: Any) -> Settings:
    """Of a run with these servers."""
    tree = {"model": {"path": "m"}, "server": server, "publish": publish}
    return build_settings(tree, source="test")


@pytest.mark.parametrize(
    ("server", "publish", "verification", "mode"),
    [
        ({}, {}, "checksum", "in_place"),
        ({"kind": "sglang"}, {}, "checksum", "in_place"),
        (GPU, {}, "probe", "abort"),
        (GPU, {"verify": "checksum", "mode": "retract"}, "checksum", "retract"),
        ({}, {"verify": "probe", "mode": "abort"}, "probe", "abort"),
        ({"device": "cuda"}, {}, "checksum", "in_place"),
        ({}, {"verify": "none"}, "none", "in_place"),
    ],
)
def test_what_is_left_out_fits_the_servers(
    server: dict[str, Any], publish: dict[str, Any], verification: str, mode: str
) -> None:
    """A probe for SGLang on a GPU, whose hash was never compared on one; checksums elsewhere."""
    settings = settings_of(server, **publish)
    assert (settings.verification, settings.pause_mode) == (verification, mode)
    # The same in the processes that read it from the run's folder.
    again = Settings(**settings.model_dump(mode="json"))
    assert (again.verification, again.pause_mode) == (verification, mode)


@pytest.mark.parametrize("server", [GPU, {}])
def test_a_probe_among_turns_that_go_on_is_refused(server: dict[str, Any]) -> None:
    """They would be drawn by weights that nobody has verified."""
    publish = {"mode": "in_place"} if server else {"mode": "in_place", "verify": "probe"}
    with pytest.raises(SettingsError, match=r"publish\.mode='in_place' with .* a probe"):
        settings_of(server, **publish)
