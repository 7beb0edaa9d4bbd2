"""Servers of each kind, and what the contract tests ask of them."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

NUM_RANKS = {"torch": 1, "sglang": 2}
"""Tensor-parallel ranks of the server under test, whose shards are fed and verified one by one."""
KINDS = ["torch", pytest.param("sglang", marks=pytest.mark.sglang)]
SGLANG_DEFECTS = {
    "fatal_ids": "an id outside the vocabulary ends the server; the router refuses such ids",
    "seed": "sampling_seed needs --enable-deterministic-inference, which has no CPU backend",
}
"""Where SGLang 0.5.23 is not what the suite asks for, by the name that tests use."""


class Server:
    """A server under test, spoken to as any client would."""

    def __init__(self, kind: str, url: str, folder: Path, session: aiohttp.ClientSession) -> None:
        self.kind = kind
        self.url = url
        self.folder = folder
        self.session = session
        self.num_ranks = NUM_RANKS[kind]

    def has_defect(self, name: str) -> bool:
        """Whether the suite knows this kind of server to differ here."""
        assert name in SGLANG_DEFECTS
        return self.kind == "sglang"

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        """Status and decoded answer."""
        async with self.session.post(self.url + path, json=body) as response:
            content = await response.read()
            is_json = response.content_type == "application/json"
            return response.status, json.loads(content) if is_json else content.decode()

    async def get(self, path: str) -> tuple[int, Any]:
        """Status and decoded answer."""
        async with self.session.get(self.url + path) as response:
            content = await response.read()
            is_json = response.content_type == "application/json"
            return response.status, json.loads(content) if is_json else content.decode()

    async def generate(self, ids: list[int], **fields: Any) -> dict[str, Any]:
        """A successful answer with logprobs; sampling parameters and fields by keyword."""
        top = {key: fields.pop(key) for key in ("rid", "extra_key") if key in fields}
        status, answer = await self.post(
            "/generate", input_ids=ids, sampling_params=fields, return_logprob=True, **top
        )
        assert status == 200, answer
        return answer

    async def stream(self, ids: list[int], **fields: Any) -> AsyncIterator[dict[str, Any]]:
        """Decoded events of a streamed answer, checked to end with [DONE]."""
        body = {
            "input_ids": ids,
            "sampling_params": fields,
            "return_logprob": True,
            "stream": True,
        }
        async with self.session.post(self.url + "/generate", json=body) as response:
            assert response.status == 200
            is_done = False
            async for line in response.content:
                if line.startswith(b"data: "):
                    assert not is_done
                    is_done = line.strip() == b"data: [DONE]"
                    if not is_done:
                        yield json.loads(line[6:])
            assert is_done

    async def wait_until_running(self, num: int, *, timeout_s: float = 30.0) -> None:
        """Wait until `num` requests are running and have generated something."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            _, answer = await self.get("/v1/loads")
            load = answer["loads"][0]
            if load["num_running_reqs"] == num:
                return
            assert asyncio.get_running_loop().time() < deadline, load
            await asyncio.sleep(0.005)

    async def wait_until_idle(
        self, note: Callable[[dict[str, Any]], None] | None = None, *, timeout_s: float = 30.0
    ) -> None:
        """Wait until nothing runs or waits; `note` sees every load on the way."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            _, answer = await self.get("/v1/loads")
            load = answer["loads"][0]
            if note is not None:
                note(load)
            if load["num_running_reqs"] + load["num_waiting_reqs"] == 0:
                return
            assert asyncio.get_running_loop().time() < deadline, load
            await asyncio.sleep(0.005)


@pytest.fixture(scope="session", params=KINDS)
def started(
    request: pytest.FixtureRequest,
    make_model: Callable[..., Path],
    start_torch_server: Callable[..., Any],
    start_sglang_server: Callable[..., Any],
) -> tuple[str, str, Path]:
    """Kind, URL and model folder of one running server of each kind."""
    kind = request.param
    start = {"torch": start_torch_server, "sglang": start_sglang_server}[kind]
    folder = make_model()
    return kind, start(folder, tensor_parallel_size=NUM_RANKS[kind]).url, folder


@pytest.fixture
async def server_at() -> AsyncIterator[Callable[..., Server]]:
    """`server_at(kind, url, folder)`: a server that a test started for itself."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield lambda kind, url, folder: Server(kind, url, folder, session)


@pytest.fixture
async def server(started: tuple[str, str, Path]) -> AsyncIterator[Server]:
    """The server, idle, going, and with its first weights and version when the test begins."""
    kind, url, folder = started
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        server = Server(kind, url, folder, session)
        await server.post("/update_weight_version", new_version="default")
        yield server
        await server.post("/pause_generation", mode="abort")
        await server.post("/end_weight_update")
        await server.post("/update_weights_from_disk", model_path=str(folder))
        await server.post("/update_weight_version", new_version="default")
        await server.post("/continue_generation")
        await server.wait_until_idle()
