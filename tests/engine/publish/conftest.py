"""A publisher over a registry in memory, and servers to publish to."""

import dataclasses
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from outloop.buffer.records import Libraries, ServerEntry
from outloop.buffer.run import create_run
from outloop.buffer.settings import build_settings
from outloop.engine.publish.publisher import Publisher

PROMPT = [3, 99, 250, 4, 18, 31, 7, 300, 2, 45, 11]


class MemoryRegistry:
    """A registry in this process; remembers every entry."""

    def __init__(self) -> None:
        self.entries: dict[str, ServerEntry] = {}
        self.history: list[tuple[str, int | None, bool]] = []
        self.starting: list[str] = []
        """What the trainer finds starting, call by call."""
        self.is_claimed = False
        self.warnings: list[str] = []
        """What publishers warned of."""

    def add(self, server_id: str, url: str, kind: str = "torch", **fields: Any) -> None:
        """Register a server."""
        self.entries[server_id] = ServerEntry(
            server_id=server_id,
            url=url,
            kind=kind,
            policy_version=None,
            is_quarantined=False,
            **fields,
        )

    def set_released(self, server_id: str, tags: Sequence[str]) -> None:
        """Enter what a server was asked to release."""
        old = self.entries[server_id]
        self.entries[server_id] = dataclasses.replace(old, released=tuple(tags))

    def claim_devices(self) -> tuple[str, ...]:
        """The trainer's claim."""
        self.is_claimed = True
        return (self.starting.pop(),) if self.starting else ()

    def free_devices(self) -> None:
        """The end of the trainer's claim."""
        self.is_claimed = False

    def servers(self) -> tuple[ServerEntry, ...]:
        """Every server."""
        return tuple(self.entries.values())

    def set_server_version(
        self, server_id: str, policy_version: int | None, *, quarantined: bool
    ) -> None:
        """Enter what a server holds."""
        old = self.entries[server_id]
        self.entries[server_id] = dataclasses.replace(
            old, policy_version=policy_version, is_quarantined=quarantined
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

    def make(
        num_servers: int = 1,
        start_timeout_s: float = 5.0,
        is_colocated: bool = False,
        device: str = "cpu",
        libraries: Libraries | None = None,
        **publish: Any,
    ) -> Publisher:
        publish.setdefault("phase_timeout_s", 5.0)
        tree = {
            "model": {"path": str(make_model())},
            "server": {
                "num_servers": num_servers,
                "start_timeout_s": start_timeout_s,
                "device": device,
            },
            "publish": publish,
            "trainer": {"is_colocated": is_colocated},
        }
        run = create_run(build_settings(tree, source="test"), tmp_path / "run", "unix:///none")
        made.append(
            Publisher(run, registry, libraries=libraries, on_warning=registry.warnings.append)
        )
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()


@pytest.fixture
def lying_server() -> Iterator[Callable[..., Any]]:
    """`lying_server("hang", "end")` starts that fake in this process."""
    import threading

    from fakes.lying_server import LyingServer

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
def server_process(make_model: Callable[..., Path]) -> Iterator[Callable[..., Any]]:
    """Starts a torch server, of the tiny model or another, in a process of its own."""
    from fakes.torch_server_process import ServerProcess

    started: list[Any] = []

    def start(folder: Path | None = None) -> Any:
        started.append(ServerProcess(folder or make_model()))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.fixture
def other_weights(make_model: Callable[..., Path]) -> dict[str, torch.Tensor]:
    """Weights of the same shapes as the served model's, from another seed."""
    from safetensors.torch import load_file

    return load_file(make_model(seed=1) / "model.safetensors")


@pytest.fixture(name="post")
def post_fixture() -> Callable[..., tuple[int, Any]]:
    """`post(url, path, body)`: status and JSON body of the answer."""
    return post


@pytest.fixture(scope="session")
def expected_ids(make_model: Callable[..., Path]) -> list[int]:
    """What `greedy` must generate under `other_weights`, by transformers."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        make_model(seed=1), dtype=torch.float32
    )
    ids = torch.tensor([PROMPT])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=10,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(PROMPT) :].tolist()


def post(url: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Status and JSON body of the answer."""
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, json.loads(response.read() or b"null")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read() or b"null")


@pytest.fixture
def greedy() -> Callable[[str], dict[str, Any]]:
    """`greedy(url)`: the answer to a fixed prompt at temperature 0."""

    def ask(url: str) -> dict[str, Any]:
        params = {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True}
        status, answer = post(
            url, "/generate", {"input_ids": PROMPT, "sampling_params": params, "extra_key": "k"}
        )
        assert status == 200
        return answer

    return ask
