"""`python -m outloop.envs.runner.worker_main SOCKET MARKER STACKS`: plays episodes in a process.

It gets keys of single episodes only, and ends when its runner ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import os
import resource
import signal
import socket
import sys
from pathlib import Path

import structlog

from outloop.buffer.errors import OutloopError, SettingsError
from outloop.buffer.settings.env import EnvSettings
from outloop.buffer.telemetry import configure_logging
from outloop.envs.command_agent import agent
from outloop.envs.rollout.episode_result import EpisodeResult, failed
from outloop.envs.runner import worker_protocol
from outloop.envs.runner.batch_player import play_batch
from outloop.envs.runner.crash_attribution import Marker
from outloop.envs.runner.player import Player
from outloop.envs.runner.worker_protocol import Job
from outloop.envs.user_code import UserThreads

_BEAT_S = 0.2
_PR_SET_PDEATHSIG = 1
_log = structlog.get_logger()


class Worker:
    """One worker process."""

    def __init__(
        self,
        writer: asyncio.StreamWriter,
        marker: Marker,
        env: EnvSettings,
        begin: worker_protocol.Begin,
    ) -> None:
        self._writer = writer
        self._marker = marker
        self._env = env
        self._max_episodes = begin.max_episodes
        self._hidden = [Path(path) for path in begin.hidden]
        self._player: Player | None = None
        self._playing: set[asyncio.Task[None]] = set()
        self._num_batches = 0

    async def prepare(self) -> bool:
        """Load the user's code and call its set_up; False when it cannot be used."""
        try:
            rollout = agent.load_player(self._env, self._hidden)
            await rollout.set_up(self._env.set_up_timeout_s)
        except SettingsError as error:
            self._send(worker_protocol.Refused(str(error)))
        else:
            self._player = Player(
                rollout,
                self._env,
                max_episodes=self._max_episodes,
                marker=self._marker,
                on_stuck=lambda number: self._send(worker_protocol.Stuck(number)),
            )
            self._send(worker_protocol.Ready(rollout.kind, self._player.max_episodes))
        return self._player is not None

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Play jobs until a Stop, or until the runner closes the socket."""
        beating = asyncio.create_task(self._beat())
        while (data := await worker_protocol.read_frame(reader)) is not None:
            message = worker_protocol.to_worker.decode(data)
            if isinstance(message, worker_protocol.Stop):
                break
            assert isinstance(message, worker_protocol.Play)
            self._start(message.jobs)
        for task in self._playing:
            task.cancel()
        await asyncio.gather(*self._playing, return_exceptions=True)
        beating.cancel()
        assert self._player is not None
        try:
            await asyncio.wait_for(self._player.rollout.tear_down(), self._env.set_up_timeout_s)
        except BaseException:  # noqa: BLE001 - the user's tear_down may raise anything
            _log.exception("tear_down_raised")
        await self._player.close()

    def _start(self, jobs: tuple[Job, ...]) -> None:
        assert self._player is not None
        if self._player.rollout.kind == "batch":
            self._num_batches += 1
            playing = self._play_batch(jobs, self._num_batches - 1)
        else:
            playing = self._play(jobs[0])
        task = asyncio.create_task(playing)
        self._playing.add(task)
        task.add_done_callback(self._playing.discard)

    async def _play(self, job: Job) -> None:
        assert self._player is not None
        self._end(job.number, await self._player.play(job))

    async def _play_batch(self, jobs: tuple[Job, ...], num_calls: int) -> None:
        assert self._player is not None
        await play_batch(self._player, jobs, num_calls, self._end)
        self._send(worker_protocol.Played())

    def _end(self, number: int, ending: EpisodeResult) -> None:
        try:
            self._send(worker_protocol.Ended(number, ending))
        except OutloopError as error:
            # A number above 64 bits, or a component's name that is no text.
            self._send(worker_protocol.Ended(number, failed(error, "environment")))

    async def _beat(self) -> None:
        while True:
            self._marker.beat()
            await asyncio.sleep(_BEAT_S)

    def _send(self, message: worker_protocol.FromWorker) -> None:
        self._writer.write(worker_protocol.frame(message))


def _die_with_runner() -> None:
    """Let the kernel end this process with its runner, also while user code blocks the loop."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _limit(memory_mb: float) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # Data, not address space: libraries reserve far more address space than they use.
    resource.setrlimit(resource.RLIMIT_DATA, (int(memory_mb * 2**20), resource.RLIM_INFINITY))


async def _run(connection: socket.socket, marker: Marker) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    data = await worker_protocol.read_frame(reader)
    if data is None:
        return
    begin = worker_protocol.to_worker.decode(data)
    assert isinstance(begin, worker_protocol.Begin)
    configure_logging("worker", begin.log_level)
    loop = asyncio.get_running_loop()
    loop.set_task_factory(marker.task_factory())
    loop.set_default_executor(UserThreads(thread_name_prefix="asyncio"))
    env = EnvSettings.model_validate_json(begin.env)
    worker = Worker(writer, marker, env, begin)
    _limit(env.worker_memory_mb)
    if await worker.prepare():
        await worker.serve(reader)
    with contextlib.suppress(ConnectionError):
        await writer.drain()
    writer.close()


def main(arguments: list[str]) -> None:
    """Run until the socket closes; do not wait for threads that hang."""
    descriptor, marker, stacks = map(int, arguments)
    _die_with_runner()
    # Only the loop's thread, which gets the signal: others may have deep stacks.
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
    faulthandler.enable(file=stacks)
    # The runner stops its workers; a signal to the process group must not end episodes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        import uvloop

        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    except ImportError:
        runner = asyncio.Runner()
    with runner:
        runner.run(_run(socket.socket(fileno=descriptor), Marker(marker)))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
