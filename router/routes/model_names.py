"""Which model a name stands for.

Owns: the table of names (rule 6). Does not own: generating, proxying. Invariant: a name that is not
in the table is refused; nothing but the policy is ever recorded for training.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection
from typing import NoReturn

from outloop.buffer.errors import DeadlineExceeded
from outloop.router.episodes.episode import LiveEpisode
from outloop.router.errors import Refusal
from outloop.router.servers.pool import ServerPool, version_away

_VERSION_MARK = "@"
_FROZEN = "frozen"
"""In place of a version: one of those that servers keep through publishes."""


class ModelTable:
    """The policy, the policy at one version, and upstreams."""

    def __init__(
        self,
        policy: str,
        pool: ServerPool,
        upstreams: Collection[str] = (),
        *,
        is_kept: Callable[[int], bool] | None = None,
        timeout_s: float = 0.0,
    ) -> None:
        """Args:
        is_kept: whether a version is one of those that servers keep through publishes; None:
            there are no such servers.
        timeout_s: how long a request waits for the first of them, or while one changes its version.
        """
        self._policy = policy
        self._pool = pool
        self._upstreams = tuple(upstreams)
        self._frozen = f"{policy}{_VERSION_MARK}{_FROZEN}" if is_kept is not None else ""
        self._is_kept = is_kept or (lambda version: False)
        self._timeout_s = timeout_s

    def is_any_frozen(self, name: str) -> bool:
        """Whether it asks for one of the versions that servers keep, whichever."""
        return bool(self._frozen) and name == self._frozen

    async def frozen_version(self, episode: LiveEpisode) -> int:
        """One of the versions that servers keep: the same for all attempts of a task, and for all
        turns of an episode while it is held.

        Raises:
            Refusal: 503, no server holds one in time.
        """
        pool = self._pool
        if episode.frozen_version not in pool.frozen_versions:
            try:
                await pool.wait_until(
                    lambda: bool(pool.frozen_versions),
                    timeout_s=self._timeout_s,
                    who="router",
                    phase=f"choose a version for model={self._frozen!r}",
                )
            except DeadlineExceeded as error:
                raise Refusal(503, "not_ready", str(error), retry_after_s=1.0) from error
            task_id = episode.affinity.task_id
            # The choice of a task stays the same where other versions come or go.
            episode.frozen_version = max(
                pool.frozen_versions,
                key=lambda version: zlib.crc32(f"{version} {task_id}".encode()),
            )
        assert episode.frozen_version is not None
        return episode.frozen_version

    def version_of_evaluation(self, episode: LiveEpisode) -> int | None:
        """Return the version that an episode evaluates, while a server keeps it through publishes.

        None: no server does, or the episode evaluates nothing.
        """
        opening = episode.opening
        if opening is None or opening.purpose != "eval":
            return None
        asked = opening.eval_name.partition(":")[0]
        is_held = asked.isdecimal() and int(asked) in self._pool.versions
        return int(asked) if is_held and self._is_kept(int(asked)) else None

    def version_of(self, name: str) -> int | None:
        """The version that `name` asks for; None for whichever the run is at.

        Raises:
            Refusal: 404, it is no name of the policy, or no server holds that version; 503, a
                server that keeps such versions loads it, or left it for a newer one.
        """
        if name == self._policy:
            return None
        policy, mark, version = name.rpartition(_VERSION_MARK)
        if policy != self._policy or not mark or not version.isdecimal():
            self._refuse(name, "is not served")
        number = int(version)
        if number not in self._pool.versions:
            state = self._pool.state
            newest = state.announced_version if state is not None else None
            if newest is not None and number <= newest and self._is_kept(number):
                raise version_away(number)
            self._refuse(name, "is held by no server")
        return number

    def check(self, name: str) -> None:
        """Refuse a name that a request could not ask for.

        Raises:
            Refusal: 404 or 503.
        """
        if name not in self._upstreams and not self.is_any_frozen(name):
            self.version_of(name)

    def names(self) -> list[str]:
        """Every name that lasts; versions come and go."""
        return [self._policy, *([self._frozen] if self._frozen else []), *self._upstreams]

    def _refuse(self, name: str, why: str) -> NoReturn:
        versions = [f"{self._policy}{_VERSION_MARK}{v}" for v in sorted(self._pool.versions)]
        served = ", ".join(repr(one) for one in (*self.names(), *versions))
        raise Refusal(
            404, "model_not_found", f"model={name!r} {why}; served: {served}", param="model"
        )
