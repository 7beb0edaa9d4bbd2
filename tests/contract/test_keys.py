"""Servers that want a key: nobody without it samples, pauses, or replaces weights."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from safetensors.torch import load_file

from fakes.local_tensors import LocalTensors
from fakes.one_server import OneServer
from outloop.buffer.errors import PublishFailed, SettingsError
from outloop.buffer.run import create_run
from outloop.buffer.settings import build_settings
from outloop.engine.publish.publisher import Publisher
from outloop.engine.publish.server_client import KeyRefused, ServerClient
from outloop.engine.serve.health import Watch

KEY = "ol-server-0123456789abcdef"
KINDS = ["torch", pytest.param("sglang", marks=pytest.mark.sglang)]
ROUTES = [
    ("GET", "/model_info"),
    ("GET", "/server_info"),
    ("GET", "/v1/loads"),
    ("POST", "/abort_request"),
    ("POST", "/begin_weight_update"),
    ("POST", "/continue_generation"),
    ("POST", "/destroy_weights_update_group"),
    ("POST", "/end_weight_update"),
    ("POST", "/generate"),
    ("POST", "/init_weights_update_group"),
    ("POST", "/pause_generation"),
    ("POST", "/update_weight_version"),
    ("POST", "/update_weights_from_disk"),
    ("POST", "/update_weights_from_distributed"),
    ("POST", "/update_weights_from_tensor"),
    ("POST", "/weights_checker"),
]
"""Every route that the loop uses, and what else changes a server."""


@pytest.fixture(scope="module", params=KINDS)
def keyed(
    request: pytest.FixtureRequest,
    make_model: Callable[..., Path],
    start_torch_server: Callable[..., Any],
    start_sglang_server: Callable[..., Any],
) -> tuple[str, str]:
    """Kind and URL of a server of each kind that wants KEY."""
    start = {"torch": start_torch_server, "sglang": start_sglang_server}[request.param]
    return request.param, start(make_model(), key=KEY).url


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": KEY},
        {"Authorization": f"Bearer {KEY}x"},
        {"x-api-key": KEY},
    ],
    ids=["none", "wrong", "no scheme", "longer", "another header"],
)
async def test_without_the_key_every_route_is_refused(
    keyed: tuple[str, str], headers: dict[str, str]
) -> None:
    """401, whatever the route; only the health of a server is everybody's."""
    _, url = keyed
    async with aiohttp.ClientSession(headers=headers) as session:
        for method, path in ROUTES:
            async with session.request(method, url + path, json={}) as answer:
                assert answer.status == 401, path
        async with session.get(url + "/health") as answer:
            assert answer.status == 200


def test_the_client_names_the_setting(keyed: tuple[str, str]) -> None:
    """Who attaches to a server with a key is told where it belongs."""
    client = ServerClient("server-0", keyed[1])
    with pytest.raises(KeyRefused, match=r"server\.api_key_file"):
        client.model_info(time.monotonic() + 30)
    client.close()


async def test_a_server_with_another_key_is_refused_at_once(keyed: tuple[str, str]) -> None:
    """It is there, so there is nothing to wait for."""
    watch = Watch("server-0", keyed[1], timeout_s=30, max_missed=3, key="another")
    with pytest.raises(SettingsError, match="another key"):
        await watch.weight_version()
    watch.close()


def test_the_key_is_on_no_command_line(keyed: tuple[str, str]) -> None:
    """Neither is it in the environment of any of the server's processes."""
    for process in psutil.process_iter(["cmdline", "environ"]):
        assert KEY not in " ".join(process.info["cmdline"] or ())
        assert KEY not in " ".join((process.info["environ"] or {}).values())


@pytest.mark.medium
@pytest.mark.parametrize("transport", ["shared_memory", "collective", "disk"])
def test_weights_are_published_with_the_key(
    keyed: tuple[str, str], transport: str, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """By every transport; without it the publish fails with the sentence."""
    kind, url = keyed
    (tmp_path / "key").write_text(KEY + "\n")
    source = LocalTensors(load_file(make_model(seed=1) / "model.safetensors"))
    for number, file in enumerate((None, tmp_path / "key")):
        server = {"kind": kind, "num_servers": 0, "urls": [url], "start_timeout_s": 2.0}
        tree = {
            "model": {"path": str(make_model())},
            "server": server | ({"api_key_file": str(file)} if file else {}),
            "publish": {"transport": transport},
        }
        run = create_run(build_settings(tree, source="test"), tmp_path / str(number), "unix:///no")
        publisher = Publisher(run, OneServer(url, kind))
        if file is None:
            with pytest.raises(PublishFailed, match="wants another key"):
                publisher.publish(source, 1)
        else:
            assert publisher.publish(source, 1).quarantined == ()
        publisher.close()
