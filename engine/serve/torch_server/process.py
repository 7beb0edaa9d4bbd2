"""One torch server, in the process that asks for it: started, watched, stopped.

When `serve_torch` returns or raises, its engine has ended and its port is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import structlog
import torch
import uvicorn

from outloop.buffer.errors import PartFailed, SettingsError
from outloop.buffer.registry import advertised_url
from outloop.buffer.settings import Settings
from outloop.buffer.settings.server import ServerSettings
from outloop.buffer.tls import check_certificate
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
            # httptools loses the bodies of requests that offer another protocol.
            http="h11",
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
