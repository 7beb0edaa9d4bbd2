"""Clients of the policy's endpoint, shared by all episodes of a process.

An episode gets a shared client with its own address and key, by `with_options`: to make a client
takes ten times as long as a call. A library is imported when its client is first used. An
asynchronous client works in every event loop, also in one that a rollout function starts. A client
that a rollout function closes stays open for the other episodes.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import certifi

from outloop.buffer.errors import SettingsError

if TYPE_CHECKING:
    from anthropic import Anthropic, AsyncAnthropic
    from openai import AsyncOpenAI, OpenAI

_MAX_RETRIES = 5
_MAX_IDLE_CONNECTIONS = 32
"""Each request looks at every idle connection of the pool; a new one on this machine costs less
than 512 looks."""
_NOWHERE = "http://episode.invalid"


class Clients:
    """The connection pools of all episodes' clients.

    Guarantees that at least `max_connections` calls can be in flight: the libraries' default of
    1,000 fails under more episodes than that. At most 32 connections stay open between calls, so
    that a call costs the same however many agents wait.
    """

    def __init__(self, *, max_connections: int, timeout_s: float) -> None:
        self._max_connections = max_connections
        self._timeout_s = timeout_s
        self._made: dict[str, Any] = {}
        self._home = _running_loop()
        self._pools: list[tuple[type[Any], Any]] = []
        """The class that closes it, and the HTTP client."""
        # Blocking rollout functions use it from several threads.
        self._lock = threading.Lock()

    def openai(self, base_url: str, api_key: str) -> AsyncOpenAI:
        """`openai.AsyncOpenAI` with one episode's address and key."""
        client: AsyncOpenAI = self._shared("openai", "AsyncOpenAI")
        return client.with_options(base_url=base_url, api_key=api_key)

    def openai_blocking(self, base_url: str, api_key: str) -> OpenAI:
        """The same for code that blocks."""
        client: OpenAI = self._shared("openai", "OpenAI")
        return client.with_options(base_url=base_url, api_key=api_key)

    def anthropic(self, base_url: str, api_key: str) -> AsyncAnthropic:
        """`anthropic.AsyncAnthropic` with one episode's address and key."""
        client: AsyncAnthropic = self._shared("anthropic", "AsyncAnthropic")
        return client.with_options(base_url=base_url, api_key=api_key)

    def anthropic_blocking(self, base_url: str, api_key: str) -> Anthropic:
        """The same for code that blocks."""
        client: Anthropic = self._shared("anthropic", "Anthropic")
        return client.with_options(base_url=base_url, api_key=api_key)

    async def close(self) -> None:
        """Close the connection pools."""
        for base, client in self._pools:
            if hasattr(base, "aclose"):
                await base.aclose(client)
            else:
                base.close(client)

    def _shared(self, package: str, name: str) -> Any:
        with self._lock:
            if name not in self._made:
                self._made[name] = self._make(package, name)
            return self._made[name]

    def _make(self, package: str, name: str) -> Any:
        try:
            library: Any = __import__(package)
        except ImportError as error:
            raise SettingsError(
                f"a ready-made client needs the package {package}, which is not installed; "
                f"pip install {package}, or use episode.base_url and episode.api_key"
            ) from error
        # The type of the limits depends on the client's version.
        limits = type(library.DEFAULT_CONNECTION_LIMITS)(
            max_connections=self._max_connections,
            max_keepalive_connections=min(self._max_connections, _MAX_IDLE_CONNECTIONS),
            keepalive_expiry=30.0,
        )
        options = {
            "limits": limits,
            "timeout": self._timeout_s,
            "trust_env": False,
            "verify": _trusted(),
        }
        if name.startswith("Async"):
            base = library.DefaultAsyncHttpxClient
            http_client = _for_every_loop(base, options, self._home)
        else:
            base = library.DefaultHttpxClient
            http_client = type(base.__name__, (base,), {"close": lambda client: None})(**options)
        self._pools.append((base, http_client))
        return getattr(library, name)(
            base_url=_NOWHERE,
            api_key="episode",
            max_retries=_MAX_RETRIES,
            timeout=self._timeout_s,
            http_client=http_client,
        )


def _for_every_loop(
    base: type[Any], options: Mapping[str, Any], home: asyncio.AbstractEventLoop | None
) -> Any:
    """An HTTP client whose pool is used in the loop `home` alone.

    A connection belongs to the loop that opened it. In any other loop each request has one of its
    own, which no later loop finds.
    """

    async def send(client: Any, request: Any, **how: Any) -> Any:
        loop = _running_loop()
        if loop is not None and loop is home:
            return await base.send(client, request, **how)
        limits = type(options["limits"])(max_keepalive_connections=0)
        return await base(**{**options, "limits": limits}).send(request, **how)

    async def aclose(client: Any) -> None:
        """Stay open: the client is shared."""

    return type(base.__name__, (base,), {"send": send, "aclose": aclose})(**options)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _trusted() -> ssl.SSLContext:
    """Authorities of the system, or of SSL_CERT_FILE, beside those that clients bring."""
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context
