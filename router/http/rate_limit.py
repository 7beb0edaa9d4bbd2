"""How many requests a second one key may make of this process.

A bucket for each key: it holds a second's worth of requests, fills steadily, and each request takes
one. A request that finds it empty is told when to come again. Keys that were idle for a second are
forgotten, since their buckets are full.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from outloop.router.errors import Refusal

_SWEEP = 4096
"""Buckets after which full ones are looked for."""


class RateLimit:
    """Of all keys; `rate` in requests per second."""

    def __init__(self, rate: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._size = max(1.0, rate)
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}
        """Key -> requests left, and when that was so."""
        self._sweep_at = _SWEEP

    @property
    def num_keys(self) -> int:
        """That are remembered."""
        return len(self._buckets)

    def take(self, key: str) -> None:
        """Count a request.

        Raises:
            Refusal: 503, the key has made too many.
        """
        now = self._clock()
        left, at = self._buckets.get(key, (self._size, now))
        left = min(self._size, left + (now - at) * self._rate)
        if left < 1.0:
            raise Refusal(
                503,
                "rate_limited",
                f"this key makes more than router.max_requests_per_s={self._rate:g} requests a "
                "second; wait, or raise the setting",
                retry_after_s=(1.0 - left) / self._rate,
            )
        self._buckets[key] = left - 1.0, now
        if len(self._buckets) >= self._sweep_at:
            self._forget_idle(now)

    def _forget_idle(self, now: float) -> None:
        full_after_s = self._size / self._rate
        self._buckets = {
            key: (left, at) for key, (left, at) in self._buckets.items() if now - at < full_after_s
        }
        self._sweep_at = max(_SWEEP, 2 * len(self._buckets))
