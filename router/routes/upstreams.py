"""Models of other servers: judges, user simulators.

Owns: handing requests on and their answers back, and what an episode may use of each. Does not own:
which names there are (settings), the policy. Invariant: nothing that passes here is recorded or
trained; no key of the run leaves, and no key of an upstream is shown or sent anywhere else.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
import msgspec

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings, UpstreamSettings
from outloop.router.episodes.episode import LiveEpisode, UpstreamUsage
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
_TOKENS = re.compile(rb'"(total|prompt|completion|input|output)_tokens"\s*:\s*(\d{1,12})')
_TAIL_BYTES = 256
_BYTES_PER_TOKEN = 4


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
    """Hands requests on; one shared HTTP episode."""

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

    async def forward(self, exchange: Exchange, episode: LiveEpisode, body: bytes) -> bool:
        """Answer a request that names an upstream; False when it names none.

        Raises:
            Refusal: 401, no episode asks; 404, it has ended; 503, the upstream cannot be reached.
            ClientLeft: the client did not wait.
        """
        name = self._name_in(body)
        if name is None:
            return False
        if episode.opening is None:
            raise Refusal(
                401,
                "invalid_api_key",
                f"model={name!r} is asked in the name of the run, so with an episode key only; "
                'router.unkeyed="serve" is for the policy',
                param="model",
            )
        episode.check_open()
        self._metrics.proxied.labels(name).inc()
        relay = asyncio.create_task(self._relay(exchange, episode, name, body))
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

    async def _relay(
        self, exchange: Exchange, episode: LiveEpisode, name: str, body: bytes
    ) -> None:
        upstream = self._upstreams[name]
        usage = episode.upstreams.setdefault(name, UpstreamUsage())
        _check_budget(name, upstream.settings, usage, episode)
        usage.num_requests += 1
        # Of a name that is given twice, another parser may read the other one: it goes on once.
        model = msgspec.Raw(msgspec.json.encode(upstream.settings.model or name))
        body = msgspec.json.encode({**_fields.decode(body), "model": model})
        path = exchange.scope["path"].rpartition("/v1/")[2]
        url = f"{upstream.settings.base_url.rstrip('/')}/{path}"
        timeout = aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=_CONNECT_TIMEOUT_S)
        headers = _asked_headers(exchange, upstream)
        meter = _Meter(len(body))
        try:
            async with self._http.post(
                url,
                data=io.BytesIO(body),
                headers=headers,
                timeout=timeout,
                # Its key, and whatever an address within this network answers, stay where they are.
                allow_redirects=False,
            ) as answer:
                await self._hand_back(exchange, name, upstream.settings, answer, meter)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Refusal(
                503,
                "upstream_unavailable",
                f"router.upstreams.{name} at {upstream.settings.base_url} does not answer: "
                f"{type(error).__name__}: {error}",
                retry_after_s=1.0,
            ) from error
        finally:
            usage.num_tokens += meter.num_tokens

    async def _hand_back(
        self,
        exchange: Exchange,
        name: str,
        settings: UpstreamSettings,
        answer: aiohttp.ClientResponse,
        meter: _Meter,
    ) -> None:
        if 300 <= answer.status < 400:
            raise Refusal(
                400,
                "upstream_redirects",
                f"router.upstreams.{name} at {settings.base_url} answers with a redirect, which is "
                "not followed; set its base_url to where it leads",
            )
        max_bytes = int(settings.max_answer_mb * 2**20)
        headers = [
            (header.encode(), answer.headers[header].encode())
            for header in _ANSWERED_HEADERS
            if header in answer.headers
        ]
        is_stream = answer.content_type.startswith("text/event-stream")
        if is_stream:
            await exchange.start(answer.status, headers)
        pieces: list[bytes] = []
        async for piece in answer.content.iter_any():
            meter.add(piece)
            if meter.num_bytes > max_bytes:
                raise Refusal(
                    400,
                    "upstream_answer_too_large",
                    f"the answer of router.upstreams.{name} has more than "
                    f"max_answer_mb={settings.max_answer_mb:g}",
                )
            if is_stream:
                await exchange.send(piece, more=True)
            else:
                pieces.append(piece)
        if not is_stream:
            # Whole or not at all: half an answer would be taken for one.
            await exchange.start(answer.status, headers)
        await exchange.send(b"".join(pieces), more=False)


class _Meter:
    """What an answer costs, as far as it says: its `usage`, or a token for each four bytes."""

    def __init__(self, num_request_bytes: int) -> None:
        self.num_bytes = 0
        self._num_request_bytes = num_request_bytes
        self._tail = b""
        self._num_reported = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of request and answer."""
        if self._num_reported:
            return self._num_reported
        return (self._num_request_bytes + self.num_bytes) // _BYTES_PER_TOKEN

    def add(self, piece: bytes) -> None:
        """A piece of the answer; the usage of tokens may stand across two."""
        self.num_bytes += len(piece)
        text = self._tail + piece
        counts = {name: int(number) for name, number in _TOKENS.findall(text)}
        reported = counts.get(b"total", 0) or (
            max(counts.get(b"prompt", 0), counts.get(b"input", 0))
            + max(counts.get(b"completion", 0), counts.get(b"output", 0))
        )
        self._num_reported = max(self._num_reported, reported)
        self._tail = text[-_TAIL_BYTES:]


def _check_budget(
    name: str, settings: UpstreamSettings, usage: UpstreamUsage, episode: LiveEpisode
) -> None:
    for spent, limit, what in (
        (usage.num_requests, settings.max_requests_per_episode, "requests"),
        (usage.num_tokens, settings.max_tokens_per_episode, "tokens"),
    ):
        if spent >= limit:
            raise Refusal(
                404,
                "upstream_budget_spent",
                f"episode {episode.episode_id} has used {spent} {what} of router.upstreams.{name} "
                f"(max_{what}_per_episode={limit}); do without, or raise the limit",
                param="model",
            )


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
