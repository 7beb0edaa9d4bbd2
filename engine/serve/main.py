"""A server process: a torch server or SGLang, started and entered in the run's registry.

A server is entered only when it answers, and taken out when it ends. The torch server is for
laptops and tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import structlog
import torch
import uvicorn

from outloop.buffer.errors import DeadlineExceeded, PartFailed, SettingsError
from outloop.buffer.registry import advertised_url
from outloop.buffer.run import Run
from outloop.buffer.settings import Settings
from outloop.buffer.settings.server import ServerSettings
from outloop.buffer.tls import check_certificate
from outloop.engine.serve.external_server import attach
from outloop.engine.serve.frozen_server import FrozenServer
from outloop.engine.serve.logprob_convention import check_logprobs
from outloop.engine.serve.registration import Registration
from outloop.engine.serve.sglang.process import serve_sglang
from outloop.engine.serve.torch_server.app import PURPOSE, ServerApp
from outloop.engine.serve.torch_server.config import read_config
from outloop.engine.serve.torch_server.constrained_decoding import Grammars
from outloop.engine.serve.torch_server.generate import Progress
from outloop.engine.serve.torch_server.scheduler import Engine
from outloop.engine.serve.torch_server.tokenizer import Text
from outloop.engine.serve.torch_server.weights import load_weights

_STOP_TIMEOUT_S = 5.0
_WATCH_S = 0.5
_log = structlog.get_logger()


class _Uvicorn(uvicorn.Server):
    """Leaves signals to the process that it is part of."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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
            timeout_s=server.start_timeout_s,
            key=run.server_key,
        )
        await asyncio.to_thread(registration.enter, url)
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


async def serve_torch(
    settings: Settings,
    *,
    stop: asyncio.Event,
    on_bound: Callable[[str], Awaitable[None]],
    port: int = 0,
    advertise: str | None = None,
    key: str | None = None,
    make_engine: Callable[..., Engine] = Engine,
    make_grammars: Callable[[Path, int], Grammars] = Grammars,
) -> None:
    """A torch server of the settings' policy, without a run; `on_bound` gets its URL.

    Args:
        key: what every request but for its health must bring; None: nothing, on loopback only.
        make_engine: called with what `Engine` takes.
        make_grammars: called with the model folder and the size of the vocabulary.

    Raises:
        SettingsError: the model folder cannot be served, or it would be open to other machines.
        PartFailed: the engine or the HTTP server ended unexpectedly.
    """
    if key is None and not _is_loopback(settings.server.host):
        raise SettingsError(
            f"server.host={settings.server.host!r} without a key: any process that reaches it "
            "could replace the weights; start it as part of a run (`outloop server --run DIR`), or "
            "listen on 127.0.0.1"
        )
    torch.set_num_threads(settings.server.num_threads)
    loop = asyncio.get_running_loop()
    engine = await asyncio.to_thread(
        build_engine, settings, notify=Progress(loop), make_engine=make_engine
    )
    # Loading leaves many long-lived objects behind; collecting them again costs whole passes.
    gc.collect()
    gc.freeze()
    app = ServerApp(
        engine,
        model_path=str(settings.model.path),
        key=key,
        make_grammars=make_grammars,
    )
    engine.start()
    try:
        with _bind(settings.server.host, port) as listener:
            server = settings.server
            is_tls = server.tls_cert_file is not None
            url = advertised_url(server.host, listener.getsockname()[1], advertise, is_tls=is_tls)
            host, ca_file = urlsplit(url).hostname, settings.run.tls_ca_file
            check_certificate("server", server, ca_file=ca_file, host=host)
            await _serve_app(app, engine, listener, url, stop, on_bound, server)
    finally:
        if not await asyncio.to_thread(engine.stop, _STOP_TIMEOUT_S):
            _log.error("engine_did_not_end", timeout_s=_STOP_TIMEOUT_S)


def build_engine(
    settings: Settings, *, notify: Progress, make_engine: Callable[..., Engine] = Engine
) -> Engine:
    """The engine of a run's policy, not started.

    Raises:
        SettingsError: the model folder cannot be served.
    """
    folder, server = settings.model.path, settings.server
    config = read_config(folder)
    dtypes: dict[Literal["float32", "bfloat16"], torch.dtype] = {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
    }
    weights = load_weights(
        config, folder, dtype=dtypes[server.dtype], device=torch.device(server.device)
    )
    return make_engine(
        weights,
        Text(folder),
        max_running=server.max_running_requests,
        max_tokens=min(settings.model.max_context_tokens, config.max_positions),
        weight_version="default",
        notify=notify,
    )


async def _serve_app(
    app: ServerApp,
    engine: Engine,
    listener: socket.socket,
    url: str,
    stop: asyncio.Event,
    on_bound: Callable[[str], Awaitable[None]],
    settings: ServerSettings,
) -> None:
    server = _Uvicorn(
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=int(_STOP_TIMEOUT_S),
            ssl_certfile=settings.tls_cert_file,
            ssl_keyfile=settings.tls_key_file,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await on_bound(url)
        _log.info("server_ready", url=url, purpose=PURPOSE)
        await _watch(engine, serving, stop)
    finally:
        server.should_exit = True
        # Requests that are held would keep their connections, and with them the server.
        engine.abort(None)
        await serving


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0: any free one.

    Raises:
        SettingsError: it cannot listen there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only where the protocol is named; without it answers wait 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
        return listener
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"server.host={host!r} port={port}: cannot listen there ({error}); choose another, or "
            "port 0 for any free one"
        ) from error


async def _watch(engine: Engine, serving: asyncio.Task[None], stop: asyncio.Event) -> None:
    """Return when `stop` is set.

    Raises:
        PartFailed: the engine or the HTTP server ended unexpectedly.
    """
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _WATCH_S)
        if not engine.is_alive:
            raise PartFailed(
                f"the torch server's engine ended: {engine.failure!r}; see the log above"
            )
        if serving.done() and not stop.is_set():
            raise PartFailed("the torch server's HTTP server ended; see the log above")
