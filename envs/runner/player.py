"""Plays episodes with the user's function, in the runner or in a worker process.

It keeps deadlines, runs blocking functions in threads, and turns outcomes into results. Every job
gets exactly one result.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import structlog

from outloop.buffer.errors import RecordError, SettingsError
from outloop.buffer.records import Outcome, Task
from outloop.buffer.settings.env import EnvSettings
from outloop.buffer.user_code import text_of
from outloop.envs.rollout.clients import Clients
from outloop.envs.rollout.episode import Episode
from outloop.envs.rollout.episode_result import EpisodeResult, failed, without_reward
from outloop.envs.rollout.episode_rewards import Scores
from outloop.envs.rollout.rollout_function import Rollout
from outloop.envs.runner.crash_attribution import Marker, episode_number
from outloop.envs.runner.failures import kind_of
from outloop.envs.runner.worker_protocol import Job
from outloop.envs.user_code import awaited, contained

_CANCEL_S = 2.0
_log = structlog.get_logger()


class Player:
    """Plays the episodes of one process.

    Args:
        marker: where running episodes are marked; None: they are not.
        on_stuck: called with the number of threads in blocking calls past their deadline.
    """

    def __init__(
        self,
        rollout: Rollout,
        env: EnvSettings,
        *,
        max_episodes: int,
        marker: Marker | None = None,
        on_stuck: Callable[[int], None] = lambda num_stuck: None,
    ) -> None:
        self.rollout = rollout
        self.env = env
        self.max_episodes = max_episodes
        if rollout.kind == "blocking":
            self.max_episodes = min(max_episodes, env.max_blocking_episodes)
        self._clients = Clients(
            max_connections=2 * max_episodes + 16, timeout_s=env.episode_deadline_s
        )
        self._threads = _Threads(self.max_episodes, marker)
        self._num_stuck = 0
        self._on_stuck = on_stuck

    async def close(self) -> None:
        """Close the clients; threads that hang live until the process ends."""
        self._threads.close()
        await self._clients.close()

    def open(self, job: Job) -> Episode:
        """The episode of a job."""
        claim = job.opened.claim
        return Episode(
            episode_id=job.opened.episode_id,
            task=claim.task,
            purpose=claim.purpose,
            base_url=job.opened.base_url,
            api_key=job.opened.api_key,
            deadline=job.deadline,
            metadata={
                "group_id": claim.group_id or "",
                "attempt": str(claim.attempt),
                "eval_name": claim.eval_name,
            },
            clients=self._clients,
            scores=Scores(
                takes_turns=self.env.turn_scores != "refuse", weights=self.env.reward_weights
            ),
        )

    async def play(self, job: Job) -> EpisodeResult:
        """Play one episode to its end or its deadline."""
        try:
            return await self.play_by(self.rollout.call, self.open(job), job.number)
        except Exception as error:  # noqa: BLE001 - each job has a result, whatever fails here
            return failed(error, "environment")

    async def play_by(
        self, function: Callable[..., Any], episode: Episode, number: int
    ) -> EpisodeResult:
        """Play `episode` with `function(task, episode)`, a coroutine function or a blocking one."""
        episode_number.set(number)
        limit_s = max(0.0, episode.deadline - time.time())
        # A copy, so that changes to the payload stay in this episode.
        task = replace(episode.task, payload=dict(episode.task.payload))
        playing = self._start(function, task, episode, number)
        if not await self.ends_within(limit_s, playing, "play", episode.episode_id):
            return self.ending_of(late("play", limit_s), episode, outcome="truncated")
        error = error_of(playing, "play")
        if error is not None:
            return self.ending_of(error, episode)
        return self.scored(playing.result(), episode)

    async def ends_within(
        self, limit_s: float, playing: asyncio.Future[Any], name: str, episode_id: str = ""
    ) -> bool:
        """Wait for a call of the user's function `name`; it is given up after `limit_s`.

        The call is cancelled then. If it ignores that, it continues in the background.
        """
        try:
            await asyncio.wait({playing}, timeout=limit_s)
        finally:
            is_done = playing.done()
            if not is_done:
                await self._give_up(playing, name, episode_id)
        return is_done

    def scored(self, returned: Any, episode: Episode) -> EpisodeResult:
        """The result of an episode from what `play` returned; an EpisodeResult stays as it is."""
        if isinstance(returned, EpisodeResult):
            return returned
        try:
            reward = episode.scores.reward(returned, "play")
        except RecordError as error:
            return without_reward(error)
        except Exception as error:  # noqa: BLE001 - the user's object may raise anything when read
            unreadable = RecordError(
                f"play returned a {type(returned).__name__} that cannot be read as a reward: "
                f"{type(error).__name__}: {text_of(error)}; return a float"
            )
            return without_reward(unreadable)
        return EpisodeResult(outcome="completed", reward=reward)

    def ending_of(
        self, error: BaseException, episode: Episode, outcome: Outcome = "failed"
    ) -> EpisodeResult:
        """The result of an episode that `error` ended."""
        if isinstance(error, RecordError):
            return without_reward(error)
        if isinstance(error, SettingsError):
            return replace(failed(error, "environment"), is_refused=True)
        kind = "agent" if outcome == "truncated" else kind_of(error, episode.base_url)
        value = self.env.failure_reward
        reward = episode.scores.of_failed(value) if kind == "agent" else None
        return failed(error, kind, reward=reward, outcome=outcome)

    def _start(
        self, function: Callable[..., Any], task: Task, episode: Episode, number: int
    ) -> asyncio.Future[Any]:
        if self.rollout.kind != "blocking":
            return asyncio.ensure_future(awaited(function(task, episode)))
        return self._threads.start(function, task, episode, number)

    async def _give_up(self, playing: asyncio.Future[Any], name: str, episode_id: str) -> None:
        if self.rollout.kind == "blocking":
            self._num_stuck += 1
            playing.add_done_callback(self._came_back)
            self._on_stuck(self._num_stuck)
            return
        playing.cancel()
        await asyncio.wait({playing}, timeout=_CANCEL_S)
        if not playing.done():
            _log.warning(
                f"{name}_ignores_cancellation",
                episode_id=episode_id,
                note="it continues in the background; let asyncio.CancelledError pass through "
                f"{name}",
            )
        playing.add_done_callback(_retrieve)

    def _came_back(self, playing: asyncio.Future[Any]) -> None:
        self._num_stuck -= 1
        self._on_stuck(self._num_stuck)
        _retrieve(playing)


class _Threads:
    """Threads for functions that block, each with a cell of the marker."""

    def __init__(self, num_threads: int, marker: Marker | None) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="play")
        self._marker = marker
        self._cells: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in range(num_threads):
            self._cells.put(index)

    def start(
        self, function: Callable[..., Any], task: Task, episode: Episode, number: int
    ) -> asyncio.Future[Any]:
        context = contextvars.copy_context()
        call = self._pool.submit(context.run, self._run, function, task, episode, number)
        return asyncio.ensure_future(self._outcome(call))

    async def _outcome(self, call: Future[tuple[Any, Exception | None]]) -> Any:
        returned, error = await asyncio.wrap_future(call)
        if error is not None:
            raise error
        return returned

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(
        self, function: Callable[..., Any], task: Task, episode: Episode, number: int
    ) -> tuple[Any, Exception | None]:
        """What the function returned, or raised: a future would replace a TimeoutError by its own,
        and refuse StopIteration."""
        cell = self._cells.get()
        if self._marker is not None:
            self._marker.in_thread(cell, number)
        try:
            return function(task, episode), None
        except BaseException as error:  # noqa: BLE001 - the user's function may raise anything
            return None, contained(error)
        finally:
            if self._marker is not None:
                self._marker.in_thread(cell, 0)
            self._cells.put(cell)


def late(name: str, limit_s: float) -> TimeoutError:
    """The error of a call of the user's function `name` that took longer than `limit_s`."""
    return TimeoutError(
        f"{name} took longer than {limit_s:.1f} s; finish earlier, or raise env.episode_deadline_s"
    )


def error_of(playing: asyncio.Future[Any], name: str) -> BaseException | None:
    """The error that ended a call of the user's function `name`; None if it returned."""
    if playing.cancelled():
        return RuntimeError(f"{name} was cancelled from inside")
    return playing.exception()


def _retrieve(playing: asyncio.Future[Any]) -> None:
    """Look at the error of a call that was given up, so that asyncio does not report it."""
    if not playing.cancelled():
        playing.exception()
