"""Claims tasks, plays them at the same time, scores and closes their episodes.

Owns: how many episodes are played, their deadlines, turning what `play` did into an outcome. Does
not own: which task comes next, groups, admission (buffer), what a reward means (verifier).
Invariant: every claimed episode is closed exactly once, or the run's deadline closes it; an
infrastructure failure never becomes a reward.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import structlog

from outloop.buffer.errors import Gone, NotFound, OutloopError, RecordError, SettingsError
from outloop.buffer.records import FailureKind, Outcome, Reward
from outloop.buffer.settings import Settings
from outloop.envs.conversations import submit_conversations
from outloop.envs.episode import Episode, SharedClient
from outloop.envs.failures import FailureLog, kind_of
from outloop.envs.loading import RolloutFunction, load_rollout
from outloop.envs.router_client import OpenedClaim, RouterClient
from outloop.envs.tasks import load_run_tasks

T = TypeVar("T")
_log = structlog.get_logger()

_DRAIN_S = 5.0
_CANCEL_S = 2.0
_GATHER_S = 0.01
"""Slots that become free within it are claimed together."""
_MIN_POLL_S = 0.02
_MAX_POLL_S = 5.0
_MAX_BAD_REWARDS = 8
"""In a row: then the verifier is broken and playing on is a waste."""
_MAX_BACKOFF_S = 2.0
_MAX_ERROR_CHARS = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ending:
    """How an episode ended."""

    outcome: Outcome
    failure_kind: FailureKind | None = None
    reward: Reward | None = None
    error: str = ""


async def run(settings: Settings, *, router_url: str, runner_key: str, stop: asyncio.Event) -> None:
    """Play until the run is finished or `stop` is set; with trainer.mode "sft", send conversations.

    Raises:
        SettingsError: the rollout function or the tasks are wrong, the key is refused, or the
            rollout function keeps returning something that is no reward.
        DeadlineExceeded: the router did not answer.
    """
    deadline_s = max(60.0, settings.server.start_timeout_s)
    async with RouterClient(router_url, runner_key, deadline_s=deadline_s) as router:
        if settings.trainer.mode == "sft":
            await _until_stopped(submit_conversations(settings, router), stop)
            return
        play = load_rollout(settings)
        tasks, eval_tasks = load_run_tasks(settings)
        await _until_stopped(router.register_tasks(tasks, eval_tasks), stop)
        if not stop.is_set():
            await Runner(settings, router, play, stop).play_all()


class Runner:
    """Plays up to env.max_concurrent_episodes episodes at once."""

    def __init__(
        self, settings: Settings, router: RouterClient, play: RolloutFunction, stop: asyncio.Event
    ) -> None:
        self._settings = settings
        self._router = router
        self._play_function = play
        self._stop = stop
        self._playing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._fatal: BaseException | None = None
        self._failures = FailureLog()
        self._num_bad_rewards = 0
        self._backoff_s = 0.0
        self._clients = SharedClient(
            max_connections=2 * settings.env.max_concurrent_episodes + 16,
            timeout_s=settings.env.episode_deadline_s,
        )

    async def play_all(self) -> None:
        """Claim and play until finished or stopped; then let the last episodes end."""
        try:
            await self._claim_until_finished()
            await self._drain()
        finally:
            for task in self._playing:
                task.cancel()
            await asyncio.gather(*self._playing, return_exceptions=True)
            await self._clients.close()
            self._failures.summary()
        if self._fatal is not None:
            raise self._fatal

    async def _claim_until_finished(self) -> None:
        limit = self._settings.env.max_concurrent_episodes
        reason = ""
        while not self._stop.is_set() and self._fatal is None:
            self._changed.clear()
            free = limit - len(self._playing)
            if free == 0:
                await self._wait_for_slots()
                continue
            call = self._router.claim(key=uuid.uuid4().hex, count=free)
            claimed = await _until_stopped(call, self._stop)
            if claimed is None:
                return
            for opened in claimed.claims:
                self._start(opened)
            if claimed.claims:
                reason = ""
                continue
            if claimed.reason == "finished":
                return
            if claimed.reason != reason:
                reason = claimed.reason
                _log.debug("nothing_to_play", reason=reason)
            # An ended episode alone seldom admits more; the router knows when to ask again.
            wait_s = max(claimed.retry_after_s, self._backoff_s, _MIN_POLL_S)
            await _first(min(wait_s, _MAX_POLL_S), self._stop)

    async def _wait_for_slots(self) -> None:
        """Until an episode ends, and those that end right after it; longer after failures."""
        await _first(_MAX_POLL_S, self._changed, self._stop)
        await _first(max(_GATHER_S, self._backoff_s), self._stop)

    def _start(self, opened: OpenedClaim) -> None:
        task = asyncio.create_task(self._play_and_close(opened), name=opened.episode_id)
        self._playing.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._playing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fatal = self._fatal or error
        self._changed.set()

    async def _drain(self) -> None:
        """Let running episodes end: all of them when finished, for a short time when stopped."""
        if self._stop.is_set() or self._fatal is not None:
            limit_s = _DRAIN_S
        else:
            limit_s = self._settings.env.episode_deadline_s + _CANCEL_S
        deadline = time.monotonic() + limit_s
        while self._playing and (left_s := deadline - time.monotonic()) > 0:
            if self._stop.is_set():
                deadline = min(deadline, time.monotonic() + _DRAIN_S)
            self._changed.clear()
            await _first(min(left_s, 0.5), self._changed)
        if self._playing:
            _log.info("episodes_given_up", num_episodes=len(self._playing))

    async def _play_and_close(self, opened: OpenedClaim) -> None:
        try:
            ending = await self._play(opened)
        except asyncio.CancelledError:
            ending = _Ending(
                outcome="aborted", failure_kind="infrastructure", error="the runner was stopped"
            )
            with suppress(OutloopError, TimeoutError):
                await asyncio.wait_for(self._close(opened, ending), _CANCEL_S)
            raise
        await self._close(opened, ending)
        if self._num_bad_rewards >= _MAX_BAD_REWARDS:
            path = self._settings.env.rollout_function_path
            raise SettingsError(
                f"env.rollout_function_path={path!r} returned no usable reward "
                f"{self._num_bad_rewards} times in a row, the last time: {ending.error}"
            )

    async def _close(self, opened: OpenedClaim, ending: _Ending) -> None:
        try:
            await self._router.close_episode(
                opened.episode_id,
                outcome=ending.outcome,
                failure_kind=ending.failure_kind,
                reward=ending.reward,
                error=ending.error[:_MAX_ERROR_CHARS],
            )
        except (Gone, NotFound) as error:
            _log.debug("closed_too_late", episode_id=opened.episode_id, error=str(error))

    async def _play(self, opened: OpenedClaim) -> _Ending:
        claim = opened.claim
        # The key ends with the deadline; the reward must be in before it does.
        limit_s = claim.deadline_s - min(1.0, 0.05 * claim.deadline_s)
        episode = Episode(
            episode_id=opened.episode_id,
            task=claim.task,
            purpose=claim.purpose,
            base_url=opened.base_url,
            api_key=opened.api_key,
            deadline=time.time() + limit_s,
            shared_client=self._clients,
        )
        # The function gets a copy: what it writes into the payload stays in its episode.
        task = replace(claim.task, payload=dict(claim.task.payload))
        playing = asyncio.ensure_future(self._play_function(task, episode))
        try:
            await asyncio.wait({playing}, timeout=limit_s)
        finally:
            expired = not playing.done()
            if expired:
                await _cancel(playing, opened.episode_id)
        if expired:
            return self._failed(
                TimeoutError(f"play took longer than {limit_s:.1f} s"), opened, outcome="truncated"
            )
        error = _error_of(playing)
        if error is not None:
            return self._failed(error, opened)
        return self._scored(playing.result(), opened)

    def _scored(self, value: Any, opened: OpenedClaim) -> _Ending:
        try:
            reward = _as_reward(value)
        except RecordError as error:
            self._num_bad_rewards += 1
            self._failures.failure("environment", error, opened.episode_id)
            return _Ending(outcome="failed", failure_kind="environment", error=str(error))
        self._num_bad_rewards = 0
        self._backoff_s = 0.0
        self._failures.success()
        return _Ending(outcome="completed", reward=reward)

    def _failed(
        self, error: BaseException, opened: OpenedClaim, outcome: Outcome = "failed"
    ) -> _Ending:
        kind = "agent" if outcome == "truncated" else kind_of(error, opened.base_url)
        self._failures.failure(kind, error, opened.episode_id)
        text = f"{type(error).__name__}: {error}"
        if kind != "agent":
            self._backoff_s = min(_MAX_BACKOFF_S, max(0.05, 2 * self._backoff_s))
            return _Ending(outcome="failed", failure_kind=kind, error=text)
        reward = Reward(value=self._settings.env.failure_reward)
        return _Ending(outcome=outcome, failure_kind=kind, reward=reward, error=text)


def _as_reward(value: Any) -> Reward:
    """What `play` returned, as a reward; scalars of array libraries count as numbers.

    Raises:
        RecordError: with the sentence for whoever wrote the verifier.
    """
    if isinstance(value, Reward):
        return value
    if not isinstance(value, int | float) and getattr(value, "shape", None) == ():
        value = value.item()
    return Reward(value=value)


def _error_of(playing: asyncio.Future[Any]) -> BaseException | None:
    if playing.cancelled():
        return RuntimeError("play was cancelled from inside")
    return playing.exception()


async def _cancel(playing: asyncio.Future[Any], episode_id: str) -> None:
    """Cancel what is still playing; an agent that will not be cancelled is left behind."""
    playing.cancel()
    await asyncio.wait({playing}, timeout=_CANCEL_S)
    if not playing.done():
        _log.warning(
            "play_ignores_cancellation",
            episode_id=episode_id,
            note="it goes on in the background; let asyncio.CancelledError pass through play",
        )
        playing.add_done_callback(_error_of)
    else:
        _error_of(playing)


async def _first(timeout_s: float, *events: asyncio.Event) -> None:
    """Until one of `events` is set, or `timeout_s` has passed."""
    if any(event.is_set() for event in events):
        return
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for waiter in waiting:
            waiter.cancel()


async def _until_stopped(call: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """What `call` returns, or None if `stop` was set first and the call was given up."""
    working = asyncio.ensure_future(call)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})
    return None if working.cancelled() else working.result()
