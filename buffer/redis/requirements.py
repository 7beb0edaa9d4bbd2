"""What a run needs of its Redis, looked at before anything is written there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import redis

from outloop.buffer.errors import SettingsError
from outloop.buffer.redis.client import translated

_OLDEST = (6, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class RedisServer:
    """What a server says of itself."""

    version: str
    eviction_policy: str
    keeps_log: bool
    """True if what it acknowledged is in an append-only file."""

    def check(self) -> None:
        """Refuse a server that cannot hold a run.

        Raises:
            SettingsError: it is too old, or would throw records away.
        """
        if tuple(int(part) for part in self.version.split(".")[:2]) < _OLDEST:
            raise SettingsError(f"buffer.redis_url: Redis {self.version}; 6.2 or newer is needed")
        if self.eviction_policy != "noeviction":
            raise SettingsError(
                f"buffer.redis_url: maxmemory-policy={self.eviction_policy} would throw records "
                "away when the server is full; set maxmemory-policy to noeviction"
            )


def read_server(client: redis.Redis) -> RedisServer | None:
    """What the server says of itself; None if our user may not ask.

    Raises:
        BufferUnavailable: it does not answer.
    """
    with translated("reading what buffer.redis_url is"):
        try:
            info: Any = client.info()
        except redis.exceptions.NoPermissionError:
            return None
    return RedisServer(
        version=str(info["redis_version"]),
        eviction_policy=str(info.get("maxmemory_policy", "noeviction")),
        keeps_log=bool(int(info.get("aof_enabled", 1))),
    )
