"""Claims tasks, plays their episodes concurrently, and closes them.

Every claimed episode is closed exactly once, or ends at its deadline; an infrastructure failure
never becomes a reward. The buffer decides the order of tasks, groups and admission.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import structlog

from outloop.buffer.errors import (
    Conflict,
    DeadlineExceeded,
    Gone,
    NotFound,
    OutloopError,
    RecordError,
    SettingsError,
)
from outloop.buffer.settings import Settings
from outloop.envs.command_agent.confinement import hidden_paths
from outloop.envs.rollout.episode_result import EpisodeResult, failed
from outloop.envs.runner.conversation_upload import submit_conversations
from outloop.envs.runner.failures import FailureLog
from outloop.envs.runner.outage import Outage
from outloop.envs.runner.router_client import OpenedClaim, RouterClient
from outloop.envs.runner.worker_pool import InProcess, Players, WorkerPool
from outloop.envs.tasks.task_files import load_run_tasks

T = TypeVar("T")
_log = structlog.get_logger()

_CANCEL_S = 4.0
_GATHER_S = 0.01
"""Slots that become free within it are claimed together."""
_MIN_POLL_S = 0.02
_MAX_POLL_S = 5.0
_MAX_BAD_REWARDS = 8
"""So many results in a row without a usable reward stop the run: the verifier is broken."""
_NUM_SILENT = 32
"""So many completed episodes without a model call at the start stop the run: the agent uses another
endpoint."""
_MAX_BACKOFF_S = 2.0
_PROGRESS_S = 30.0
_HEARTBEATS = 4
"""Heartbeats within env.max_runner_silence_s."""
_LATE_S = 30.0
"""How long after its deadline an episode's result may come, beyond env.max_stall_s."""


async def run(
    settings: Settings,
    *,
    router_url: str,
    runner_key: str,
    stop: asyncio.Event,
    in_process: bool = False,
    private: Sequence[Path] = (),
    drain_s: float = 5.0,
    ends_when_finished: bool = True,
) -> None:
    """Play until the run is finished or `stop` is set; with trainer.mode "sft", send conversations.

    Args:
        in_process: play in this process, whatever env.num_workers is.
        private: files and folders that agent programs must not see, in addition to those that the
            settings name.
        drain_s: how long episodes may go on when `stop` is set.
        ends_when_finished: False: wait for `stop` or for more steps then, for a cluster that
            starts again what ends.

    Raises:
        SettingsError: the user's code or the tasks are wrong, the key is refused, episodes end
            without a usable reward, or the agent never calls the model.
        DeadlineExceeded: the router did not answer.
        PartFailed: no worker process can be kept up.
    """
    deadline_s = max(60.0, settings.server.start_timeout_s)
    async with RouterClient(router_url, runner_key, deadline_s=deadline_s) as router:
        if settings.trainer.mode == "sft":
            await _until_stopped(submit_conversations(settings, router), stop)
            if not ends_when_finished:
                await stop.wait()
            return
        found = load_run_tasks(settings)
        registering = router.register_tasks(
            found.tasks, found.eval_tasks, found.sources, suites=found.suites
        )
        await _until_stopped(registering, stop)
        if stop.is_set():
            return
        alone = in_process or settings.env.num_workers == 0
        changed = asyncio.Event()
        hidden = [*hidden_paths(settings), *(path.resolve() for path in private)]
        players: Players = (
            InProcess(settings, hidden) if alone else WorkerPool(settings, changed.set, hidden)
        )
        try:
            await _until_stopped(players.start(), stop)
            if not stop.is_set():
                playing = Runner(settings, router, players, stop, changed, drain_s)
                await playing.play_all(ends_when_finished=ends_when_finished)
        finally:
            await players.close()


