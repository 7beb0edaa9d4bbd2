"""The shared clients of the model's endpoint."""

import asyncio
import json

import pytest

from outloop.envs.rollout.clients import Clients

ANSWER = json.dumps(
    {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [
            {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "x"}}
        ],
    }
).encode()


class Endpoint:
    """Answers every request once `go` is set, and counts its open connections."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.num_open = 0
        self.num_waiting = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                words = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
                lengths = {name.lower(): value for name, value in words.items()}
                await reader.readexactly(int(lengths[b"content-length"]))
                self.num_waiting += 1
                await self.go.wait()
                self.num_waiting -= 1
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
                writer.write(b"Content-Length: %d\r\n\r\n" % len(ANSWER) + ANSWER)
        except asyncio.IncompleteReadError:
            pass
        finally:
            self.num_open -= 1
            writer.close()


@pytest.mark.medium
async def test_few_connections_stay_open_between_calls() -> None:
    """All calls are in flight at once; then a call's cost does not grow with how many there were,
    because the pool looks at each idle connection."""
    endpoint = Endpoint()
    server = await asyncio.start_server(endpoint.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    clients = Clients(max_connections=400, timeout_s=30.0)
    client = clients.openai(url, "key")

    async def call() -> None:
        await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hello"}]
        )

    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        for _ in range(80):
            tasks.create_task(call())
        while endpoint.num_waiting < 80:
            await asyncio.sleep(0.01)
        assert endpoint.num_open == 80
        endpoint.go.set()
    async with asyncio.timeout(30):
        while endpoint.num_open > 32:
            await asyncio.sleep(0.01)
        for _ in range(5):
            await call()
    assert endpoint.num_open == 32
    await clients.close()
    server.close()
