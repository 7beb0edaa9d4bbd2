"""Starts, watches and stops the parts of one run on one machine, and its Redis.

Decides the order of stopping, and which parts are started again. Parts meet through Redis and HTTP
only; while Redis is away, for buffer.max_outage_s at most, the launcher waits with them. When
`running` ends, no process that it started is left.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import structlog

from outloop.buffer.errors import (
    RANK_KILLED_EXIT_CODE,
    SETTINGS_EXIT_CODE,
    DeadlineExceeded,
    PartFailed,
    SettingsError,
)
from outloop.buffer.events import record_event
from outloop.buffer.reader import BufferReader
from outloop.buffer.redis.client import connect_sync
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.run import Run, create_run, make_run_folder
from outloop.buffer.settings import Settings
from outloop.buffer.tls import trust_authorities
from outloop.buffer.trackers.tracker import part_name
from outloop.engine.launch.child_process import PartProcess, part_command
from outloop.engine.launch.gpu_placement import NOT_PLACED, GpuPlacement
from outloop.engine.launch.launcher_process import named_launcher
from outloop.engine.launch.placement import HERE, Placement
from outloop.engine.launch.redis_watch import RedisWatch
from outloop.engine.launch.restarts import (
    DEFAULT_BACKOFF,
    Backoff,
    Restarts,
    end_reason,
    was_killed,
)
from outloop.engine.launch.run_entry import enter, open_archive
from outloop.engine.machine.port_reservation import hold_port

_STOP_TIMEOUT_S = 15.0
_TRAINER_STOP_TIMEOUT_S = 60.0
_PARTS_THAT_END = frozenset({"trainer", "runner"})
"""Parts that end when the run is finished."""
WATCH_INTERVAL_S = 0.25
"""How often a run is looked at."""
_REDIS_TIMEOUT_S = 5.0
"""One that does not answer for so long is away: stopped, or behind a network that is."""
_RESTARTABLE = frozenset({"router", "runner", "server", "archiver", "monitor", "tracker", "viewer"})
"""Parts without state of their own: a new process continues where the old one ended."""
_FIRST_TO_STOP = ("trainer", "runner", "router")
_OPTIONAL = frozenset({"archiver", "monitor", "tracker", "viewer"})
"""Parts without which a run goes on."""
_NUM_LAST_LINES = 30
"""Enough for what SGLang's scheduler says and for what its other processes say after it."""

_log = structlog.get_logger()