class Runner:
    """Plays up to env.max_concurrent_episodes episodes at once.

    Args:
        changed: set by `players` when there may be places again.
    """

    def __init__(
        self,
        settings: Settings,
        router: RouterClient,
        players: Players,
        stop: asyncio.Event,
        changed: asyncio.Event,
        drain_s: float,
    ) -> None:
        self._settings = settings
        self._drain_s = drain_s
        self._router = router
        self._players = players
        self._stop = stop
        self._playing: set[asyncio.Task[None]] = set()
        self._changed = changed
        self._fatal: BaseException | None = None
        self._failures = FailureLog(
            max_failed_share=settings.env.max_failed_share,
            run_folder=str(settings.run.dir / settings.run.name),
            failure_reward=settings.env.failure_reward,
        )
        self._warning = ""
        """A sentence for the user, which the next heartbeat sends."""
        self._has_warning = asyncio.Event()
        self._num_bad_rewards = 0
        self._num_silent: int | None = 0
        """Completed episodes without a model call so far; None once one has made a call."""
        self._has_said_refused = False
        self._backoff_s = 0.0
        self._outage = Outage()
        self._runner_id = uuid.uuid4().hex

    async def play_all(self, *, ends_when_finished: bool = True) -> None:
        """Claim and play until finished or stopped; then let the last episodes end."""
        background = [
            asyncio.create_task(call) for call in (self._report(), self._send_heartbeats())
        ]
        self._players.failed.add_done_callback(self._players_failed)
        try:
            await self._claim_until_finished(ends_when_finished)
            await self._drain()
        finally:
            for task in (*background, *self._playing):
                task.cancel()
            await asyncio.gather(*self._playing, return_exceptions=True)
            self._failures.summary()
        if self._fatal is not None:
            raise self._fatal

    async def _claim_until_finished(self, ends_when_finished: bool) -> None:
        key, reason = uuid.uuid4().hex, ""
        while not self._stop.is_set() and self._fatal is None:
            self._changed.clear()
            free = self._free()
            if free == 0:
                await self._wait_for_slots()
                continue
            call = self._router.claim(key=key, count=free, runner_id=self._runner_id)
            claimed = await _until_stopped(call, self._stop)
            if claimed is None:
                return
            if claimed.reason != "not_ready":
                # Else the call may have claimed through a router that died before it answered.
                key = uuid.uuid4().hex
            await self._start(claimed.claims)
            if claimed.claims:
                reason = ""
                continue
            if claimed.reason == "finished" and ends_when_finished:
                return
            if claimed.reason != reason:
                reason = claimed.reason
                _log.debug("nothing_to_play", reason=reason)
            # An ended episode alone seldom admits more; the router knows when to ask again.
            wait_s = max(claimed.retry_after_s, self._backoff_s, _MIN_POLL_S)
            await _first(min(wait_s, _MAX_POLL_S), self._stop)

    def _free(self) -> int:
        """Number of episodes that may start; a batch is claimed as a whole."""
        free = self._players.num_free()
        if self._players.kind == "batch":
            return free
        free = min(self._settings.env.max_concurrent_episodes - len(self._playing), free)
        return min(free, self._outage.num_allowed(time.monotonic()))

    async def _wait_for_slots(self) -> None:
        """Wait until episodes end, and longer after failures."""
        await _first(_MAX_POLL_S, self._changed, self._stop)
        await _first(max(_GATHER_S, self._backoff_s), self._stop)

    async def _start(self, claims: Sequence[OpenedClaim]) -> None:
        for purpose in ("eval", "train"):
            some = [opened for opened in claims if opened.claim.purpose == purpose]
            if not some:
                continue
            # The key ends with the deadline; the reward must be in before it does.
            deadlines = [
                time.time() + limit_s - min(1.0, 0.05 * limit_s)
                for limit_s in (opened.claim.deadline_s for opened in some)
            ]
            endings = await self._players.play(some, deadlines)
            for opened, deadline, ending in zip(some, deadlines, endings, strict=True):
                self._failures.start(opened.episode_id)
                self._outage.start(opened.episode_id, time.monotonic())
                task = asyncio.create_task(
                    self._play_and_close(opened, deadline, ending), name=opened.episode_id
                )
                self._playing.add(task)
                task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._playing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fatal = self._fatal or error
        self._changed.set()

    def _players_failed(self, failure: asyncio.Future[None]) -> None:
        if not failure.cancelled():
            self._fatal = self._fatal or failure.exception()
            self._changed.set()

    async def _drain(self) -> None:
        if not self._playing:
            return
        if self._stop.is_set():
            _log.info("runner_drains", num_playing=len(self._playing), limit_s=self._drain_s)
        _, late = await asyncio.wait(self._playing, timeout=self._drain_s)
        if late:
            _log.warning("episodes_aborted", num_aborted=len(late))
            for task in late:
                task.cancel()
            await asyncio.wait(late, timeout=2 * _CANCEL_S)

    async def _play_and_close(
        self, opened: OpenedClaim, deadline: float, playing: asyncio.Future[EpisodeResult]
    ) -> None:
        limit_s = deadline - time.time() + self._settings.env.max_stall_s + _LATE_S
        try:
            async with asyncio.timeout(max(0.0, limit_s)):
                ending = await playing
        except TimeoutError:
            late = DeadlineExceeded(
                who="runner", phase="play", peer="its worker process", after_s=limit_s
            )
            ending = failed(late, "infrastructure")
        except asyncio.CancelledError:
            ending = EpisodeResult(
                outcome="aborted", failure_kind="infrastructure", error="the runner was stopped"
            )
            with suppress(OutloopError, TimeoutError):
                await asyncio.wait_for(self._close(opened, ending), _CANCEL_S)
            raise
        ending = await self._unless_before_calls(ending, opened.episode_id)
        ending = await self._close(opened, ending)
        self._count(ending, opened.episode_id)
        await self._refuse_silence(ending, opened.episode_id)

    async def _unless_before_calls(self, ending: EpisodeResult, episode_id: str) -> EpisodeResult:
        """The result; a failure of the environment if the agent failed before any model call.

        Such a failure cannot depend on the policy. A reward for it would be noise in its group. An
        episode that was cut off at a limit keeps its result.
        """
        if ending.failure_kind != "agent" or ending.outcome != "failed":
            return ending
        calls = await self._router.read_calls(episode_id)
        if calls is None or calls.num_calls:
            return ending
        return replace(
            ending,
            failure_kind="environment",
            reward=None,
            error=f"{ending.error} (before its first model call)",
            is_before_calls=True,
        )

    async def _close(self, opened: OpenedClaim, ending: EpisodeResult) -> EpisodeResult:
        """Close an episode; returns its result, which is a failure if the router refuses it."""
        try:
            await self._router.close_episode(
                opened.episode_id,
                outcome=ending.outcome,
                failure_kind=ending.failure_kind,
                reward=ending.reward,
                error=ending.error,
                output=ending.output,
            )
        except (Gone, NotFound) as error:
            _log.debug("closed_too_late", episode_id=opened.episode_id, error=str(error))
        except (Conflict, RecordError) as error:
            if ending.reward is None:
                raise
            _log.warning("scores_refused", episode_id=opened.episode_id, error=str(error))
            return await self._close(opened, failed(error, "environment", output=ending.output))
        return ending

    def _count(self, ending: EpisodeResult, episode_id: str) -> None:
        """Log a failure, and stop a run that cannot succeed.

        Raises:
            SettingsError: the user's code asks for what the settings refuse, or gives no reward
                many times in a row.
        """
        self._outage.end(
            episode_id, time.monotonic(), has_failed=ending.failure_kind == "environment"
        )
        if ending.failure_kind is None:
            self._num_bad_rewards = 0
            self._backoff_s = 0.0
            self._warn("failing_pays", self._failures.success(ending, episode_id))
            return
        self._warn("episodes_fail", self._failures.failure(ending, episode_id))
        if ending.failure_kind != "agent":
            self._backoff_s = min(_MAX_BACKOFF_S, max(0.05, 2 * self._backoff_s))
        if ending.is_refused:
            raise SettingsError(ending.error)
        if not ending.is_bad_reward:
            return
        self._num_bad_rewards += 1
        if self._num_bad_rewards >= _MAX_BAD_REWARDS:
            env = self._settings.env
            name, value = "env.verifier", env.verifier
            if env.agent_command is None:
                name, value = "env.rollout_function_path", env.rollout_function_path
            raise SettingsError(
                f"{name}={value!r} returned no usable reward "
                f"{self._num_bad_rewards} times in a row, the last time: {ending.error}"
            )

    def _warn(self, event: str, warning: str) -> None:
        """Log a sentence, if there is one, and send it to the user with the next heartbeat."""
        if warning:
            _log.error(event, warning=warning)
            self._warning = warning
            self._has_warning.set()

    async def _refuse_silence(self, ending: EpisodeResult, episode_id: str) -> None:
        """Stop if the agent never calls the policy, or the router refuses every call; warn of the
        first episode with refused calls alone.

        Raises:
            SettingsError: none of the first completed episodes has a turn.
        """
        if self._num_silent is None or ending.outcome != "completed":
            return
        calls = await self._router.read_calls(episode_id)
        if calls is None or self._num_silent is None:
            return
        refusals = calls.refusals
        if calls.num_turns:
            self._num_silent = None
            return
        self._num_silent += 1
        sentence = ""
        if refusals.counts:
            code = max(refusals.counts, key=refusals.counts.__getitem__)
            which = "episode" if self._num_silent == 1 else f"{self._num_silent} episodes"
            sentence = (
                f"the router refused every call of the first {which}: {code}: {refusals.last}"
            )
        if self._num_silent >= _NUM_SILENT:
            raise SettingsError(
                sentence
                or f"none of the first {self._num_silent} episodes made a model call through "
                "outloop, so there is nothing to train: the agent uses another endpoint or none. "
                "Let it use episode.client or episode.base_url with episode.api_key; a program "
                "reads OPENAI_BASE_URL and OPENAI_API_KEY from its environment"
            )
        if sentence and not self._has_said_refused:
            self._has_said_refused = True
            self._warn("calls_refused", sentence)

    async def _send_heartbeats(self) -> None:
        """Send heartbeats while this event loop runs; warnings are sent at once."""
        max_silence_s = self._settings.env.max_runner_silence_s
        timeout_s = max_silence_s / 2 or _MAX_POLL_S
        while True:
            self._has_warning.clear()
            warning, self._warning = self._warning, ""
            if max_silence_s or warning:
                try:
                    async with asyncio.timeout(timeout_s):
                        await self._router.heartbeat(self._runner_id, warning=warning)
                except (OutloopError, TimeoutError) as error:
                    # Claims and closes fail with the same error, and report it.
                    _log.debug("heartbeat_failed", error=str(error))
                    self._warning = self._warning or warning
            await _first(max_silence_s / _HEARTBEATS or None, self._has_warning)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_S)
            _log.info("runner_progress", num_playing=len(self._playing), **self._failures.counts())


async def _first(timeout_s: float | None, *events: asyncio.Event) -> None:
    """Wait until one of `events` is set, or `timeout_s` has passed; None: without a limit."""
    if any(event.is_set() for event in events):
        return
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for waiter in waiting:
            waiter.cancel()


async def _until_stopped(call: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """The result of `call`; None if `stop` was set first, which cancels the call."""
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
