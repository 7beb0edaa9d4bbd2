"""Torch servers as processes, forked from one that has torch loaded already.

The forking process is Python's own forkserver; a server is SIGKILLed, stopped and continued by pid.
"""

import asyncio
import contextlib
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

_START_TIMEOUT_S = 100.0


class ServerProcess:
    """One torch server of the model in `folder`; keyword arguments are server settings."""

    def __init__(self, folder: Path, *, max_context_tokens: int = 2048, **server: object) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["outloop.engine.serve.main"])
        receiver, sender = context.Pipe(duplex=False)
        tree = {
            "model": {"path": str(folder), "max_context_tokens": max_context_tokens},
            "server": server,
        }
        self._process = context.Process(target=_serve, args=(tree, sender), daemon=True)
        self._process.start()
        sender.close()
        assert receiver.poll(_START_TIMEOUT_S), "the torch server did not bind"
        self.url: str = receiver.recv()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def is_alive(self) -> bool:
        """False once it has ended."""
        return self._process.is_alive()

    def signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self._process.join(10)
        assert not self._process.is_alive()


def _serve(tree: dict[str, object], sender: Connection) -> None:
    import torch

    from outloop.buffer.settings import build_settings
    from outloop.engine.serve.torch_server.process import serve_torch

    async def on_bound(url: str) -> None:
        sender.send(url)
        sender.close()

    torch.set_num_threads(1)
    settings = build_settings(tree, source="test")
    # What it says would go to the terminal of whoever runs the tests.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        asyncio.run(serve_torch(settings, stop=asyncio.Event(), on_bound=on_bound))