class Launcher:
    """One run's processes; use `running` to make sure that they are stopped."""

    def __init__(
        self,
        run: Run,
        reader: BufferReader,
        stop: threading.Event,
        gpus: GpuPlacement,
        backoff: Backoff,
        placement: Placement,
        redis: EmbeddedRedis | None = None,
    ) -> None:
        """`redis`: the run's own, started again when it ends; None: it is somebody else's."""
        self.run = run
        self.reader = reader
        self.stop = stop
        self.parts: dict[str, PartProcess] = {}
        self._viewer_link: str | None = None
        self._restarts = Restarts(backoff)
        self.redis = RedisWatch(run, reader, self._restarts, redis)
        self._started: dict[str, float] = {}
        self._due: dict[str, float] = {}
        """When each part that ended is started again, by the monotonic clock."""
        self._exit_codes: dict[str, int] = {}
        """With which each part ended last."""
        self._has_shown: set[str] = set()
        """Parts whose last lines are on the terminal, until they live long enough."""
        self._commands: dict[str, tuple[str, ...]] = {}
        self._held_port: socket.socket | None = None
        self._gpus = gpus
        self._placement = placement

    def start(self, name: str, part: str, *extra: str) -> None:
        """Start `part` under `name`; its output goes to `logs/{name}.log`."""
        self._commands[name] = (part, *extra)
        self._started[name] = time.monotonic()
        index = int(extra[extra.index("--index") + 1]) if "--index" in extra else 0
        environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.parts[name] = PartProcess(
            name,
            self._placement.command(name, part, part_command(part, self.run.dir, *extra)),
            self.run.dir / "logs" / f"{name}.log",
            environment | self._gpus.environment(part, index),
        )

    def start_archiver(self) -> None:
        """Start what keeps trajectories, if the settings and what is installed allow it.

        Raises:
            SettingsError: trajectories.enabled=true without pyarrow.
        """
        if open_archive(self.reader, self.run.settings.trajectories):
            self.start("archiver", "archiver")

    def start_watchers(self) -> None:
        """Start what looks at the run, without which it goes on: monitor, page and trackers."""
        telemetry = self.run.settings.telemetry
        if self.run.settings.alarms.enabled or telemetry.prometheus_port is not None:
            self.start("monitor", "monitor")
        if telemetry.view_port is not None:
            self.start("viewer", "viewer")
        for name in telemetry.trackers:
            self.start(part_name(name), "tracker", "--name", name)

    def hold_port(self, host: str, port: int) -> int:
        """A port that processes of this run may share, kept from others; `port` 0: any free one.

        Raises:
            SettingsError: it cannot be had.
        """
        try:
            self._held_port = hold_port(host, port, is_shared=True)
        except OSError as error:
            raise SettingsError(
                f"router.host={host!r} router.port={port}: cannot listen there ({error}); choose "
                "another, or port 0 for any free one"
            ) from error
        return int(self._held_port.getsockname()[1])

    def check(self) -> None:
        """Start parts again that ended and may be restarted, each after its back-off.

        Raises:
            SettingsError: a part refuses its settings.
            PartFailed: another part ended, or one ended too often in a row soon after its start.
            BufferUnavailable: Redis is away; see `RedisWatch.riding_out`.
            BufferLost: it came back empty.
        """
        self.redis.check()
        for name, process in list(self.parts.items()):
            code = process.exit_code
            part = self._commands[name][0]
            if code is None or (code == 0 and self._has_finished(part)):
                continue
            if name not in self._due:
                self._plan_restart(name, part, process, code)
            if name in self._due and time.monotonic() >= self._due[name]:
                extra = self._arguments_again(name, part)
                del self._due[name]
                reason = end_reason(code, process.last_words(1))
                _log.warning("part_restarted", name=name, exit_code=code, reason=reason)
                record_event(
                    self.run.dir, "part_restarted", part=name, exit_code=code, reason=reason
                )
                self.start(name, part, *extra)

    def viewer_link(self) -> str | None:
        """Where the run's page is, with its key; None until it is there."""
        if "viewer" in self.parts and self._viewer_link is None:
            facts = self.reader.registry.parts().get("viewer")
            if facts is not None:
                self._viewer_link = f"{facts['url']}?key={self.run.keys.viewer_key}"
        return self._viewer_link

    @property
    def has_trained(self) -> bool:
        """The trainer has ended because there is nothing left to do."""
        return self.parts["trainer"].exit_code == 0 and self._has_finished("trainer")

    def _has_finished(self, part: str) -> bool:
        """Whether a part that ended well has done its work. A runner or a trainer that was asked to
        stop, such as by the notice of a spot machine, ends well too, and is started again."""
        if part not in _PARTS_THAT_END:
            return False
        if part == "runner" and self.run.settings.trainer.mode != "rl":
            return True
        return self.reader.run_state() != "running"

    def _plan_restart(self, name: str, part: str, process: PartProcess, code: int) -> None:
        """Decide when a part that ended is started again; gives an optional one up."""
        wait_s = self._restarts.wait_s(name, lived_s=time.monotonic() - self._started[name])
        if part in _OPTIONAL and (wait_s is None or code == SETTINGS_EXIT_CODE):
            del self.parts[name]
            reason = process.last_words(1).removeprefix("outloop: ")
            log = str(process.log_path)
            _log.error("part_given_up", name=name, exit_code=code, reason=reason, log=log)
            record_event(self.run.dir, "part_given_up", part=name, exit_code=code, reason=reason)
            return
        if code == SETTINGS_EXIT_CODE:
            raise SettingsError(process.last_words(1).removeprefix("outloop: "))
        # A trainer that was killed or stopped resumes from its checkpoint; one that failed would
        # again.
        may_restart = part in _RESTARTABLE or (
            part == "trainer" and (code in (0, RANK_KILLED_EXIT_CODE) or was_killed(code))
        )
        if not may_restart or wait_s is None:
            raise PartFailed(
                f"{name} ended with exit_code={code}; the last lines of {process.log_path}:\n"
                f"{process.last_words(_NUM_LAST_LINES)}"
            )
        self._due[name] = time.monotonic() + wait_s
        if wait_s:
            reason = end_reason(code, process.last_words(1))
            lines = self._lines_of_repeated_end(name, process, code)
            _log.warning("part_ended", name=name, reason=reason, restart_in_s=wait_s, **lines)
        else:
            self._has_shown.discard(name)
        self._exit_codes[name] = code

    def _lines_of_repeated_end(self, name: str, process: PartProcess, code: int) -> dict[str, str]:
        """Give the end of the log of a part that failed as before, once: the cause is above the
        sentence with which it ended."""
        if was_killed(code) or code != self._exit_codes.get(name) or name in self._has_shown:
            return {}
        self._has_shown.add(name)
        # structlog writes text under this name as it is, line by line.
        return {"exception": process.last_words(_NUM_LAST_LINES)}

    def _arguments_again(self, name: str, part: str) -> tuple[str, ...]:
        """With which a part is started again; forgets where its page was."""
        extra = self._commands[name][1:]
        if part == "viewer":
            self.reader.registry.forget_part("viewer")
            self._viewer_link = None
        if part == "router" and "--port" not in extra:
            url = router_url(self)
            if url is not None:
                extra = (*extra, "--port", url.rpartition(":")[2])
        return extra

    def wait_for(
        self,
        what: str,
        is_true: Callable[[], bool],
        timeout_s: float,
        *,
        goes_on: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait until `is_true`, watching the parts.

        Raises:
            DeadlineExceeded: `timeout_s` has passed since it began or last was true that it
                `goes_on`.
            PartFailed: a part ended meanwhile.
            BufferUnavailable: Redis was away for too long.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with self.redis.riding_out():
                if is_true():
                    return
                self.check()
                if goes_on():
                    deadline = time.monotonic() + timeout_s
            if self.stop.wait(WATCH_INTERVAL_S):
                return
            if time.monotonic() > deadline:
                raise DeadlineExceeded(who="launcher", phase="start", peer=what, after_s=timeout_s)

    def stop_all(self) -> None:
        """Stop every part: the trainer first, so that it can write its checkpoint."""
        for name in sorted(self.parts, key=lambda name: _stop_order(self._commands[name][0])):
            self.parts[name].stop(self._stop_timeout_s(self._commands[name][0]))
        if self._held_port is not None:
            self._held_port.close()

    def _stop_timeout_s(self, part: str) -> float:
        if part == "trainer":
            return _TRAINER_STOP_TIMEOUT_S
        settings = self.run.settings
        extra_s = {
            "router": settings.router.drain_timeout_s,
            "tracker": settings.telemetry.tracker_timeout_s,
        }
        return _STOP_TIMEOUT_S + extra_s.get(part, 0.0)


def _stop_order(part: str) -> int:
    """Lower is earlier: the trainer first, so that it can write its checkpoint."""
    return _FIRST_TO_STOP.index(part) if part in _FIRST_TO_STOP else len(_FIRST_TO_STOP)


@contextmanager
def running(
    settings: Settings,
    stop: threading.Event,
    *,
    gpus: GpuPlacement = NOT_PLACED,
    backoff: Backoff = DEFAULT_BACKOFF,
    placement: Placement = HERE,
) -> Iterator[Launcher]:
    """Redis (embedded, or the configured one) and an empty launcher; stops all parts at the end.

    This process trusts run.tls_ca_file from now on.
    """
    trust_authorities(settings.run.tls_ca_file)
    run_dir = (settings.run.dir / settings.run.name).absolute()
    make_run_folder(settings, run_dir)
    with ExitStack() as stack:
        redis_url, redis = settings.buffer.redis_url, None
        if redis_url is None:
            redis = stack.enter_context(
                EmbeddedRedis(
                    run_dir / "redis",
                    fsync=settings.buffer.fsync,
                    max_memory_mb=settings.buffer.max_memory_mb,
                )
            )
            redis_url = redis.url
        run = create_run(settings, run_dir, redis_url)
        enter(run)
        reader = BufferReader.connect(
            run, connect_client=partial(connect_sync, timeout_s=_REDIS_TIMEOUT_S)
        )
        stack.callback(reader.close)
        stack.enter_context(named_launcher(run.dir))
        launcher = Launcher(run, reader, stop, gpus, backoff, placement, redis)
        stack.callback(launcher.stop_all)
        yield launcher


def start_routers(launcher: Launcher) -> None:
    """Start router.num_processes routers behind one port, which stays theirs."""
    settings = launcher.run.settings.router
    extra: tuple[str, ...] = ()
    if settings.num_processes > 1:
        extra = ("--port", str(launcher.hold_port(settings.host, settings.port)))
    for index in range(settings.num_processes):
        launcher.start(f"router-{index}", "router", *extra)


def start_serving(launcher: Launcher) -> None:
    """Start servers and routers together; both load while the other does."""
    settings = launcher.run.settings
    start_routers(launcher)
    for index in range(settings.server.num_servers or len(settings.server.urls)):
        launcher.start(f"server-{index}", "server", "--index", str(index))


def start_frozen(launcher: Launcher) -> None:
    """Start the servers that hold earlier versions; each waits until a trainer keeps one."""
    for index in range(launcher.run.settings.server.num_frozen):
        launcher.start(f"frozen-{index}", "server", "--frozen", "--index", str(index))


def router_url(launcher: Launcher) -> str | None:
    """The router's URL, once it is registered."""
    facts = launcher.reader.registry.parts().get("router")
    return facts["url"] if facts else None
