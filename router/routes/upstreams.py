"""Models of other servers: judges, user simulators.

Owns: handing requests on and their answers back, unread. Does not own: which names there are
(settings), the policy. Invariant: nothing that passes here is recorded or trained; no key of the
run leaves, and no key of an upstream is shown.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
import msgspec

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings, UpstreamSettings
from outloop.router.episodes.episode import EpisodeSession
from outloop.router.errors import Refusal
from outloop.router.http.endpoint import ClientLeft, Exchange
from outloop.router.metrics import RouterMetrics

_CONNECT_TIMEOUT_S = 5.0
_ASKED_HEADERS = ("accept", "anthropic-version", "anthropic-beta", "traceparent", "tracestate")
_ANSWERED_HEADERS = ("content-type", "retry-after", "retry-after-ms", "x-should-retry")


class _Named(msgspec.Struct):
    model: str


_decoder = msgspec.json.Decoder(_Named)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Upstream:
    """Where a name leads, and the key for it."""

    settings: UpstreamSettings
    api_key: str = ""

    def __repr__(self) -> str:
        return f"Upstream({self.settings.base_url!r})"


def read_upstreams(settings: Settings) -> Mapping[str, Upstream]:
    """Every upstream with its key.

    Raises:
        SettingsError: one has the policy's name, or its key is not in the environment.
    """
    found = {}
    policy = settings.model.name
    for name, upstream in settings.router.upstreams.items():
        if name.partition("@")[0] == policy:
            raise SettingsError(
                f"router.upstreams.{name} has the name of the policy (model.name={policy!r}); "
                "give it another"
            )
        key = ""
        if upstream.api_key_env is not None:
            key = os.environ.get(upstream.api_key_env, "")
            if not key:
                raise SettingsError(
                    f"router.upstreams.{name}.api_key_env={upstream.api_key_env!r}: the "
                    "environment of the router has no such variable; set it, or leave the "
                    "setting out"
                )
        found[name] = Upstream(upstream, key)
    return found


class Upstreams:
    """Hands requests on; one shared HTTP session."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        upstreams: Mapping[str, Upstream],
        metrics: RouterMetrics,
        *,
        timeout_s: float,
    ) -> None:
        self._http = http
        self._upstreams = upstreams
        self._metrics = metrics
        self._timeout_s = timeout_s

    def __bool__(self) -> bool:
        return bool(self._upstreams)

    async def forward(self, exchange: Exchange, session: EpisodeSession, body: bytes) -> bool:
        """Answer a request that names an upstream; False when it names none.

        Raises:
            Refusal: 401, no episode asks; 404, it has ended; 503, the upstream cannot be reached.
            ClientLeft: the client did not wait.
        """
        name = self._name_in(body)
        if name is None:
            return False
        if session.opening is None:
            raise Refusal(
                401,
                "invalid_api_key",
                f"model={name!r} is asked in the name of the run, so with an episode key only; "
                'router.unkeyed="serve" is for the policy',
                param="model",
            )
        session.check_open()
        self._metrics.proxied.labels(name).inc()
        relay = asyncio.create_task(self._relay(exchange, name, body))
        gone = asyncio.create_task(exchange.wait_gone())
        try:
            await asyncio.wait((relay, gone), return_when=asyncio.FIRST_COMPLETED)
            if not relay.done():
                raise ClientLeft("the client left while an upstream answered")
            relay.result()
        finally:
            relay.cancel()
            gone.cancel()
        return True

    def _name_in(self, body: bytes) -> str | None:
        if not self._upstreams:
            return None
        try:
            name = _decoder.decode(body).model
        except (msgspec.DecodeError, UnicodeDecodeError):
            # Not to be handed on; the dialect says what is wrong with it.
            return None
        return name if name in self._upstreams else None

    async def _relay(self, exchange: Exchange, name: str, body: bytes) -> None:
        upstream = self._upstreams[name]
        if upstream.settings.model is not None:
            model = msgspec.Raw(msgspec.json.encode(upstream.settings.model))
            body = msgspec.json.encode({**_fields.decode(body), "model": model})
        path = exchange.scope["path"].rpartition("/v1/")[2]
        url = f"{upstream.settings.base_url.rstrip('/')}/{path}"
        timeout = aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=_CONNECT_TIMEOUT_S)
        headers = _asked_headers(exchange, upstream)
        try:
            async with self._http.post(url, data=body, headers=headers, timeout=timeout) as answer:
                kept = [
                    (header.encode(), answer.headers[header].encode())
                    for header in _ANSWERED_HEADERS
                    if header in answer.headers
                ]
                if not answer.content_type.startswith("text/event-stream"):
                    # Whole or not at all: half an answer would be taken for one.
                    whole = await answer.read()
                    await exchange.start(answer.status, kept)
                    await exchange.send_events(whole, more=False)
                    return
                await exchange.start(answer.status, kept)
                async for piece in answer.content.iter_any():
                    await exchange.send_events(piece, more=True)
                await exchange.send_events(b"", more=False)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Refusal(
                503,
                "upstream_unavailable",
                f"router.upstreams.{name} at {upstream.settings.base_url} does not answer: "
                f"{type(error).__name__}: {error}",
                retry_after_s=1.0,
            ) from error


def _asked_headers(exchange: Exchange, upstream: Upstream) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    for name in _ASKED_HEADERS:
        value = exchange.headers.get(name.encode())
        if value is not None:
            headers[name] = value.decode("latin-1")
    if upstream.api_key:
        headers["Authorization"] = f"Bearer {upstream.api_key}"
        if "anthropic-version" in headers:
            headers["x-api-key"] = upstream.api_key
    return headers
