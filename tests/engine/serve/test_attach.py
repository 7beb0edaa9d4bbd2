"""Servers that somebody else started, followed through their coming and going."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from outloop.buffer.errors import DeadlineExceeded, SettingsError
from outloop.buffer.reader import BufferReader
from outloop.buffer.records import ServerEntry
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.redis.run_meta import init_run
from outloop.buffer.run import Run, create_run
from outloop.buffer.settings import build_settings
from outloop.engine.machine.gpu_libraries import own_libraries
from outloop.engine.publish.server_client import ServerClient
from outloop.engine.serve.main import serve


@asynccontextmanager
async def attached(
    folder: Path, tmp_path: Path, url: str, **server: Any
) -> AsyncIterator[tuple[Run, BufferReader, asyncio.Task[None], asyncio.Event]]:
    """A run whose only server is the one at `url`, and the task that follows it."""
    tree = {
        "model": {"path": str(folder)},
        "server": {"num_servers": 0, "urls": [url], **server},
    }
    with EmbeddedRedis(tmp_path / "redis", fsync="no", max_memory_mb=64) as redis:
        run = create_run(build_settings(tree, source="test"), tmp_path / "run", redis.start())
        init_run(run)
        reader = BufferReader.connect(run)
        stop = asyncio.Event()
        task = asyncio.create_task(serve(run, 0, stop=stop, on_ready=lambda url: None))
        try:
            yield run, reader, task, stop
        finally:
            stop.set()
            await asyncio.gather(task, return_exceptions=True)
            reader.close()


async def entry_when(
    reader: BufferReader, is_true: Callable[[ServerEntry], bool], timeout_s: float = 60.0
) -> ServerEntry:
    """The registry's only entry once `is_true` of it."""
    deadline = time.monotonic() + timeout_s
    while True:
        entries = await asyncio.to_thread(reader.registry.servers)
        if entries and is_true(entries[0]):
            return entries[0]
        assert time.monotonic() < deadline, entries
        await asyncio.sleep(0.05)


@pytest.mark.medium
async def test_it_is_entered_lost_and_entered_again(
    make_model: Callable[..., Path], start_torch_server: Callable[..., Any], tmp_path: Path
) -> None:
    """Entered without a version, quarantined when it is gone, fed again when it is back."""
    folder = make_model()
    first = start_torch_server(folder)
    port = int(first.url.rpartition(":")[2])
    async with attached(folder, tmp_path, first.url) as (_, reader, task, stop):
        entry = await entry_when(reader, lambda e: not e.is_quarantined)
        assert (entry.url, entry.policy_version) == (first.url, None)
        assert entry.libraries == own_libraries()
        await asyncio.to_thread(
            reader.registry.set_server_version, "server-0", 3, quarantined=False
        )
        await asyncio.to_thread(first.stop)
        await entry_when(reader, lambda e: e.is_quarantined)
        start_torch_server(folder, port=port)
        entry = await entry_when(reader, lambda e: not e.is_quarantined)
        assert entry.policy_version is None
        stop.set()
        await asyncio.wait_for(task, 30)
        assert (await entry_when(reader, lambda e: e.is_quarantined)).policy_version is None


@pytest.mark.medium
async def test_one_that_was_started_anew_is_fed_anew(
    make_model: Callable[..., Path], start_torch_server: Callable[..., Any], tmp_path: Path
) -> None:
    """A server that has lost the version that it was entered with is entered without one."""
    folder = make_model()
    server = start_torch_server(folder)
    client = ServerClient("server-0", server.url)
    async with attached(folder, tmp_path, server.url) as (_, reader, _, _):
        await entry_when(reader, lambda e: not e.is_quarantined)
        for version in (4, 5):
            # As a publish does: on the server first, then in the registry.
            client.set_version(str(version), time.monotonic() + 30)
            await asyncio.to_thread(
                reader.registry.set_server_version, "server-0", version, quarantined=False
            )
        held = await entry_when(reader, lambda e: e.policy_version is not None)
        assert held.policy_version == 5
        client.set_version("default", time.monotonic() + 30)
        await entry_when(reader, lambda e: e.policy_version is None)
    client.close()


@pytest.mark.medium
async def test_one_that_never_answers_is_named(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """The deadline's error names the URL that was waited for."""
    url = "http://127.0.0.1:9"
    async with attached(make_model(), tmp_path, url, start_timeout_s=0.5) as (_, _, task, _):
        with pytest.raises(DeadlineExceeded, match=url):
            await asyncio.wait_for(task, 30)


@pytest.mark.parametrize(
    ("server", "sentence"),
    [
        ({"num_servers": 1, "urls": ["http://h:1"]}, "num_servers=1"),
        ({"tensor_parallel_size": 2}, "kind"),
        ({"sglang": {"tp": 1}}, "kind"),
        ({"kind": "sglang", "sglang": {"tp-size": 2}}, "server.tensor_parallel_size"),
        ({"kind": "sglang", "sglang": {"model-path": "x"}}, "model.path"),
    ],
)
def test_contradictions_are_refused(server: dict[str, Any], sentence: str) -> None:
    """Server settings that work against one another are named before anything starts."""
    with pytest.raises(SettingsError, match=sentence):
        build_settings({"model": {"path": "m"}, "server": server}, source="test")


@pytest.mark.medium
async def test_a_server_that_wants_a_key_is_attached_to_with_it(
    make_model: Callable[..., Path], start_torch_server: Callable[..., Any], tmp_path: Path
) -> None:
    """Without the key the part ends with the setting's name, with it the server is entered."""
    folder = make_model()
    url = start_torch_server(folder, key="secret").url
    async with attached(folder, tmp_path / "without", url) as (_, _, task, _):
        with pytest.raises(SettingsError, match=r"server\.api_key_file"):
            await asyncio.wait_for(task, 30)
    (tmp_path / "key").write_text("secret")
    file = str(tmp_path / "key")
    async with attached(folder, tmp_path / "with", url, api_key_file=file) as (_, reader, _, _):
        assert (await entry_when(reader, lambda e: not e.is_quarantined)).url == url
