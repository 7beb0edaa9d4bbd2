"""Which model a name stands for.

Owns: the table of names (rule 6). Does not own: generating, proxying. Invariant: a name that is not
in the table is refused; nothing but the policy is ever recorded for training.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NoReturn

from outloop.router.errors import Refusal
from outloop.router.servers.pool import ServerPool

_VERSION_MARK = "@"


class ModelTable:
    """The policy, the policy at one version, and upstreams."""

    def __init__(self, policy: str, pool: ServerPool, upstreams: Collection[str] = ()) -> None:
        self._policy = policy
        self._pool = pool
        self._upstreams = tuple(upstreams)

    def version_of(self, name: str) -> int | None:
        """The version that `name` asks for; None for whichever the run is at.

        Raises:
            Refusal: 404, it is no name of the policy, or no server holds that version.
        """
        if name == self._policy:
            return None
        policy, mark, version = name.rpartition(_VERSION_MARK)
        if policy != self._policy or not mark or not version.isdecimal():
            self._refuse(name, "is not served")
        if int(version) not in self._pool.versions:
            self._refuse(name, "is held by no server")
        return int(version)

    def check(self, name: str) -> None:
        """Refuse a name that a request could not ask for.

        Raises:
            Refusal: 404.
        """
        if name not in self._upstreams:
            self.version_of(name)

    def names(self) -> list[str]:
        """Every name that lasts; versions come and go."""
        return [self._policy, *self._upstreams]

    def _refuse(self, name: str, why: str) -> NoReturn:
        versions = [f"{self._policy}{_VERSION_MARK}{v}" for v in sorted(self._pool.versions)]
        served = ", ".join(repr(one) for one in (*self.names(), *versions))
        raise Refusal(
            404, "model_not_found", f"model={name!r} {why}; served: {served}", param="model"
        )
