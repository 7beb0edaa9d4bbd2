"""What a rollout function is given to play with.

Owns: the episode's address and key, and the shared client. Does not own: the episode's record
(buffer), opening and closing it (runner). Invariant: every episode's client shares one connection
pool, since a client per episode costs ten times a call; `openai` is loaded only when asked for.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from outloop.buffer.errors import SettingsError
from outloop.buffer.records import Purpose, Task

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_MAX_RETRIES = 5


class SharedClient:
    """The connection pool behind every episode's `client`.

    Guarantees that at least `max_connections` calls can be in flight: the pool's default of 1,000
    fails under more episodes than that.
    """

    def __init__(self, *, max_connections: int, timeout_s: float) -> None:
        self._max_connections = max_connections
        self._timeout_s = timeout_s
        self._client: AsyncOpenAI | None = None

    def for_episode(self, base_url: str, api_key: str) -> AsyncOpenAI:
        """The shared client with one episode's address and key."""
        return self._shared().with_options(base_url=base_url, api_key=api_key)

    async def close(self) -> None:
        """Close the pool, if it was ever opened."""
        if self._client is not None:
            await self._client.close()

    def _shared(self) -> AsyncOpenAI:
        if self._client is None:
            try:
                import openai
            except ImportError as error:
                raise SettingsError(
                    "episode.client needs the package openai, which is not installed; "
                    "install outloop[envs], or use episode.base_url and episode.api_key"
                ) from error
            # Which HTTP library the limits belong to depends on openai's version.
            limits = type(openai.DEFAULT_CONNECTION_LIMITS)(
                max_connections=self._max_connections,
                max_keepalive_connections=self._max_connections,
                keepalive_expiry=30.0,
            )
            self._client = openai.AsyncOpenAI(
                base_url="http://episode.invalid/v1",
                api_key="episode",
                max_retries=_MAX_RETRIES,
                timeout=self._timeout_s,
                http_client=openai.DefaultAsyncHttpxClient(
                    limits=limits, timeout=self._timeout_s, trust_env=False
                ),
            )
        return self._client


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One open attempt at a task."""

    episode_id: str
    task: Task
    purpose: Purpose
    base_url: str
    """For any OpenAI client; the same as OPENAI_BASE_URL."""
    api_key: str
    """Opens this episode and nothing else, until it closes; the same as OPENAI_API_KEY."""
    deadline: float
    """Unix seconds; `play` is cancelled then and the episode counts as truncated."""
    metadata: dict[str, str] = field(default_factory=dict)
    shared_client: SharedClient = field(repr=False)

    @cached_property
    def client(self) -> AsyncOpenAI:
        """An `openai.AsyncOpenAI` for this episode; closing it is not needed."""
        return self.shared_client.for_episode(self.base_url, self.api_key)

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline; 0 when it has passed."""
        return max(0.0, self.deadline - time.time())

    def environ(self) -> dict[str, str]:
        """Environment variables for an agent that is a program."""
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key}
