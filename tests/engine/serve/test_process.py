"""A torch server as a part of a run, and what it does when things go wrong inside."""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file

from outloop.buffer.errors import DeadlineExceeded, SettingsError
from outloop.buffer.reader import BufferReader
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.redis.run_meta import init_run
from outloop.buffer.run import create_run
from outloop.buffer.settings import build_settings
from outloop.engine.serve.main import serve
from outloop.engine.serve.sglang.arguments import argument_table
from outloop.engine.serve.torch_server.process import serve_torch

PROMPT = list(range(20, 40))


async def _post(url: str, *, key: str | None = None, **body: Any) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(url, json=body) as response,
    ):
        return response.status, json.loads(await response.read() or b"null")


@pytest.mark.medium
async def test_it_registers_without_a_version(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """In the registry once it answers, with no policy_version: no publish has reached it."""
    settings = build_settings({"model": {"path": str(make_model())}}, source="test")
    with EmbeddedRedis(tmp_path / "redis", fsync="no", max_memory_mb=64) as redis:
        run = create_run(settings, tmp_path / "run", redis.start())
        init_run(run)
        stop = asyncio.Event()
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(serve(run, 3, stop=stop, on_ready=ready.set_result))
        await asyncio.wait({ready, serving}, timeout=30, return_when="FIRST_COMPLETED")
        if not ready.done():
            serving.result()
        url = ready.result()
        reader = BufferReader.connect(run)
        (entry,) = reader.registry.servers()
        reader.close()
        assert (entry.server_id, entry.url, entry.kind) == ("server-3", url, "torch")
        assert (entry.policy_version, entry.is_quarantined) == (None, False)
        held = asyncio.create_task(
            _post(
                f"{url}/generate",
                key=run.server_key,
                input_ids=PROMPT,
                sampling_params={"max_new_tokens": 1},
            )
        )
        assert (await held)[0] == 200
        assert (await _post(f"{url}/generate", input_ids=PROMPT))[0] == 401
        stop.set()
        await asyncio.wait_for(serving, 20)


@pytest.mark.medium
async def test_a_server_on_shared_devices_waits_until_the_trainer_has_left_them(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """It would take a share of what the trainer left over; one that is stopped meanwhile ends."""
    tree = {"model": {"path": str(make_model())}, "trainer": {"is_colocated": True}}
    with EmbeddedRedis(tmp_path / "redis", fsync="no", max_memory_mb=64) as redis:
        run = create_run(build_settings(tree, source="test"), tmp_path / "run", redis.start())
        init_run(run)
        reader = BufferReader.connect(run)
        assert reader.registry.claim_devices() == ()
        stop, urls = asyncio.Event(), list[str]()
        stop.set()
        await asyncio.wait_for(serve(run, 0, stop=stop, on_ready=urls.append), 30)
        assert not urls
        reader.registry.free_devices()
        stop = asyncio.Event()

        def on_ready(url: str) -> None:
            urls.append(url)
            # Its start is over, so that nothing keeps the trainer waiting.
            assert reader.registry.claim_devices() == ()
            stop.set()

        await asyncio.wait_for(serve(run, 0, stop=stop, on_ready=on_ready), 30)
        assert len(urls) == 1
        reader.close()


@pytest.mark.medium
async def test_it_stops_while_turns_are_held(
    make_model: Callable[..., Path], start_torch_server: Callable[..., Any]
) -> None:
    """A paused server with requests ends at once; they are answered as aborted."""
    server = start_torch_server(make_model())
    await _post(f"{server.url}/pause_generation", mode="in_place")
    held = asyncio.create_task(_post(f"{server.url}/generate", input_ids=PROMPT))
    while not any(n for name, n in (await _loads(server.url)).items() if name.endswith("_reqs")):
        assert not held.done()
        await asyncio.sleep(0.005)
    await asyncio.to_thread(server.stop)
    status, answer = await held
    assert status == 200
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"


async def test_sglang_without_an_environment_is_refused(
    make_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """server.kind = "sglang" says which command makes what it needs, or what is wrong with ours."""
    monkeypatch.setenv("OUTLOOP_CACHE_DIR", str(tmp_path / "cache"))
    for given, sentence in ((None, "make venv-sglang"), ("/nowhere/python", "sglang_python")):
        server = {"kind": "sglang"} | ({"sglang_python": given} if given else {})
        tree = {"model": {"path": str(make_model())}, "server": server}
        settings = build_settings(tree, source="test")
        run = create_run(settings, tmp_path / f"run-{bool(given)}", "unix:///none")
        with pytest.raises(SettingsError, match=sentence):
            await serve(run, 0, stop=asyncio.Event(), on_ready=lambda url: None)


SILENT = """
import json, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
table = json.loads(sys.argv[-1])
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"weight_version": table["weight_version"]})
    def do_POST(self):
        if self.path == "/generate":
            threading.Event().wait()
        self.answer({})
    def answer(self, fields):
        content = json.dumps(fields).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
ThreadingHTTPServer((table["host"], table["port"]), Handler).serve_forever()
"""
"""In SGLang's place: there at once, and its first generation never ends."""


@pytest.mark.medium
async def test_the_first_generation_has_the_time_of_a_start(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """On a GPU it compiles kernels, for minutes: server.start_timeout_s is its deadline too."""
    (tmp_path / "silent.py").write_text(SILENT)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path / "silent.py"} "$@"\n')
    python.chmod(0o755)
    tree = {
        "model": {"path": str(make_model())},
        "server": {"kind": "sglang", "sglang_python": str(python), "start_timeout_s": 3},
    }
    with EmbeddedRedis(tmp_path / "redis", fsync="no", max_memory_mb=64) as redis:
        run = create_run(build_settings(tree, source="test"), tmp_path / "run", redis.start())
        init_run(run)
        serving = serve(run, 0, stop=asyncio.Event(), on_ready=lambda url: None)
        with pytest.raises(DeadlineExceeded, match="/generate"):
            await asyncio.wait_for(serving, 30)


@pytest.mark.medium
async def test_weights_that_are_not_finite_fail_turns_but_not_the_server(
    make_model: Callable[..., Path], start_torch_server: Callable[..., Any], tmp_path: Path
) -> None:
    """500 with a sentence; after sane weights it serves again."""
    sane = make_model()
    weights = load_file(sane / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], float("nan"))
    save_file(weights, tmp_path / "model.safetensors")
    url = start_torch_server(sane).url
    await _post(f"{url}/update_weights_from_disk", model_path=str(tmp_path))
    await _post(f"{url}/update_weight_version", new_version="9")
    status, answer = await _post(f"{url}/generate", input_ids=PROMPT)
    assert status == 500
    assert "weight_version='9'" in answer["error"]["message"]
    await _post(f"{url}/update_weights_from_disk", model_path=str(sane))
    assert (await _post(f"{url}/generate", input_ids=PROMPT))[0] == 200


@pytest.mark.medium
async def test_prefixes_are_reused_but_never_across_weights(
    make_model: Callable[..., Path], start_torch_server: Callable[..., Any]
) -> None:
    """A second turn reuses the first; after new weights nothing is, not even what ran meanwhile."""
    url = start_torch_server(make_model()).url

    async def generate(ids: list[int], **fields: Any) -> Any:
        status, answer = await _post(
            f"{url}/generate",
            input_ids=ids,
            sampling_params={"ignore_eos": True, **fields},
            extra_key="0",
        )
        assert status == 200
        return answer

    first = await generate(PROMPT, max_new_tokens=10)
    second = await generate(PROMPT + first["output_ids"] + [7, 8], max_new_tokens=4)
    # All of the first but its last id, which was sampled and never run.
    assert second["meta_info"]["cached_tokens"] == len(PROMPT) + 9
    running = asyncio.create_task(generate(PROMPT[::-1], max_new_tokens=300))
    while (await _loads(url))["num_running_reqs"] == 0:
        await asyncio.sleep(0.002)
    await _post(f"{url}/pause_generation", mode="in_place")
    await _post(f"{url}/update_weights_from_disk", model_path=str(make_model(seed=1)))
    await _post(f"{url}/continue_generation")
    mixed = await running
    again = await generate(PROMPT[::-1] + mixed["output_ids"] + [7], max_new_tokens=2)
    assert again["meta_info"]["cached_tokens"] == 0


async def _loads(url: str) -> Any:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/loads") as response:
        return (await response.json())["loads"][0]


async def test_a_server_that_other_machines_reach_has_a_key(
    make_model: Callable[..., Path],
) -> None:
    """Without one it is not even started."""
    tree = {"model": {"path": str(make_model())}, "server": {"host": "0.0.0.0"}}
    settings = build_settings(tree, source="test")

    async def on_bound(url: str) -> None:
        raise AssertionError(url)

    with pytest.raises(SettingsError, match="without a key"):
        await serve_torch(settings, stop=asyncio.Event(), on_bound=on_bound)


def test_sglang_gets_the_certificate(make_model: Callable[..., Path], tmp_path: Path) -> None:
    """By its own options, as absolute paths; none without."""
    files = {f"tls_{name}_file": str(tmp_path / name) for name in ("cert", "key")}
    for given in ({}, files):
        server = {"kind": "sglang"} | given
        settings = build_settings(
            {"model": {"path": str(make_model("qwen3"))}, "server": server}, source="test"
        )
        table = argument_table(settings, port=1, identity="x")
        found = (table.get("ssl_certfile"), table.get("ssl_keyfile"))
        assert found == (given.get("tls_cert_file"), given.get("tls_key_file"))


def test_sglang_keeps_shared_experts_apart(make_model: Callable[..., Path]) -> None:
    """Only of models that have some: on a GPU their checksums would be another parameter's."""
    for kind, is_set in (("glm4_moe", True), ("qwen3_moe", None), ("qwen3", None)):
        tree = {"model": {"path": str(make_model(kind))}, "server": {"kind": "sglang"}}
        table = argument_table(build_settings(tree, source="test"), port=1, identity="x")
        assert table.get("disable_shared_experts_fusion") is is_set
