"""A publisher over a registry in memory, and servers to publish to."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outloop.buffer.records import ServerEntry
from outloop.buffer.run import create_run
from outloop.buffer.settings import build_settings
from outloop.engine.publish.transaction import Publisher

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fakes"))

SERVER_PROGRAM = """
import asyncio, sys
import torch
from outloop.buffer.settings import build_settings
from outloop.engine.serve.main import serve_torch

async def on_bound(url):
    print(url, flush=True)

async def main():
    settings = build_settings({"model": {"path": sys.argv[1]}}, source="test")
    await serve_torch(settings, stop=asyncio.Event(), on_bound=on_bound)

torch.set_num_threads(1)
asyncio.run(main())
"""


class MemoryRegistry:
    """A registry in this process; remembers every entry."""

    def __init__(self) -> None:
        self.entries: dict[str, ServerEntry] = {}
        self.history: list[tuple[str, int | None, bool]] = []

    def add(self, server_id: str, url: str) -> None:
        """Register a server."""
        self.entries[server_id] = ServerEntry(
            server_id=server_id, url=url, kind="torch", policy_version=None, is_quarantined=False
        )

    def servers(self) -> tuple[ServerEntry, ...]:
        """Every server."""
        return tuple(self.entries.values())

    def set_server_version(
        self, server_id: str, policy_version: int | None, *, quarantined: bool
    ) -> None:
        """Enter what a server holds."""
        old = self.entries[server_id]
        self.entries[server_id] = ServerEntry(
            server_id=server_id,
            url=old.url,
            kind=old.kind,
            policy_version=policy_version,
            is_quarantined=quarantined,
        )
        self.history.append((server_id, policy_version, quarantined))

    def state(self, server_id: str) -> tuple[int | None, bool]:
        """Version and quarantine of a server."""
        entry = self.entries[server_id]
        return entry.policy_version, entry.is_quarantined


@pytest.fixture
def registry() -> MemoryRegistry:
    """An empty registry."""
    return MemoryRegistry()


@pytest.fixture
def make_publisher(
    tmp_path: Path, registry: MemoryRegistry, make_model: Callable[..., Path]
) -> Iterator[Callable[..., Publisher]]:
    """`make_publisher(transport="disk", ...)`: keyword arguments are publish settings."""
    made: list[Publisher] = []

    def make(num_servers: int = 1, start_timeout_s: float = 5.0, **publish: Any) -> Publisher:
        publish.setdefault("phase_timeout_s", 5.0)
        tree = {
            "model": {"path": str(make_model())},
            "server": {"num_servers": num_servers, "start_timeout_s": start_timeout_s},
            "publish": publish,
        }
        run = create_run(build_settings(tree, source="test"), tmp_path / "run", "unix:///none")
        made.append(Publisher(run, registry))
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()


@pytest.fixture
def lying_server() -> Iterator[Callable[..., Any]]:
    """`lying_server("hang", "end")` starts that fake in this process."""
    import threading

    from lying_server import LyingServer

    started: list[Any] = []

    def start(behaviour: str, phase: str = "") -> Any:
        server = LyingServer(behaviour, phase)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.close()


@pytest.fixture
def server_process(
    make_model: Callable[..., Path],
) -> Iterator[Callable[[], tuple[str, subprocess.Popen[str]]]]:
    """Starts a torch server in a process of its own; gives its URL and the process."""
    started: list[subprocess.Popen[str]] = []

    def start() -> tuple[str, subprocess.Popen[str]]:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER_PROGRAM, str(make_model())],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        started.append(process)
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        url = next((line.strip() for line in lines if line.startswith("http://")), "")
        assert url, "the server process ended before it was bound"
        return url, process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def other_weights(make_model: Callable[..., Path]) -> dict[str, torch.Tensor]:
    """Weights of the same shapes as the served model's, from another seed."""
    from safetensors.torch import load_file

    return load_file(make_model(seed=1) / "model.safetensors")
