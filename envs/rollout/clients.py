"""Clients of the policy's endpoint, shared by all episodes of a process.

An episode gets a shared client with its own address and key, by `with_options`: to make a client
takes ten times as long as a call. A library is imported when its client is first used.
"""

from __future__ import annotations

import ssl
import threading
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
        for name, client in self._made.items():
            closing = client.close()
            if name.startswith("Async"):
                await closing

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
        http = "DefaultAsyncHttpxClient" if name.startswith("Async") else "DefaultHttpxClient"
        return getattr(library, name)(
            base_url=_NOWHERE,
            api_key="episode",
            max_retries=_MAX_RETRIES,
            timeout=self._timeout_s,
            http_client=getattr(library, http)(
                limits=limits, timeout=self._timeout_s, trust_env=False, verify=_trusted()
            ),
        )


def _trusted() -> ssl.SSLContext:
    """Authorities of the system, or of SSL_CERT_FILE, beside those that clients bring."""
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context
