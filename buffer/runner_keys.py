"""Keys of one run that come and go while it is up.

The run's own runner key is in its folder. Here are further ones, each with a name, of which Redis
holds a digest only, and the names of keys that were revoked; and the digest of an admin key that
replaced the one with which the routers started. Routers read them every few seconds.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import redis

from outloop.buffer.errors import Conflict, NotFound, SettingsError
from outloop.buffer.redis.client import translated

OWN_KEY = "run"
"""The name of the run's own runner key."""
_HASH = "runner_keys"
_ADMIN = ":admin"
"""The field of the admin key; no name of a runner key."""
_REVOKED = b""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKeys:
    """What routers compare keys with."""

    by_digest: Mapping[bytes, str] = field(default_factory=lambda: MappingProxyType({}))
    """SHA-256 of a key -> its name."""
    is_own_revoked: bool = False
    admin_digest: bytes | None = None
    """SHA-256 of the admin key; None: it was not replaced."""


def decode_keys(answer: Mapping[bytes, bytes]) -> KnownKeys:
    """The bytes of the hash as records."""
    runners = dict(answer)
    admin_digest = runners.pop(_ADMIN.encode(), None)
    return KnownKeys(
        by_digest=MappingProxyType(
            {digest: name.decode() for name, digest in runners.items() if digest != _REVOKED}
        ),
        is_own_revoked=answer.get(OWN_KEY.encode()) == _REVOKED,
        admin_digest=admin_digest,
    )


def digest_of(key: str) -> bytes:
    """SHA-256, in bytes: keys have 192 random bits, so it needs no salt."""
    return hashlib.sha256(key.encode()).digest()


class RunnerKeys:
    """The keys of one run, through a blocking client."""

    def __init__(self, client: redis.Redis, prefix: str) -> None:
        self._client = client
        self._key = prefix + _HASH

    def add(self, name: str) -> str:
        """Make a key; it is nowhere but in what is returned.

        Raises:
            SettingsError: no such name is allowed.
            Conflict: there is, or was, a key of that name.
        """
        if not _NAME.fullmatch(name) or name == OWN_KEY:
            raise SettingsError(
                f"name={name!r}; 1 to 64 letters, digits, `.`, `_` and `-` are allowed, and not "
                f"{OWN_KEY!r}, the run's own"
            )
        key = f"ol-runner-{secrets.token_urlsafe(24)}"
        with translated(f"adding the runner key name={name}"):
            is_new = self._client.hsetnx(self._key, name, digest_of(key))
        if not is_new:
            raise Conflict(f"there is, or was, a runner key name={name!r}; choose another name")
        return key

    def revoke(self, name: str) -> None:
        """No router takes that key any more, within seconds; it cannot be undone. OWN_KEY: the
        run's own.

        Raises:
            NotFound: there is no such key.
        """
        with translated(f"revoking the runner key name={name}"):
            if name != OWN_KEY and not self._client.hexists(self._key, name):
                raise NotFound(f"there is no runner key name={name!r}; see `outloop keys list`")
            self._client.hset(self._key, name, _REVOKED)

    def set_admin(self, key: str) -> None:
        """Have every router take this admin key, within seconds, and no other."""
        with translated("replacing the admin key"):
            self._client.hset(self._key, _ADMIN, digest_of(key))

    def names(self) -> dict[str, bool]:
        """Name -> whether it is taken, the run's own first."""
        with translated("reading the runner keys"):
            answer: Any = self._client.hgetall(self._key)
        states = {name.decode(): digest != _REVOKED for name, digest in answer.items()}
        states.pop(_ADMIN, None)
        return {OWN_KEY: states.pop(OWN_KEY, True), **dict(sorted(states.items()))}
