"""Whose failure it was, and how it is written down.

Owns: telling the kinds of failure apart, and logging each once. Does not own: what a kind leads to
(buffer), closing episodes (runner). Invariant: a failure that may depend on what the policy did is
`agent`; only a lost connection to the run's own router or its 5xx is `infrastructure`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import structlog

from outloop.buffer.errors import EnvironmentFailure, SettingsError
from outloop.buffer.records import FailureKind
from outloop.envs.rollout.episode_result import Ending

_log = structlog.get_logger()
_NUM_FIRST_EPISODES = 20
_MAX_CHAIN = 8


def kind_of(error: BaseException, base_url: str) -> FailureKind:
    """The kind of an exception that came out of `play`, whose episode lives at `base_url`.

    HTTP errors are told by their attributes (`request`, `response`, `status_code`), so any client
    library counts. A request that the agent itself gave too little time is the agent's failure.
    """
    for link in _chain(error):
        if isinstance(link, EnvironmentFailure):
            return "environment"
        if _is_ours(link, base_url) and "Timeout" not in type(link).__name__:
            status = _status(link)
            if status is None or status >= 500:
                return "infrastructure"
    return "agent"


class FailureLog:
    """Logs a failure in full when its like is first seen, and counts the rest."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._num_closed = 0
        self._warned = False

    def success(self) -> None:
        """An episode ended as it should."""
        self._num_closed += 1

    def failure(self, ending: Ending, episode_id: str) -> None:
        """An episode failed; says so once per kind, exception type and place.

        Raises:
            SettingsError: every episode so far failed in the same way, for the environment's
                reasons: what raises is broken, whatever the policy does.
        """
        self._num_closed += 1
        signature = (ending.failure_kind or "", ending.error_type, ending.place)
        self._counts[signature] += 1
        if self._counts[signature] == 1:
            _log.warning(
                "episode_failed",
                failure_kind=ending.failure_kind,
                episode_id=episode_id,
                error=ending.error,
                **({"exception": ending.trace} if ending.trace else {}),
                note="the next failures of this kind are only counted",
            )
        if not self._warned and self._counts[signature] == self._num_closed == _NUM_FIRST_EPISODES:
            self._warned = True
            _log.error(
                "every_episode_fails",
                num_episodes=self._num_closed,
                failure_kind=ending.failure_kind,
                error=ending.error,
                place=ending.place,
                note="all episodes so far ended the same way; nothing can be learned from that",
            )
            if ending.failure_kind == "environment":
                raise SettingsError(
                    f"each of the first {self._num_closed} episodes ended with the same failure of "
                    f"the environment: {ending.error}; none of them can be scored. Mend what "
                    "raised it, and start again"
                )

    def counts(self) -> dict[str, int]:
        """How many episodes ended, and how many failures of each kind were among them."""
        found = {"num_closed": self._num_closed}
        for (kind, _, _), count in self._counts.items():
            found[f"num_failed_{kind}"] = found.get(f"num_failed_{kind}", 0) + count
        return found

    def summary(self) -> None:
        """Log how many episodes were played, and how often each failure was seen."""
        _log.info("episodes_played", num_closed=self._num_closed)
        for (kind, name, place), count in self._counts.most_common():
            _log.info(
                "episodes_failed",
                failure_kind=kind,
                error=name,
                place=place,
                num_failed=count,
                num_closed=self._num_closed,
            )


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    for _ in range(_MAX_CHAIN):
        if link is None:
            return
        yield link
        if isinstance(link, BaseExceptionGroup):
            yield from link.exceptions
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _is_ours(error: BaseException, base_url: str) -> bool:
    holder: Any = getattr(error, "response", None) or error
    try:
        url = str(holder.request.url)
    except (AttributeError, RuntimeError):
        return False
    return urlsplit(url).netloc == urlsplit(base_url).netloc


def _status(error: BaseException) -> int | None:
    status = getattr(error, "status_code", None)
    if status is None:
        status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None
