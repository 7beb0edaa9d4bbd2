"""The runner's side of one worker process: its socket, its jobs, and the cause of its death.

Every job is resolved once. An episode is blamed for a crash or a stall only if its code was running
then.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import structlog

from outloop.buffer.errors import DeadlineExceeded, PartFailed, SettingsError
from outloop.buffer.records import Reward
from outloop.envs.rollout.episode_result import EpisodeResult
from outloop.envs.rollout.rollout_function import Kind
from outloop.envs.runner import worker_protocol
from outloop.envs.runner.crash_attribution import Marker
from outloop.envs.verifiers.task_fields import NUM_CORES_VARIABLE

_STOP_S = 3.0
_KILL_S = 5.0
_STACKS_S = 10.0
_MAX_STACK_BYTES = 65536
_FRAME = re.compile(r'File "([^"]+)", line (\d+).*\n')
_HEAD = re.compile(r"(?:Current thread \S+|Stack) \(most recent call first\):\n")
_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals from outside, for which no episode is blamed."""
_NOT_THEIRS = (sysconfig.get_paths()["stdlib"], str(Path(__file__).parents[1]))
_log = structlog.get_logger()


class WorkerProcess:
    """One worker process; `start` it before it gets jobs.

    Args:
        on_change: called when it may have become free, or more of its threads hang.
        num_cores: its share of the machine's cores, for verifiers that start processes.
    """

    def __init__(
        self,
        begin: worker_protocol.Begin,
        failure_reward: float,
        on_change: Callable[[], None],
        num_cores: int,
    ) -> None:
        self._begin = begin
        self._failure_reward = failure_reward
        self._on_change = on_change
        self._num_cores = num_cores
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._marker = Marker.create()
        self._stacks = bytearray()
        self._has_place = asyncio.Event()
        self._jobs: dict[int, asyncio.Future[EpisodeResult]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[worker_protocol.Ready] = (
            asyncio.get_running_loop().create_future()
        )
        self._beats = (-1, time.monotonic())
        self._stall_s = 0.0
        self.died = asyncio.Event()
        self.is_retired = False
        self.num_batches = 0
        self.num_stuck = 0
        self.max_episodes = 0
        self.ready_at = 0.0

    @property
    def pid(self) -> int:
        """Process id; 0 before it was started."""
        return self._process.pid if self._process is not None else 0

    @property
    def num_jobs(self) -> int:
        """Number of episodes that it plays now."""
        return len(self._jobs)

    @property
    def num_free(self) -> int:
        """Number of further episodes that it could play; none from the end of its socket on."""
        if not self.ready_at or self.is_retired or self.died.is_set() or not self._is_connected():
            return 0
        return max(0, self.max_episodes - self.num_jobs - self.num_stuck)

    async def start(self, timeout_s: float) -> Kind:
        """Start it and wait until it has loaded the user's code.

        Raises:
            SettingsError: the user's code cannot be used.
            PartFailed: it ended before it was ready.
            DeadlineExceeded: it took longer than `timeout_s`.
        """
        ours, theirs = socket.socketpair()
        stacks, their_stacks = os.pipe()
        os.set_blocking(stacks, False)
        asyncio.get_running_loop().add_reader(stacks, self._take_stacks, stacks)
        starting = asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "outloop.envs.runner.worker_main"),
            *(str(theirs.fileno()), str(self._marker.descriptor), str(their_stacks)),
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), self._marker.descriptor, their_stacks),
            start_new_session=True,
            env={**os.environ, NUM_CORES_VARIABLE: str(self._num_cores)},
        )
        try:
            self._process = await starting
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(their_stacks)
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._reading = asyncio.create_task(self._read(reader))
        self._send(self._begin)
        done, _ = await asyncio.wait({self._ready}, timeout=timeout_s)
        if not done:
            raise DeadlineExceeded(
                who="runner", phase="set_up", peer=f"worker pid={self.pid}", after_s=timeout_s
            )
        ready = self._ready.result()
        self.max_episodes = ready.max_episodes
        self.ready_at = time.monotonic()
        self._beats = (-1, self.ready_at)
        return ready.kind

    def play(
        self, jobs: tuple[worker_protocol.Job, ...], endings: list[asyncio.Future[EpisodeResult]]
    ) -> None:
        """Send it jobs; each ending is set once."""
        for job, ending in zip(jobs, endings, strict=True):
            self._jobs[job.number] = ending
        self.num_batches += 1
        self._send(worker_protocol.Play(jobs))

    def stalled_for(self) -> float:
        """Seconds since its event loop last ran, counted from the previous call at the latest."""
        beats = self._marker.beats
        if beats != self._beats[0]:
            self._beats = (beats, time.monotonic())
        return time.monotonic() - self._beats[1]

    def memory_mb(self) -> float:
        """Private memory, counted as for its limit (RLIMIT_DATA); 0 after its end."""
        try:
            return psutil.Process(self.pid).memory_info().data / 2**20
        except psutil.Error:
            return 0.0

    async def kill_stalled(self) -> None:
        """Read the stack of its loop, then kill it; the episode that blocks the loop is blamed."""
        self._stall_s = self.stalled_for()
        self._signal(signal.SIGUSR1)
        # The stack comes line by line, without an end mark.
        with suppress(TimeoutError):
            await asyncio.wait_for(self._has_place.wait(), _STACKS_S)
        await self.kill()

    async def kill(self) -> None:
        """Kill it."""
        self._signal(signal.SIGKILL)
        await asyncio.wait_for(self.died.wait(), _KILL_S)

    async def stop(self) -> None:
        """Let it cancel its episodes, tear down and end; kill it if it does not."""
        if self._process is None:
            return
        if self._reading is None:  # cancelled while it was being started
            self._signal(signal.SIGKILL)
            await self._process.wait()
            return
        if not self.died.is_set():
            self._send(worker_protocol.Stop())
            try:
                await asyncio.wait_for(self.died.wait(), _STOP_S)
            except TimeoutError:
                await self.kill()
        await self._reading

    def _is_connected(self) -> bool:
        return self._writer is not None and not self._writer.is_closing()

    def _send(self, message: worker_protocol.ToWorker) -> None:
        """Send it; a worker that has ended gets nothing, and its jobs end with its death."""
        frame = worker_protocol.frame(message)
        if self._writer is not None and self._is_connected():
            self._writer.write(frame)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        assert self._process is not None
        assert self._writer is not None
        while (data := await worker_protocol.read_frame(reader)) is not None:
            self._handle(worker_protocol.from_worker.decode(data))
        self._writer.close()
        try:
            code = await asyncio.wait_for(self._process.wait(), _KILL_S)
        except TimeoutError:
            self._signal(signal.SIGKILL)
            code = await self._process.wait()
        if not self._ready.done():
            self._ready.set_exception(
                PartFailed(f"a worker process ended with exit_code={code} before it was ready")
            )
        self._settle(code)
        self._marker.close()
        self.died.set()

    def _take_stacks(self, descriptor: int) -> None:
        try:
            data = os.read(descriptor, _MAX_STACK_BYTES)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)
        elif len(self._stacks) < _MAX_STACK_BYTES:
            self._stacks += data
            if self._frames(are_theirs=True):
                self._has_place.set()

    def _handle(self, message: worker_protocol.FromWorker) -> None:
        if isinstance(message, worker_protocol.Ready):
            self._ready.set_result(message)
        elif isinstance(message, worker_protocol.Refused):
            self._ready.set_exception(SettingsError(message.sentence))
        elif isinstance(message, worker_protocol.Ended):
            ending = self._jobs.pop(message.number, None)
            if ending is not None and not ending.done():
                ending.set_result(message.ending)
        elif isinstance(message, worker_protocol.Played):
            self.num_batches -= 1
        else:
            self.num_stuck = message.num_threads
        self._on_change()

    def _settle(self, code: int) -> None:
        """Resolve the jobs that it had when it died."""
        guilty = self._guilty(code)
        how, place = self._how(code), self._place()
        for number, ending in self._jobs.items():
            if ending.done():
                continue
            if number in guilty:
                ending.set_result(
                    EpisodeResult(
                        outcome="failed",
                        failure_kind="agent",
                        reward=Reward(value=self._failure_reward),
                        error=f"the rollout function {how}{f' at {place}' if place else ''}",
                        error_type="WorkerDied",
                        place=place,
                        trace=self._stack_text()[:4000],
                    )
                )
            else:
                ending.set_result(
                    EpisodeResult(
                        outcome="failed",
                        failure_kind="infrastructure",
                        error=f"its worker process died: another episode {how}"
                        if guilty
                        else f"its worker process died: it {how}",
                        error_type="WorkerDied",
                    )
                )
        if self._jobs:
            _log.warning(
                "worker_died",
                exit_code=code,
                num_episodes=len(self._jobs),
                num_to_blame=len(guilty),
                place=place,
            )
        self._jobs.clear()

    def _guilty(self, code: int) -> frozenset[int]:
        if self._stall_s:
            return frozenset({self._marker.running_in_loop()}) - {0}
        if -code in _OUTSIDE:
            return frozenset()
        running = self._marker.running() or frozenset(self._jobs)
        return running if len(running) == 1 else frozenset()

    def _how(self, code: int) -> str:
        if self._stall_s:
            return (
                f"blocked its event loop for {self._stall_s:.0f} s; await what blocks, wrap it in "
                "asyncio.to_thread, or write a plain `def play(task, episode)`; it stood"
            )
        if code < 0:
            return f"ended its process by {signal.Signals(-code).name}"
        return f"ended its process with exit_code={code}"

    def _stack_text(self) -> str:
        return self._stacks.decode(errors="replace")

    def _place(self) -> str:
        frames = self._frames(are_theirs=True) or self._frames(are_theirs=False)
        return frames[0] if frames else ""

    def _frames(self, *, are_theirs: bool) -> list[str]:
        """file:line of the blocked thread's frames, innermost first; perhaps of user code only."""
        current = ["", *_HEAD.split(self._stack_text())[1:]][-1]
        return [
            f"{file}:{line}"
            for file, line in _FRAME.findall(current)
            if not (are_theirs and file.startswith(_NOT_THEIRS))
        ]
