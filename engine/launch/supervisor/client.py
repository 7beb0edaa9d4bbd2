"""The launcher's side: parts that are the supervisor's children.

A launcher that is killed leaves them running; the next one with the same settings finds them.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import TracebackType

import psutil

from outloop.buffer.errors import DeadlineExceeded, PartFailed, SettingsError
from outloop.buffer.redis.client import wait_for_redis
from outloop.buffer.redis.embedded import end_of_log
from outloop.engine.launch.launcher_process import find_launcher
from outloop.engine.launch.processes import Fsync, LivingPart
from outloop.engine.launch.supervisor import wire
from outloop.engine.launch.supervisor.address import Address

_ANSWER_S = 60.0
"""To answer what takes no time, on a machine that may have stood still for a while."""
_REDIS_START_S = 90.0
"""Longer than an embedded Redis waits for its folder and for its first answer together."""
_STOP_S = 200.0
"""For one with other settings, or whose time is over, to stop everything, the trainer's checkpoint
included."""
_NO_SETTINGS = "none"
"""A digest that no settings have."""
_END_S = 30.0
"""To end when nothing runs any more."""


class SupervisedPart:
    """A part, asked for through the supervisor."""

    def __init__(self, supervisor: Supervisor, name: str, facts: wire.PartFacts) -> None:
        self.pid = facts.pid
        self.log_path = Path(facts.log_path)
        self._supervisor = supervisor
        self._name = name

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        answer = self._supervisor.ask(wire.LookAtPart(name=self._name))
        assert answer.part is not None
        return answer.part.exit_code

    def stop(self, timeout_s: float) -> None:
        """Ask it to stop, then kill its whole group when `timeout_s` has passed."""
        if self._supervisor.is_there:
            request = wire.StopPart(name=self._name, timeout_s=timeout_s)
            self._supervisor.ask(request, timeout_s=timeout_s + _ANSWER_S)

    def last_words(self, num_lines: int = 12) -> str:
        """The end of what it said."""
        request = wire.ReadLastWords(name=self._name, num_lines=num_lines)
        return self._supervisor.ask(request).text or ""


class SupervisedRedis:
    """The run's own Redis, asked for through the supervisor."""

    def __init__(self, supervisor: Supervisor, data_dir: Path, fsync: Fsync, max_mb: int) -> None:
        self.data_dir = data_dir
        self.url = ""
        self._supervisor = supervisor
        self._request = wire.StartRedis(data_dir=str(data_dir), fsync=fsync, max_memory_mb=max_mb)

    def __enter__(self) -> SupervisedRedis:
        found = self._supervisor.living_redis
        if found is None:
            found = self._supervisor.ask(self._request, timeout_s=_REDIS_START_S).redis
            assert found is not None
        self.url = found.url
        if found.exit_code is not None:
            # It ended while nobody led the run; parts wait for it at its old address.
            self.start_again()
            wait_for_redis(self.url, _REDIS_START_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._supervisor.is_there:
            self._supervisor.ask(wire.StopRedis(), timeout_s=_REDIS_START_S)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._look().pid

    @property
    def exit_code(self) -> int | None:
        """Of a server that ended by itself; None while it runs."""
        return self._look().exit_code

    def start_again(self) -> None:
        """After it ended by itself: a new server on the same folder and URL."""
        self._supervisor.ask(wire.StartRedisAgain())

    def last_words(self) -> str:
        """The end of its log."""
        return end_of_log(self.data_dir)

    def _look(self) -> wire.RedisFacts:
        facts = self._supervisor.ask(wire.LookAtRedis()).redis
        assert facts is not None
        return facts


class Supervisor:
    """A connection to the supervisor; use `supervised`."""

    def __init__(
        self,
        process: psutil.Process,
        connection: socket.socket,
        child: subprocess.Popen[bytes] | None = None,
    ) -> None:
        """`child`: the same process, where this one has started it."""
        self.is_there = True
        """False once it is gone, and all that it started with it."""
        self.living_redis: wire.RedisFacts | None = None
        """Which an earlier launcher started."""
        self._process = process
        self._connection = connection
        self._child = child
        self._living: dict[str, wire.PartFacts] = {}

    def connect(self, path: Path) -> bool:
        """To its socket. False: it has ended meanwhile."""
        try:
            self._connection.connect(str(path))
        except OSError:
            return False
        return True

    def lead(self, digest: str) -> bool:
        """Take the lead. False: it ends instead, because its time is over or its parts were
        started with other settings."""
        try:
            answer = self._exchange(wire.Lead(digest=digest), _STOP_S)
        except TimeoutError:
            answer = None
        if answer is None:
            return False
        found = answer.parts or {}
        self._living = {name: facts for name, facts in found.items() if facts.exit_code is None}
        self.living_redis = answer.redis
        return True

    @property
    def has_living(self) -> bool:
        """Whether an earlier launcher's processes go on."""
        return bool(self._living) or self.living_redis is not None

    def take_living(self, name: str) -> LivingPart | None:
        """The part of that name, once, if an earlier launcher started it and it runs."""
        facts = self._living.pop(name, None)
        if facts is None:
            return None
        return LivingPart(part=SupervisedPart(self, name, facts), age_s=facts.age_s)

    def start(
        self,
        name: str,
        command: Sequence[str],
        log_path: Path,
        environment: Mapping[str, str],
        *,
        stop_order: int,
        stop_timeout_s: float,
    ) -> SupervisedPart:
        """Start a part; where nobody leads them any more, lower `stop_order` is stopped first."""
        request = wire.StartPart(
            name=name,
            command=tuple(command),
            log_path=str(log_path),
            environment={**os.environ, **environment},
            stop_order=stop_order,
            stop_timeout_s=stop_timeout_s,
        )
        facts = self.ask(request).part
        assert facts is not None
        return SupervisedPart(self, name, facts)

    def redis(self, data_dir: Path, *, fsync: Fsync, max_memory_mb: int) -> SupervisedRedis:
        """The run's own Redis, which is stopped at the end."""
        return SupervisedRedis(self, data_dir, fsync, max_memory_mb)

    def ask(self, request: wire.Request, *, timeout_s: float = _ANSWER_S) -> wire.Answer:
        """What it answers.

        Raises:
            SettingsError: it refuses what it was asked for.
            PartFailed: it could not do it, or is gone.
            DeadlineExceeded: it did not answer in time, and was killed.
        """
        answer = None
        if self.is_there:
            try:
                answer = self._exchange(request, timeout_s)
            except TimeoutError:
                self.kill()
                raise DeadlineExceeded(
                    who="launcher",
                    phase=type(request).__name__,
                    peer=f"the supervisor (process {self._process.pid})",
                    after_s=timeout_s,
                ) from None
            except KeyboardInterrupt:
                # What it would answer now belongs to no question: it ends, and the parts with it.
                self.kill()
                raise
        if answer is None:
            self.is_there = False
            raise PartFailed(
                f"the supervisor (process {self._process.pid}), whose children the parts are, has "
                "ended, and they with it; start the same command again to resume from the last "
                "checkpoint"
            )
        if answer.refused is not None:
            raise SettingsError(answer.refused)
        if answer.failed is not None:
            raise PartFailed(answer.failed)
        return answer

    def end(self) -> None:
        """Have it end; nothing that it started is left."""
        if self.is_there:
            self.is_there = False
            with suppress(OSError):
                wire.send(self._connection, wire.End())
        self._connection.close()
        try:
            self.wait(_END_S)
        except DeadlineExceeded:
            self.kill()
            raise

    def wait(self, timeout_s: float) -> None:
        """Until it has ended.

        Raises:
            DeadlineExceeded: it has not in time.
        """
        try:
            if self._child is not None:
                self._child.wait(timeout_s)
            else:
                self._process.wait(timeout_s)
        except (subprocess.TimeoutExpired, psutil.TimeoutExpired):
            raise DeadlineExceeded(
                who="launcher",
                phase="stop",
                peer=f"the supervisor (process {self._process.pid})",
                after_s=timeout_s,
            ) from None

    def _exchange(self, request: wire.Request, timeout_s: float) -> wire.Answer | None:
        """None: it is gone."""
        self._connection.settimeout(timeout_s)
        try:
            wire.send(self._connection, request)
        except ConnectionError:
            return None
        return wire.read_answer(self._connection)

    def kill(self) -> None:
        """End it, and what it started, at once."""
        self.is_there = False
        with suppress(psutil.NoSuchProcess):
            self._process.kill()


@contextmanager
def supervised(run_dir: Path, digest: str, grace_s: float) -> Iterator[Supervisor]:
    """The supervisor of the run: one that an earlier launcher with the same settings has left, or a
    new one. At the end it has ended.

    Raises:
        SettingsError: another launcher leads the run.
        DeadlineExceeded: one with other settings did not stop its parts.
        PartFailed: none could be started.
    """
    supervisor = _find(run_dir, digest) or _begin(run_dir, digest, grace_s)
    try:
        yield supervisor
    except KeyboardInterrupt:
        # Whoever interrupts does not want to wait for parts that are slow to stop.
        supervisor.kill()
        raise
    finally:
        supervisor.end()


def end_living(run_dir: Path) -> None:
    """End what an earlier launcher has left.

    Raises:
        SettingsError: another launcher leads the run.
        DeadlineExceeded: it did not stop its parts.
    """
    found = _find(run_dir, _NO_SETTINGS)
    assert found is None


def _find(run_dir: Path, digest: str) -> Supervisor | None:
    found = Address(run_dir).find()
    if found is None:
        return None
    leader = find_launcher(run_dir)
    if leader is not None:
        raise SettingsError(
            f"process {leader.pid} leads the parts of {str(run_dir)!r}; stop it first, or choose "
            "another run.name"
        )
    process, path = found
    with ExitStack() as stack:
        supervisor = Supervisor(
            process, stack.enter_context(closing(socket.socket(socket.AF_UNIX)))
        )
        if supervisor.connect(path) and supervisor.lead(digest):
            stack.pop_all()
            return supervisor
        supervisor.wait(_STOP_S)
    return None


def _begin(run_dir: Path, digest: str, grace_s: float) -> Supervisor:
    ours, theirs = socket.socketpair()
    log_path = run_dir / "logs/supervisor.log"
    log_path.parent.mkdir(exist_ok=True)
    with closing(theirs), log_path.open("ab") as log:
        child = subprocess.Popen(
            [
                *(sys.executable, "-m", "outloop.engine.launch.supervisor.program"),
                *(str(run_dir), digest, str(grace_s), str(theirs.fileno())),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(theirs.fileno(),),
        )
    supervisor = Supervisor(psutil.Process(child.pid), ours, child)
    if not supervisor.lead(digest):
        supervisor.end()
        raise PartFailed(
            f"the supervisor, whose children the parts are, ended at its start; see {log_path}"
        )
    return supervisor
