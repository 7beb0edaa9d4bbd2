"""A server process: a torch server or SGLang, started and entered in the run's registry.

A server is entered only when it answers, and taken out when it ends. The torch server is for
laptops and tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from outloop.buffer.errors import DeadlineExceeded, SettingsError
from outloop.buffer.records import Libraries
from outloop.buffer.run import Run
from outloop.buffer.settings.server import ServerSettings
from outloop.engine.machine.gpu_libraries import libraries_of, own_libraries
from outloop.engine.serve.external_server import attach
from outloop.engine.serve.frozen_server import FrozenServer
from outloop.engine.serve.logprob_convention import check_logprobs
from outloop.engine.serve.registration import UNTOLD, Registration
from outloop.engine.serve.sglang.cpu_environment import find_python
from outloop.engine.serve.sglang.process import serve_sglang
from outloop.engine.serve.torch_server.process import serve_torch

_WATCH_S = 0.5


async def serve(
    run: Run,
    index: int,
    *,
    stop: asyncio.Event,
    on_ready: Callable[[str], None],
    port: int = 0,
    advertise: str | None = None,
) -> None:
    """Start or attach to a server, enter it as `server-{index}` when it answers, until `stop`.

    When this returns or raises, the server gets no more traffic.

    Args:
        port: in place of server.port; 0 for what the settings say.
        advertise: the name or address under which other machines reach this one.

    Raises:
        SettingsError: the model folder, or what SGLang is to be started with, cannot be served.
        DeadlineExceeded: the server did not answer in time.
        PartFailed: the server ended unexpectedly.
    """
    server = run.settings.server
    registration = Registration(run, index)
    if server.num_servers == 0:
        if index >= len(server.urls):
            raise SettingsError(
                f"index={index} of server.urls={list(server.urls)}; 0 to {len(server.urls) - 1}"
            )
        on_ready(server.urls[index])
        await attach(run, registration, server.urls[index], stop=stop)
        return

    async def on_bound(url: str) -> None:
        await asyncio.to_thread(
            check_logprobs,
            registration.server_id,
            url,
            dtype=server.dtype,
            timeout_s=server.start_timeout_s,
            key=run.server_key,
        )
        libraries = await asyncio.to_thread(_libraries, server)
        await asyncio.to_thread(registration.enter, url, libraries)
        if is_colocated:
            await asyncio.to_thread(registration.end_start)
        on_ready(url)

    is_colocated = run.settings.trainer.is_colocated
    port = port or (server.port + index if server.port else 0)
    serve_kind = serve_sglang if server.kind == "sglang" else serve_torch
    if is_colocated and not await _wait_for_trainer(run, registration, stop):
        return
    try:
        await serve_kind(
            run.settings,
            stop=stop,
            on_bound=on_bound,
            port=port,
            advertise=advertise,
            key=run.server_key,
        )
    finally:
        await asyncio.to_thread(registration.withdraw)
        if is_colocated:
            await asyncio.to_thread(registration.end_start)


async def serve_frozen(
    run: Run,
    index: int,
    *,
    stop: asyncio.Event,
    on_ready: Callable[[str], None],
    port: int = 0,
    advertise: str | None = None,
) -> None:
    """A torch server that holds an earlier version, `frozen-{index}`, until `stop`.

    Args:
        port: 0 for any free one.
        advertise: the name or address under which other machines reach this one.

    Raises:
        SettingsError: the settings have no such server, or the model folder cannot be served.
        PartFailed: the server ended unexpectedly.
        ServerUnavailable, DeadlineExceeded, PublishFailed: it does not load a version.
    """
    num_frozen = run.settings.server.num_frozen
    if not 0 <= index < num_frozen:
        raise SettingsError(
            f"index={index} of server.num_frozen={num_frozen} servers of earlier versions; "
            "0 and up, below it, are allowed"
        )
    ended = asyncio.Event()
    following: list[asyncio.Task[None]] = []

    async def on_bound(url: str) -> None:
        task = asyncio.create_task(FrozenServer(run, index, url).follow(stop))
        task.add_done_callback(lambda _: ended.set())
        following.append(task)
        on_ready(url)

    await serve_torch(
        run.settings,
        stop=ended,
        on_bound=on_bound,
        port=port,
        advertise=advertise,
        key=run.server_key,
    )
    for task in following:
        await task


def _libraries(server: ServerSettings) -> Libraries:
    """What a server that was started here has; of SGLang on a CPU nobody needs to know."""
    if server.kind == "torch":
        return own_libraries()
    if not server.device.startswith("cuda"):
        return UNTOLD
    return libraries_of(find_python(server.sglang_python))


async def _wait_for_trainer(run: Run, registration: Registration, stop: asyncio.Event) -> bool:
    """Wait until the trainer has left the GPUs that it shares with this server: what the server
    takes depends on what is free when it starts. False when stopped first.

    Raises:
        DeadlineExceeded: the trainer did not leave.
    """
    timeout_s = run.settings.trainer.hang_timeout_s + run.settings.server.start_timeout_s
    deadline = time.monotonic() + timeout_s
    while not await asyncio.to_thread(registration.claim_start):
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                who=registration.server_id,
                phase="start on GPUs that the trainer holds",
                peer="trainer",
                after_s=timeout_s,
            )
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _WATCH_S)
        if stop.is_set():
            return False
    return True
