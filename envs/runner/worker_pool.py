"""The worker processes of a runner; or none, for debuggers.

The pool distributes episodes, and replaces workers that die, stall or grow. Every future of `play`
is resolved. The death of a worker does not end the runner, unless no worker can load the user's
code.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol

import structlog

from outloop.buffer.errors import DeadlineExceeded, OutloopError, PartFailed
from outloop.buffer.records import FailureKind
from outloop.buffer.settings import Settings
from outloop.envs.command_agent.agent import load_player
from outloop.envs.rollout.episode_result import EpisodeResult, failed
from outloop.envs.rollout.rollout_function import Kind
from outloop.envs.runner import worker_protocol
from outloop.envs.runner.batch_player import play_batch
from outloop.envs.runner.crash_attribution import contained_task
from outloop.envs.runner.player import Player
from outloop.envs.runner.router_client import OpenedClaim
from outloop.envs.runner.worker_process import WorkerProcess
from outloop.envs.user_code import UserThreads

_WATCH_S = 0.5
_GROWN_SHARE = 0.8
_START_S = 60.0
_MAX_EARLY_DEATHS = 3
_MAX_RESTART_DELAY_S = 5.0
_SOON_S = 5.0
_log = structlog.get_logger()


class Players(Protocol):
    """Plays episodes, in worker processes or in this one."""

    kind: Kind
    failed: asyncio.Future[None]
    """Gets an exception when no worker can be kept alive."""

    def num_free(self) -> int:
        """Number of further episodes that can be played now."""
        ...

    async def start(self) -> None: ...

    async def play(
        self, claims: Sequence[OpenedClaim], deadlines: Sequence[float]
    ) -> list[asyncio.Future[EpisodeResult]]: ...

    async def close(self) -> None: ...


class WorkerPool:
    """`env.num_workers` processes.

    Args:
        on_change: called when more episodes may be played.
        hidden: files and folders that agent programs must not see.
    """

    def __init__(
        self, settings: Settings, on_change: Callable[[], None], hidden: Sequence[Path] = ()
    ) -> None:
        env = settings.env
        share = -(-env.max_concurrent_episodes // env.num_workers)
        self._env = env
        # On this machine there may be as many runners, each with as many workers.
        num_processes = env.num_workers * max(1, env.num_runners)
        self._num_cores = max(1, len(os.sched_getaffinity(0)) // num_processes)
        self._begin = worker_protocol.Begin(
            env.model_dump_json(), tuple(map(str, hidden)), share, settings.telemetry.log_level
        )
        self._workers: list[WorkerProcess] = []
        """Workers that are ready, until they die, or retire and have nothing left to play."""
        self._ending: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)
        self._changed = asyncio.Event()
        self._on_change = on_change
        self._watching: asyncio.Task[None] | None = None
        self._num_early_deaths = 0
        self.kind: Kind = "async"
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def num_free(self) -> int:
        """Free places in all workers; a batch needs a worker that plays nothing."""
        if self.kind == "batch":
            return max((w.num_free for w in self._workers if not w.num_batches), default=0)
        return sum(worker.num_free for worker in self._workers)

    async def start(self) -> None:
        """Start every worker; returns when all are ready.

        Raises:
            SettingsError: the user's code cannot be used.
            PartFailed, DeadlineExceeded: a worker did not come up.
        """
        starting = [asyncio.create_task(self._start_one()) for _ in range(self._env.num_workers)]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await self.close()
            raise
        self._watching = asyncio.create_task(self._watch())

    async def play(
        self, claims: Sequence[OpenedClaim], deadlines: Sequence[float]
    ) -> list[asyncio.Future[EpisodeResult]]:
        """Give each episode, or the whole batch, to the worker with the lowest load."""
        loop = asyncio.get_running_loop()
        endings: list[asyncio.Future[EpisodeResult]] = [loop.create_future() for _ in claims]
        jobs = [
            worker_protocol.Job(next(self._numbers), claim, deadline)
            for claim, deadline in zip(claims, deadlines, strict=True)
        ]
        groups = [(jobs, endings)] if self.kind == "batch" else [
            ([job], [ending]) for job, ending in zip(jobs, endings, strict=True)
        ]  # fmt: skip
        for some, theirs in groups:
            worker = await self._free_worker(max(deadlines) - time.time())
            try:
                if worker is None:
                    raise PartFailed("no worker process came up before the episode's deadline")
                worker.play(tuple(some), theirs)
            except OutloopError as error:
                kind: FailureKind = "infrastructure" if worker is None else "environment"
                for ending in theirs:
                    ending.set_result(failed(error, kind))
        return endings

    async def close(self) -> None:
        """Stop every worker."""
        if self._watching is not None:
            self._watching.cancel()
        # A task that starts a worker ends it when it is cancelled.
        for task in self._ending:
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in self._workers), return_exceptions=True)

    async def _free_worker(self, timeout_s: float) -> WorkerProcess | None:
        deadline = time.monotonic() + timeout_s
        while True:
            free = [worker for worker in self._workers if worker.num_free]
            if free:
                return min(free, key=lambda worker: (worker.num_jobs, -worker.num_free))
            self._changed.clear()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            try:
                await asyncio.wait_for(self._changed.wait(), left_s)
            except TimeoutError:
                return None

    async def _start_one(self) -> None:
        worker = WorkerProcess(
            self._begin, self._env.failure_reward, self._worker_changed, self._num_cores
        )
        try:
            self.kind = await worker.start(self._env.set_up_timeout_s + _START_S)
        except BaseException:
            await worker.stop()
            raise
        self._workers.append(worker)
        self._worker_changed()

    def _worker_changed(self) -> None:
        self._changed.set()
        self._on_change()

    async def _watch(self) -> None:
        try:
            while True:
                await asyncio.sleep(_WATCH_S)
                for worker in list(self._workers):
                    await self._check(worker)
        except OutloopError as error:
            if not self.failed.done():
                self.failed.set_exception(error)

    async def _check(self, worker: WorkerProcess) -> None:
        if worker.died.is_set():
            self._workers.remove(worker)
            if not worker.is_retired:
                self._later(self._replace(worker))
        elif worker.is_retired and worker.num_jobs == 0:
            self._workers.remove(worker)
            self._later(worker.stop())
        elif worker.ready_at and worker.stalled_for() > self._env.max_stall_s:
            await worker.kill_stalled()
        elif worker.num_stuck and 2 * worker.num_stuck >= worker.max_episodes:
            self._retire(worker, f"{worker.num_stuck} blocking calls do not return")
        elif worker.ready_at and not worker.is_retired:
            memory_mb = worker.memory_mb()
            if memory_mb > _GROWN_SHARE * self._env.worker_memory_mb:
                self._retire(
                    worker,
                    f"it holds {memory_mb:.0f} MB of env.worker_memory_mb="
                    f"{self._env.worker_memory_mb}",
                )

    async def _replace(self, worker: WorkerProcess) -> None:
        """Start another for one that died; later and later when they die young."""
        young = not worker.ready_at or time.monotonic() - worker.ready_at < _SOON_S
        self._num_early_deaths = self._num_early_deaths + 1 if young else 0
        if self._num_early_deaths:
            delay_s = min(0.1 * 2**self._num_early_deaths, _MAX_RESTART_DELAY_S)
            await asyncio.sleep(delay_s)
        await self._start_again()

    async def _start_again(self) -> None:
        for attempt in range(1, _MAX_EARLY_DEATHS + 1):
            try:
                await self._start_one()
                return
            except (PartFailed, DeadlineExceeded):
                if attempt == _MAX_EARLY_DEATHS:
                    raise

    def _retire(self, worker: WorkerProcess, reason: str) -> None:
        if worker.is_retired or worker.died.is_set():
            return
        worker.is_retired = True
        _log.warning("worker_retired", pid=worker.pid, reason=reason, num_playing=worker.num_jobs)
        self._later(self._start_again())

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self.failed.done():
            self.failed.set_exception(error)


class InProcess:
    """Plays in the runner's process, for debuggers (`env.num_workers = 0`)."""

    def __init__(self, settings: Settings, hidden: Sequence[Path] = ()) -> None:
        self._settings = settings
        self._hidden = hidden
        self._numbers = itertools.count(1)
        self._num_batches = 0
        self._playing: set[asyncio.Task[None]] = set()
        self._player: Player | None = None
        self.kind: Kind = "async"
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def num_free(self) -> int:
        """Free places in this process; a batch needs all of them."""
        assert self._player is not None
        if self.kind == "batch" and self._playing:
            return 0
        return self._player.max_episodes - len(self._playing)

    async def start(self) -> None:
        """Load the user's code and call its set_up."""
        env = self._settings.env
        rollout = load_player(env, self._hidden)
        loop = asyncio.get_running_loop()
        loop.set_task_factory(contained_task)
        loop.set_default_executor(UserThreads(thread_name_prefix="asyncio"))
        await rollout.set_up(env.set_up_timeout_s)
        self._player = Player(rollout, env, max_episodes=env.max_concurrent_episodes)
        self.kind = rollout.kind

    async def play(
        self, claims: Sequence[OpenedClaim], deadlines: Sequence[float]
    ) -> list[asyncio.Future[EpisodeResult]]:
        """Play episodes in tasks of this event loop."""
        assert self._player is not None
        loop = asyncio.get_running_loop()
        endings: list[asyncio.Future[EpisodeResult]] = [loop.create_future() for _ in claims]
        jobs = [
            worker_protocol.Job(next(self._numbers), claim, deadline)
            for claim, deadline in zip(claims, deadlines, strict=True)
        ]
        by_number = dict(zip((job.number for job in jobs), endings, strict=True))
        if self.kind == "batch":
            batch = play_batch(
                self._player, jobs, self._num_batches, lambda n, e: by_number[n].set_result(e)
            )
            self._num_batches += 1
            self._run(batch)
        else:
            for job, ending in zip(jobs, endings, strict=True):
                self._run(self._play(job, ending))
        return endings

    async def close(self) -> None:
        """Cancel all episodes, and tear down."""
        for task in self._playing:
            task.cancel()
        await asyncio.gather(*self._playing, return_exceptions=True)
        if self._player is not None:
            await self._player.rollout.tear_down()
            await self._player.close()
        asyncio.get_running_loop().set_task_factory(None)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._playing.add(task)
        task.add_done_callback(self._playing.discard)

    async def _play(self, job: worker_protocol.Job, ending: asyncio.Future[EpisodeResult]) -> None:
        assert self._player is not None
        result = await self._player.play(job)
        if not ending.done():
            ending.set_result(result)
