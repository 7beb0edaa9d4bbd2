"""Several router processes behind one port, and what remains when one is killed."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import httpx
import psutil
import pytest

from fakes.fake_server import FakeServer, Script, serving
from fakes.ports import free_ports
from fakes.served_policy import publish
from outloop.buffer.reader import BufferReader
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.redis.run_meta import init_run
from outloop.buffer.run import create_run
from outloop.buffer.writer import BufferWriter
from outloop.engine.launch.gpu_placement import NOT_PLACED
from outloop.engine.launch.launcher import Launcher, start_routers
from outloop.engine.launch.placement import HERE
from outloop.engine.launch.restarts import DEFAULT_BACKOFF
from outloop.router.peers import turn_locator

TEXT = "a long answer that is told in many pieces"
START_TIMEOUT_S = 150.0


class Routers:
    """Router processes of one run on one port."""

    def __init__(self, run, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-m", "outloop.cli", "router", "--run", str(run.dir)]
        self._command += ["--port", str(port)]
        self._processes: list[subprocess.Popen] = []
        self._folder = run.dir

    async def start(self) -> subprocess.Popen:
        """One more; returns when it says that it is ready."""
        port = self.url.rpartition(":")[2]
        log = self._folder / f"router-{port}-{len(self._processes)}.log"
        with log.open("wb") as sink:
            process = subprocess.Popen(self._command, stdout=sink, stderr=sink)
        self._processes.append(process)
        async with asyncio.timeout(START_TIMEOUT_S):
            while b"ready" not in log.read_bytes():
                assert process.poll() is None, log.read_text()
                await asyncio.sleep(0.05)
        return process

    def stop(self) -> None:
        """End them all."""
        for process in self._processes:
            process.kill()
            process.wait()


async def until_ready(run, num_starts: int = 2) -> None:
    """Router processes of a launcher have said so often that they are ready."""
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            logs = [path.read_text() for path in (run.dir / "logs").glob("router-*.log")]
            if sum(log.count("part_ready") for log in logs) >= num_starts:
                return
            await asyncio.sleep(0.05)


def victim_of(launcher: Launcher, stream: httpx.Response) -> int:
    """The process at the other end of a connection."""
    port = stream.extensions["network_stream"].get_extra_info("client_addr")[1]
    (pid,) = (
        part.pid
        for part in launcher.parts.values()
        if any(c.raddr and c.raddr.port == port for c in psutil.Process(part.pid).net_connections())
    )
    return pid


async def kill(pid: int) -> None:
    """Gone with all its connections: a new one that reached it while it dies would be reset.

    The last of its threads closes them, and the first may be a zombie before the others have ended.
    """
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        while psutil.pid_exists(pid) and (
            psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
            or len(os.listdir(f"/proc/{pid}/task")) > 1
        ):
            await asyncio.sleep(0.01)


@pytest.fixture
def live_run(make_run, tmp_path: Path):
    """A run in a Redis of its own whose routers share a port."""
    with EmbeddedRedis(tmp_path / "redis", max_memory_mb=64) as redis:
        settings = make_run(router={"num_processes": 2}, buffer={"group_size": 2}).settings
        run = create_run(settings, tmp_path / "run", redis.url)
        init_run(run)
        yield run


@pytest.mark.medium
@pytest.mark.timeout(420)
async def test_killing_a_router_loses_no_turn_and_a_retry_gets_its_answer(
    live_run, renderer
) -> None:
    """An answered turn is there; one that was being streamed is answered by another process."""
    stop = renderer.stop_ids[0]
    ids = [*renderer.tokenizer.encode(TEXT), stop]
    server = FakeServer(lambda request: Script(ids=ids, finish={"type": "stop", "matched": stop}))
    runner = {"Authorization": f"Bearer {live_run.keys.runner_key}"}
    reader = BufferReader.connect(live_run)
    launcher = Launcher(live_run, reader, threading.Event(), NOT_PLACED, DEFAULT_BACKOFF, HERE)
    try:
        async with serving(server) as server_url, httpx.AsyncClient(timeout=60) as control:
            publish(live_run, server_url)
            start_routers(launcher)
            await until_ready(live_run)
            (url,) = {reader.registry.parts()["router"]["url"]}
            tasks = {"tasks": [{"task_id": "t", "payload": {}}], "eval_tasks": []}
            await control.post(f"{url}/tasks", json=tasks, headers=runner)
            claim = {"key": "k", "count": 1, "open": True}
            answer = await control.post(f"{url}/tasks/claim", json=claim, headers=runner)
            episode = answer.json()["claims"][0]["episode"]
            key = {"Authorization": f"Bearer {episode['api_key']}"}
            chat = f"{url}/v1/chat/completions"
            first = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
            named = {**key, "idempotency-key": "first"}
            first_answer = (await control.post(chat, json=first, headers=named)).json()
            reply = first_answer["choices"][0]["message"]
            more = [*first["messages"], {"role": "assistant", "content": reply["content"]}]
            second = {
                "model": "policy",
                "messages": [*more, {"role": "user", "content": "and?"}],
                "stream": True,
            }
            server.step_gate = asyncio.Event()

            async def watch_it_die() -> None:
                async with control.stream("POST", chat, json=second, headers=key) as stream:
                    async for line in stream.aiter_lines():
                        if '"content":"' in line and '"content":""' not in line:
                            await kill(victim_of(launcher, stream))

            with pytest.raises(httpx.HTTPError):
                await watch_it_die()
            server.step_gate.set()
            retry = {**key, "x-stainless-retry-count": "1"}
            again = await control.post(chat, json=second, headers=retry)
            chunks = [json.loads(x[6:]) for x in again.text.splitlines() if x[:7] == "data: {"]
            text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
            assert text == TEXT
            # It is one turn, whoever repeats it.
            replay = await control.post(
                chat, json=second, headers={**key, "x-stainless-retry-count": "2"}
            )
            assert chunks[0]["id"] in replay.text
            # What the dead process had told is told the same by one that never saw it.
            replay = await control.post(chat, json=first, headers=named)
            assert replay.json()["choices"] == first_answer["choices"]
            read = await control.get(f"{url}/episodes/{episode['episode_id']}", headers=runner)
            turns = read.json()["turns"]
            assert [turn["branch_cause"] for turn in turns] == ["root", "extension"]
            assert turns[1]["parent_turn_id"] == turns[0]["turn_id"]
            path = turns[0]["prompt_ids"] + turns[0]["output_ids"] + turns[1]["prompt_ids"]
            assert path == server.requests[-1]["input_ids"]
            assert len(turns[1]["loss_spans"]) == 1
            # The launcher starts the lost one again, behind the same port.
            launcher.check()
            assert all(process.exit_code is None for process in launcher.parts.values())
            await until_ready(live_run, num_starts=3)
            assert reader.registry.parts()["router"]["url"] == url
    finally:
        launcher.stop_all()
        reader.close()


@pytest.mark.medium
@pytest.mark.timeout(420)
async def test_one_episode_through_two_processes_is_one_branch(live_run, renderer) -> None:
    """Whichever process a connection reaches, the conversation goes on by its recorded ids."""
    stop = renderer.stop_ids[0]
    ids = [*renderer.tokenizer.encode("fine"), stop]
    server = FakeServer(lambda request: Script(ids=ids, finish={"type": "stop", "matched": stop}))
    run = live_run
    routers = Routers(run, free_ports(1)[0])
    runner = {"Authorization": f"Bearer {run.keys.runner_key}"}
    try:
        async with serving(server) as server_url:
            publish(run, server_url)
            await asyncio.gather(routers.start(), routers.start())
            async with httpx.AsyncClient(timeout=60) as control:
                tasks = {"tasks": [{"task_id": "t", "payload": {}}], "eval_tasks": []}
                await control.post(f"{routers.url}/tasks", json=tasks, headers=runner)
                claim = {"key": "k", "count": 1, "open": True}
                answer = await control.post(
                    f"{routers.url}/tasks/claim", json=claim, headers=runner
                )
                episode = answer.json()["claims"][0]["episode"]
            messages = [{"role": "user", "content": "hi"}]
            for number in range(8):
                # A connection of its own each time: the kernel chooses the process.
                async with httpx.AsyncClient(timeout=60) as client:
                    answer = await client.post(
                        f"{episode['base_url']}/chat/completions",
                        json={"model": "policy", "messages": messages},
                        headers={"Authorization": f"Bearer {episode['api_key']}"},
                    )
                reply = answer.json()["choices"][0]["message"]
                messages.append({"role": "assistant", "content": reply["content"]})
                messages.append({"role": "user", "content": f"and {number}?"})
    finally:
        routers.stop()
    reader = BufferReader.connect(run)
    turns = reader.load_episode(episode["episode_id"]).turns
    reader.close()
    assert len(turns) == 8
    assert [turn.branch_cause for turn in turns] == ["root", *["extension"] * 7]
    for before, turn in pairwise(turns):
        assert turn.parent_turn_id == before.turn_id
    for request in server.requests:
        assert request["input_ids"][: len(turns[0].prompt_ids)] == turns[0].prompt_ids.tolist()


@pytest.mark.slow
@pytest.mark.timeout(420)
async def test_a_retry_at_another_process_waits_for_the_turn_or_generates_it_when_that_dies(
    live_run, renderer
) -> None:
    """While the first process lives both get its turn, generated once; killed in the middle of a
    turn, it is noticed, and the process that waits generates the turn."""
    stop = renderer.stop_ids[0]
    ids = [*renderer.tokenizer.encode("fine"), stop]
    server = FakeServer(lambda request: Script(ids=ids, finish={"type": "stop", "matched": stop}))
    first, other = (Routers(live_run, port) for port in free_ports(2))
    runner = {"Authorization": f"Bearer {live_run.keys.runner_key}"}
    received: list[bytes] = []
    writer = await BufferWriter.connect(live_run)
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}

    async def until(is_so) -> None:
        async with asyncio.timeout(60):
            while not is_so():
                await asyncio.sleep(0.01)

    async def waits_elsewhere(ask) -> asyncio.Task:
        """A retry at the other process, which knows that its turn is generated elsewhere."""
        listening = asyncio.create_task(writer.channel.listen({"routers": received.append}))
        assert await writer.channel.is_listening(30)
        received.clear()
        retry = asyncio.create_task(ask(other, **{"x-stainless-retry-count": "1"}))
        # It asks again only when it was told that somebody does.
        await until(lambda: any(turn_locator.decode(message).round > 1 for message in received))
        # Who only listens is never answered for.
        listening.cancel()
        return retry

    try:
        async with serving(server) as server_url, httpx.AsyncClient(timeout=90) as client:
            publish(live_run, server_url)
            process, _ = await asyncio.gather(first.start(), other.start())
            tasks = {"tasks": [{"task_id": "t", "payload": {}}], "eval_tasks": []}
            await client.post(f"{first.url}/tasks", json=tasks, headers=runner)
            claim = {"key": "k", "count": 1, "open": True}
            answer = await client.post(f"{first.url}/tasks/claim", json=claim, headers=runner)
            episode = answer.json()["claims"][0]["episode"]
            key = {"Authorization": f"Bearer {episode['api_key']}"}

            async def ask(routers: Routers, **headers: str) -> httpx.Response:
                url = f"{routers.url}/v1/chat/completions"
                return await client.post(url, json=body, headers={**key, **headers})

            server.gate.clear()
            stayed = asyncio.create_task(ask(first))
            await until(lambda: len(server.requests) == 1)
            retry = await waits_elsewhere(ask)
            server.gate.set()
            assert (await stayed).content == (await retry).content
            assert len(server.requests) == 1

            server.gate.clear()
            cut_off = asyncio.create_task(ask(first))
            await until(lambda: len(server.requests) == 2)
            retry = await waits_elsewhere(ask)
            await kill(process.pid)
            with pytest.raises(httpx.HTTPError):
                await cut_off
            await until(lambda: len(server.requests) == 3)
            server.gate.set()
            assert (await retry).status_code == 200
            turns = (await writer.load_episode(episode["episode_id"])).turns
    finally:
        first.stop()
        other.stop()
        await writer.close()
    assert len(turns) == 2
    assert turns[1].turn_id in retry.result().text
    assert all(turn.loss_spans for turn in turns)
