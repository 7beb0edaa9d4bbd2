"""The supervisor's own process: the parent of a run's parts and of its Redis.

`python -m outloop.engine.launch.supervisor.program RUN_DIR DIGEST GRACE_S DESCRIPTOR`. It starts
and stops what a launcher asks for, and decides nothing while there is one. A launcher that is gone
without a word may be followed by another one with the same settings within GRACE_S seconds; then,
or when it gets SIGTERM, it stops the trainer first, so that it can write its checkpoint, then the
others, and ends. Parts end with it, as children of a launcher do.
"""

from __future__ import annotations

import select
import signal
import socket
import sys
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from outloop.buffer.errors import OutloopError, SettingsError
from outloop.buffer.events import record_event
from outloop.buffer.owned_folder import OwnedFolder
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.engine.launch.child_process import PartProcess
from outloop.engine.launch.supervisor import wire
from outloop.engine.launch.supervisor.address import Address

_FIRST_WORD_S = 10.0
"""Who connects and says nothing is no launcher. One that was stopped may be silent later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Started:
    process: PartProcess
    at: float
    """By the monotonic clock."""
    stop_order: int
    stop_timeout_s: float

    def facts(self) -> wire.PartFacts:
        return wire.PartFacts(
            pid=self.process.pid,
            exit_code=self.process.exit_code,
            log_path=str(self.process.log_path),
            age_s=time.monotonic() - self.at,
        )


class Supervisor:
    """The parts of one run; use `supervise`."""

    def __init__(self, run_dir: Path, digest: str, grace_s: float) -> None:
        """`digest`: of the settings with which the parts are started."""
        self._run_dir = run_dir
        self._digest = digest
        self._grace_s = grace_s
        self._parts: dict[str, _Started] = {}
        self._redis: EmbeddedRedis | None = None

    def supervise(self, launcher: socket.socket, listener: socket.socket) -> None:
        """Do what launchers ask for, until one says that this is the end, none came in time, or
        one has other settings. Then nothing runs that was started."""
        following: socket.socket | None = launcher
        try:
            while following is not None and self._follow(following):
                record_event(self._run_dir, "launcher_lost", grace_s=self._grace_s)
                following = self._next_launcher(listener)
        finally:
            self._stop_all()

    def _follow(self, launcher: socket.socket) -> bool:
        """Answer one launcher. True: it is gone without a word."""
        with closing(launcher), suppress(OSError):
            launcher.settimeout(_FIRST_WORD_S)
            while (request := wire.read_request(launcher)) is not None:
                launcher.settimeout(None)
                if isinstance(request, wire.End):
                    return False
                if isinstance(request, wire.Lead) and request.digest != self._digest:
                    return False
                wire.send(launcher, self._answer(request))
        return True

    def _next_launcher(self, listener: socket.socket) -> socket.socket | None:
        """The first one that comes; None: none did in time."""
        readable, _, _ = select.select([listener], [], [], self._grace_s)
        return listener.accept()[0] if readable else None

    def _answer(self, request: wire.Request) -> wire.Answer:
        try:
            return self._do(request)
        except SettingsError as error:
            return wire.Answer(refused=str(error))
        except (OutloopError, OSError) as error:
            return wire.Answer(failed=str(error))

    def _do(self, request: wire.Request) -> wire.Answer:
        match request:
            case wire.Lead():
                parts = {name: started.facts() for name, started in self._parts.items()}
                return wire.Answer(parts=parts, redis=self._redis_facts())
            case wire.StartPart():
                return wire.Answer(part=self._start(request).facts())
            case wire.LookAtPart():
                return wire.Answer(part=self._parts[request.name].facts())
            case wire.StopPart():
                self._parts[request.name].process.stop(request.timeout_s)
                return wire.Answer(part=self._parts[request.name].facts())
            case wire.ReadLastWords():
                words = self._parts[request.name].process.last_words(request.num_lines)
                return wire.Answer(text=words)
            case wire.StartRedis():
                self._redis = EmbeddedRedis(
                    Path(request.data_dir),
                    fsync=request.fsync,
                    max_memory_mb=request.max_memory_mb,
                )
                self._redis.start()
            case wire.StartRedisAgain():
                assert self._redis is not None
                self._redis.start_again()
            case wire.StopRedis():
                assert self._redis is not None
                self._redis.stop()
                self._redis = None
        return wire.Answer(redis=self._redis_facts())

    def _redis_facts(self) -> wire.RedisFacts | None:
        redis = self._redis
        if redis is None:
            return None
        return wire.RedisFacts(pid=redis.pid, exit_code=redis.exit_code, url=redis.url)

    def _start(self, request: wire.StartPart) -> _Started:
        started = _Started(
            process=PartProcess(
                request.name, request.command, Path(request.log_path), request.environment
            ),
            at=time.monotonic(),
            stop_order=request.stop_order,
            stop_timeout_s=request.stop_timeout_s,
        )
        self._parts[request.name] = started
        return started

    def _stop_all(self) -> None:
        for started in sorted(self._parts.values(), key=lambda one: one.stop_order):
            started.process.stop(started.stop_timeout_s)
        if self._redis is not None:
            self._redis.stop()


def main(words: list[str]) -> None:
    """Supervise until the end of the run."""
    run_dir, digest, grace_s, descriptor = words
    launcher = socket.socket(fileno=int(descriptor))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = OwnedFolder("outloop-parts")
    address = Address(Path(run_dir))
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(folder.path / "s"))
        listener.listen()
        address.write(folder.path / "s", float(grace_s))
        try:
            Supervisor(Path(run_dir), digest, float(grace_s)).supervise(launcher, listener)
        finally:
            address.remove()
    folder.close()


if __name__ == "__main__":
    main(sys.argv[1:])
