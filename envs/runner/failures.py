"""Classifies failures, logs each sort once, and stops a run in which everything fails.

A failure that may depend on what the policy did is `agent`. Only a lost connection to the run's own
router, or a 5xx from it, is `infrastructure`. The buffer decides what follows from a kind.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import structlog

from outloop.buffer.errors import EnvironmentFailure, SettingsError
from outloop.buffer.records import FailureKind
from outloop.envs.rollout.episode_result import EpisodeResult

_log = structlog.get_logger()
_NUM_FIRST_EPISODES = 20
_NUM_LAST_EPISODES = 200
_MIN_EPISODES = 32
"""Before the share of failures may stop a run."""
_NUM_RECENT_EPISODES = 32
"""If at least half of them failed, a warning comes; below an eighth all is well again."""
_MIN_FAILURES = 4
"""Before the first warning; the next one comes when there are four times as many, or this many more
since all was well."""
_MAX_CHAIN = 8
_Signature = tuple[str, str, str]
"""Failure kind, type of the exception, place."""
_Failure = tuple[EpisodeResult, str]
"""How an episode ended, and its id."""


def kind_of(error: BaseException, base_url: str) -> FailureKind:
    """The kind of an exception that `play` raised for the episode at `base_url`.

    HTTP errors of any client library are recognised by their attributes (`request`, `response`,
    `status_code`). If the agent gave its request too little time, that is the agent's failure.
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
    """Logs the first failure of each sort in full, counts the others, and stops a hopeless run.

    Args:
        max_failed_share, failure_reward: env's settings of these names.
        run_folder: as the user would write it in a command.
    """

    def __init__(
        self, *, max_failed_share: float, run_folder: str, failure_reward: float = 0.0
    ) -> None:
        self._max_failed_share = max_failed_share
        self._failure_reward = failure_reward
        self._has_warned_of_reward = False
        self._run_folder = run_folder
        self._counts: Counter[_Signature] = Counter()
        self._last: deque[_Failure | None] = deque(maxlen=_NUM_LAST_EPISODES)
        """None for each that did not fail."""
        self._playing: dict[str, int] = {}
        """How many episodes had ended when one started, by its id."""
        self._num_closed = 0
        self._num_failed = 0
        self._num_before_calls = 0
        self._warn_at = _MIN_FAILURES

    def start(self, episode_id: str) -> None:
        """An episode starts; `success` or `failure` follows when it has ended."""
        self._playing[episode_id] = self._num_closed

    def success(self, ending: EpisodeResult, episode_id: str) -> str:
        """An episode ended as it should; returns a sentence for the user when failing pays."""
        self._playing.pop(episode_id, None)
        self._num_closed += 1
        self._last.append(None)
        if (
            ending.reward is None
            or ending.reward.value >= self._failure_reward
            or self._has_warned_of_reward
        ):
            return ""
        self._has_warned_of_reward = True
        return (
            f"an episode was scored {ending.reward.value:g}, below env.failure_reward="
            f"{self._failure_reward:g}, which episodes that crash or run out of time get: the "
            "policy learns to fail. Set env.failure_reward to the lowest reward that you give"
        )

    def failure(self, ending: EpisodeResult, episode_id: str) -> str:
        """An episode failed; returns a sentence for the user when it is time for one, else "".

        Raises:
            SettingsError: nothing can be learned from what this runner plays: the first episodes
                failed in the same way for the environment's reasons, or more than
                env.max_failed_share of the last ones failed by their agent with equal rewards.
                An episode that has played on since the first of these ended counts as one that
                does not fail, because a crash ends sooner than an episode that works.
        """
        self._playing.pop(episode_id, None)
        self._num_closed += 1
        self._num_failed += 1
        self._num_before_calls += ending.is_before_calls
        self._last.append((ending, episode_id))
        signature = _signature_of(ending)
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
        self._refuse_broken_environment(ending, self._counts[signature])
        self._refuse_equal_failures()
        recent = list(self._last)[-_NUM_RECENT_EPISODES:]
        failed = [one for one in recent if one is not None]
        if 8 * len(failed) < len(recent):
            self._warn_at = self._num_failed + _MIN_FAILURES
        if self._num_failed < self._warn_at or 2 * len(failed) < len(recent):
            return ""
        self._warn_at = 4 * self._num_failed
        which = "first" if len(recent) == self._num_closed else "last"
        sentence = f"{len(failed)} of the {which} {len(recent)} episodes failed"
        return f"{sentence}. {self._commonest(failed)}"

    def _commonest(self, failed: Sequence[_Failure]) -> str:
        """What failed most often, the last example, and how to look at the others."""
        counts = Counter(_signature_of(ending) for ending, _ in failed)
        signature, count = counts.most_common(1)[0]
        ending, episode_id = next(
            one for one in reversed(failed) if _signature_of(one[0]) == signature
        )
        return (
            f"Most often ({count} times): {' '.join(ending.error.split())}, for example episode "
            f"{episode_id}. `outloop episodes --run {self._run_folder} --failed` shows them"
        )

    def _refuse_broken_environment(self, ending: EpisodeResult, count: int) -> None:
        num_unscored = self.counts().get("num_failed_environment", 0)
        if num_unscored == self._num_closed == _NUM_FIRST_EPISODES:
            which = "the same failure" if count == num_unscored else "a failure"
            whose = "of the agent" if ending.is_before_calls else "of the environment"
            raise SettingsError(
                f"each of the first {self._num_closed} episodes ended with {which} {whose}: "
                f"{ending.error}; none of them can be scored. Correct what raised it, and start "
                "again"
            )

    def _refuse_equal_failures(self) -> None:
        failed = [one for one in self._last if one and one[0].failure_kind == "agent"]
        num_last = len(self._last)
        first_ended = self._num_closed - num_last
        num_longer = sum(num_ended <= first_ended for num_ended in self._playing.values())
        most = self._max_failed_share * (num_last + num_longer)
        if num_last < _MIN_EPISODES or len(failed) <= most:
            return
        if len({ending.reward.value for ending, _ in failed if ending.reward is not None}) > 1:
            return
        raise SettingsError(
            f"{len(failed)} of the last {num_last} episodes failed and all of them got the same "
            f"reward, so nothing can be learned. {self._commonest(failed)}. Correct the agent, or "
            f"raise env.max_failed_share={self._max_failed_share:g} (1: never stop)"
        )

    def counts(self) -> dict[str, int]:
        """How many episodes ended, and how many failures of each kind were among them."""
        found = {"num_closed": self._num_closed}
        if self._num_before_calls:
            found["num_failed_before_calls"] = self._num_before_calls
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


def _signature_of(ending: EpisodeResult) -> _Signature:
    return ending.failure_kind or "", ending.error_type, ending.place


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
