"""Starts, watches and stops the parts of one run on one machine, and its Redis.

Decides the order of starting and stopping, which parts are started again, and the run's exit code.
Parts meet through Redis and HTTP only; while Redis is away, for buffer.max_outage_s at most, the
launcher waits with them. When `train` or `serve` returns or raises, no process that it started is
left.
"""

from __future__ import annotations

import difflib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import psutil
import structlog
from rich.console import Console

from outloop.buffer.chat_format import chat_format_of
from outloop.buffer.errors import (
    RANK_KILLED_EXIT_CODE,
    SETTINGS_EXIT_CODE,
    BufferLost,
    BufferUnavailable,
    DeadlineExceeded,
    PartFailed,
    SettingsError,
    WritesRefused,
)
from outloop.buffer.events import record_event
from outloop.buffer.reader import BufferReader, init_run
from outloop.buffer.redis.client import connect_sync
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.redis.refused_writes import ended_for_room
from outloop.buffer.redis.requirements import read_server
from outloop.buffer.run import Run, create_run, make_run_folder, read_secret
from outloop.buffer.settings import Settings
from outloop.buffer.settings.recipes import recipe_sentence
from outloop.buffer.tls import check_certificate, trust_authorities
from outloop.buffer.trackers.tracker import check_tracker, part_name
from outloop.buffer.trajectories.object_store import ObjectStore
from outloop.buffer.trajectories.trained import keeps_trajectories
from outloop.engine.launch.child_process import PartProcess, part_command
from outloop.engine.launch.console import RunProgress
from outloop.engine.launch.cpu_usage import CpuUsage
from outloop.engine.launch.gpu_placement import NOT_PLACED, GpuPlacement, place_gpus
from outloop.engine.launch.nccl_release import check_nccl
from outloop.engine.launch.placement import HERE, Placement
from outloop.engine.launch.restarts import (
    DEFAULT_BACKOFF,
    Backoff,
    Restarts,
    end_reason,
    was_killed,
)
from outloop.engine.launch.run_summary import draw_curve, result_table
from outloop.engine.port_reservation import hold_port
from outloop.engine.publish.server_client import ServerClient
from outloop.engine.serve.sglang.arguments import check_arguments
from outloop.engine.visible_gpus import list_gpus

LAUNCHER_FILE = "launcher.json"
_STOP_TIMEOUT_S = 15.0
_TRAINER_STOP_TIMEOUT_S = 60.0
_PARTS_THAT_END = frozenset({"trainer", "runner"})
"""Parts that end when the run is finished."""
_WATCH_INTERVAL_S = 0.25
_REDIS_TIMEOUT_S = 5.0
"""One that does not answer for so long is away: stopped, or behind a network that is."""
_WRITE_INTERVAL_S = 1.0
"""How often Redis is asked whether it can write."""
_FULL_WAIT_S = 1.0
"""Before a Redis that ended for want of room is started again."""
_MODEL_FILES = {
    "config.json": "config.json",
    "tokenizer.json": "tokenizer.json",
    "model.safetensors": "model*.safetensors",
}
"""What a model folder must hold: the name for the user, and the pattern that finds it."""
_RESTARTABLE = frozenset({"router", "runner", "server", "archiver", "monitor", "tracker", "viewer"})
"""Parts without state of their own: a new process continues where the old one ended."""
_REDIS = "redis"
_OPTIONAL = frozenset({"archiver", "monitor", "tracker", "viewer"})
"""Parts without which a run goes on."""

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
        self.usage = CpuUsage()
        self._redis = redis
        self._away_since: float | None = None
        """When Redis was first found away, by the monotonic clock; None: it answers."""
        self.write_obstacle: str | None = None
        """Why Redis cannot write, as it was asked last; whoever writes waits then."""
        self._writes_asked_at = 0.0
        self._viewer_link: str | None = None
        self._restarts = Restarts(backoff)
        self._started: dict[str, float] = {_REDIS: time.monotonic()}
        self._due: dict[str, float] = {}
        """When each part that ended is started again, by the monotonic clock."""
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
        settings = self.run.settings.trajectories
        is_kept = keeps_trajectories(settings)
        if settings.enabled and not is_kept:
            raise SettingsError(
                "trajectories.enabled=true needs the package pyarrow, which is not installed; run "
                "pip install 'outloop[view]', or set it to false"
            )
        if not is_kept:
            self.reader.trajectories.abandon()
            return
        self.reader.trajectories.open(settings.max_waiting_tokens)
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
            BufferUnavailable: Redis is away; see `riding_out`.
            BufferLost: it came back empty.
        """
        self._check_redis()
        self.reader.check_run()
        if self._away_since is not None:
            _log.warning("redis_is_back", after_s=round(time.monotonic() - self._away_since, 2))
            self._away_since = None
        self._ask_redis_to_write()
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

    @contextmanager
    def riding_out(self) -> Iterator[None]:
        """Let what is done within fail because Redis is away, for buffer.max_outage_s.

        Raises:
            BufferUnavailable: it was away for longer.
            BufferLost: it came back empty.
        """
        try:
            yield
        except BufferLost:
            raise
        except BufferUnavailable as error:
            max_s = self.run.settings.buffer.outage_s
            now = time.monotonic()
            if self._away_since is None:
                self._away_since = now
                what = "redis_is_away"
                if isinstance(error, WritesRefused):
                    what = "redis_cannot_write"
                _log.warning(what, max_s=max_s, error=str(error))
            if now - self._away_since >= max_s:
                raise BufferUnavailable(
                    f"{error}. The run waited for it for buffer.max_outage_s={max_s:g}; start the "
                    "same command again when it is back"
                ) from error

    def _check_redis(self) -> None:
        """Start the run's own server again if it ended, after its back-off.

        Raises:
            PartFailed: it ended too often in a row soon after its start.
        """
        code = None if self._redis is None else self._redis.exit_code
        if self._redis is None or code is None:
            return
        reason = end_reason(code, "")
        now = time.monotonic()
        if _REDIS not in self._due:
            words, folder = self._redis.last_words(), self._redis.data_dir
            obstacle = ended_for_room(code, words, folder)
            if obstacle is None:
                wait_s = self._restarts.wait_s(_REDIS, lived_s=now - self._started[_REDIS])
            else:
                # Until there is room it ends with each write; who writes has a bound.
                self._note_obstacle(obstacle)
                wait_s, self._writes_asked_at = _FULL_WAIT_S, now + 3 * _FULL_WAIT_S
            if wait_s is None:
                raise PartFailed(
                    f"the run's Redis ended too often ({reason}); its last lines:\n"
                    f"{self._redis.last_words()}"
                )
            self._due[_REDIS] = now + wait_s
        if now >= self._due[_REDIS]:
            del self._due[_REDIS]
            _log.warning("part_restarted", name=_REDIS, exit_code=code, reason=reason)
            record_event(self.run.dir, "part_restarted", part=_REDIS, exit_code=code, reason=reason)
            self._started[_REDIS] = now
            self._redis.start_again()

    def _ask_redis_to_write(self) -> None:
        """Find out whether it can, now and then. It ends nothing here: each writer has its bound.

        Raises:
            BufferUnavailable: Redis does not answer.
        """
        now = time.monotonic()
        if now - self._writes_asked_at < _WRITE_INTERVAL_S:
            return
        self._writes_asked_at = now
        self._note_obstacle(self.reader.write_obstacle())

    def _note_obstacle(self, found: str | None) -> None:
        before, self.write_obstacle = self.write_obstacle, found
        if found is not None and before is None:
            record_event(self.run.dir, "redis_cannot_write", reason=found)
        if found is None and before is not None:
            record_event(self.run.dir, "redis_writes_again")

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
                f"{process.last_words()}"
            )
        self._due[name] = time.monotonic() + wait_s
        if wait_s:
            reason = end_reason(code, process.last_words(1))
            _log.warning("part_ended", name=name, reason=reason, restart_in_s=wait_s)

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

    def sample_usage(self) -> None:
        """Read every part's CPU time."""
        pids = {name: process.pid for name, process in self.parts.items()}
        if self._redis is not None:
            pids[_REDIS] = self._redis.pid
        self.usage.sample(pids)

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
            with self.riding_out():
                if is_true():
                    return
                self.check()
                if goes_on():
                    deadline = time.monotonic() + timeout_s
            if self.stop.wait(_WATCH_INTERVAL_S):
                return
            if time.monotonic() > deadline:
                raise DeadlineExceeded(who="launcher", phase="start", peer=what, after_s=timeout_s)

    def stop_all(self) -> None:
        """Stop every part: the trainer first, so that it can write its checkpoint."""
        order = sorted(
            self.parts,
            key=lambda name: (
                ("trainer", "runner", "router").index(kind)
                if (kind := self._commands[name][0]) in ("trainer", "runner", "router")
                else 9
            ),
        )
        for name in order:
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


@contextmanager
def named_launcher(run_dir: Path) -> Iterator[None]:
    """While it lasts, the run's folder names this process as the one that leads its parts."""
    path = run_dir / LAUNCHER_FILE
    process = psutil.Process()
    path.write_text(json.dumps({"pid": process.pid, "created": process.create_time()}))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def find_launcher(run_dir: Path) -> psutil.Process | None:
    """The process that leads the run's parts on this machine; None when there is none."""
    try:
        named = json.loads((run_dir / LAUNCHER_FILE).read_text())
        process = psutil.Process(named["pid"])
        return process if process.create_time() == named["created"] else None
    except (FileNotFoundError, psutil.NoSuchProcess):
        return None


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
    run_dir = settings.run.dir / settings.run.name
    make_run_folder(settings, run_dir)
    with ExitStack() as stack:
        redis_url, redis = settings.buffer.redis_url, None
        if redis_url is None:
            redis = stack.enter_context(
                EmbeddedRedis(
                    (run_dir / "redis").absolute(),
                    fsync=settings.buffer.fsync,
                    max_memory_mb=settings.buffer.max_memory_mb,
                )
            )
            redis_url = redis.url
        run = create_run(settings, run_dir.absolute(), redis_url)
        _enter(run)
        reader = BufferReader.connect(
            run, connect_client=partial(connect_sync, timeout_s=_REDIS_TIMEOUT_S)
        )
        stack.callback(reader.close)
        stack.enter_context(named_launcher(run.dir))
        launcher = Launcher(run, reader, stop, gpus, backoff, placement, redis)
        stack.callback(launcher.stop_all)
        yield launcher


def check_before_start(settings: Settings, *, plays: bool = True) -> None:
    """Refuse what can be refused before any model is loaded, then make the run's folder.

    That is: the model's folder and limits, SGLang's arguments, rollout function, agent command,
    verifier and tasks where they are given. The user's code is imported in a process of its own, so
    that it cannot disturb the launcher.

    Args:
        plays: as `check_settings`.

    Raises:
        SettingsError: with the sentence that says what to change.
    """
    check_settings(settings, plays=plays)
    make_run_folder(settings, settings.run.dir / settings.run.name)


def check_settings(settings: Settings, *, plays: bool = True) -> None:
    """The refusals of `check_before_start`; makes no folder.

    Args:
        plays: False for a run without runners of its own: it needs neither a rollout function nor
            an agent command.

    Raises:
        SettingsError: with the sentence that says what to change.
    """
    _check_watchers(settings)
    for section, endpoint in (("router", settings.router), ("server", settings.server)):
        check_certificate(section, endpoint, ca_file=settings.run.tls_ca_file)
    _check_model(settings)
    if settings.server.num_servers or settings.server.urls:
        if settings.server.kind == "sglang" and settings.server.num_servers:
            check_arguments(settings)
            check_nccl(settings)
        env = settings.env
        if plays or env.rollout_function_path is not None or env.agent_command is not None:
            _check_environment(settings)


def _check_watchers(settings: Settings) -> None:
    """What would only be found out while the run goes on, without stopping it."""
    trackers = settings.telemetry.trackers
    for name in trackers:
        check_tracker(name)
    if settings.trajectories.copy_to is not None:
        ObjectStore(settings.trajectories.copy_to)
    if "otlp" in trackers and not keeps_trajectories(settings.trajectories):
        raise SettingsError(
            'telemetry.trackers="otlp" makes spans of kept trajectories, and none are kept; set '
            "trajectories.enabled = true, and install outloop[view]"
        )
    if settings.alarms.enabled and settings.alarms.webhook_file is not None:
        read_secret(settings.alarms.webhook_file, "alarms.webhook_file")


def _check_model(settings: Settings) -> None:
    """Files of the model, and limits that contradict it or each other."""
    folder, limit = settings.model.path, settings.model.max_context_tokens
    if not folder.is_dir():
        near = difflib.get_close_matches(
            folder.name, [path.name for path in folder.parent.glob("*/")], n=1
        )
        hint = f"did you mean {str(folder.parent / near[0])!r}? " if near else ""
        raise SettingsError(
            f"model.path={str(folder)!r} does not exist; {hint}give a Hugging Face folder, or a "
            'repository of their hub such as "Qwen/Qwen3-0.6B", or make a small one with '
            "`outloop new-policy --out DIR`"
        )
    for name, pattern in _MODEL_FILES.items():
        if not any(path.is_file() for path in folder.glob(pattern)):
            raise SettingsError(
                f"model.path={str(folder)!r} holds no {name}; "
                "give a Hugging Face folder with config.json, tokenizer.json and model.safetensors"
            )
    if settings.model.renderer == "auto":
        chat_format_of(folder)
    known = json.loads((folder / "config.json").read_text()).get("max_position_embeddings")
    if isinstance(known, int) and limit > known:
        raise SettingsError(
            f"model.max_context_tokens={limit} exceeds max_position_embeddings={known} of "
            f"{folder / 'config.json'}: the model knows no later position. Lower the setting, or "
            "take a model with a longer context (`outloop new-policy --max-context-tokens`)"
        )
    if settings.sampling.max_new_tokens >= limit:
        raise SettingsError(
            f"sampling.max_new_tokens={settings.sampling.max_new_tokens} with "
            f"model.max_context_tokens={limit} leaves no room for a prompt; lower the first or "
            "raise the second"
        )
    trainer = settings.trainer
    if trainer.mode == "rl" and limit > trainer.max_microbatch_tokens:
        raise SettingsError(
            f"model.max_context_tokens={limit} exceeds trainer.max_microbatch_tokens="
            f"{trainer.max_microbatch_tokens}: an episode could not be trained. Raise the second "
            "or lower the first."
        )


def _model_line(settings: Settings) -> str:
    """Which weights and chat format the run has, for a person."""
    model = settings.model
    where = f"{model.repository} at {model.revision}" if model.repository else str(model.path)
    chosen = model.renderer
    if chosen == "auto":
        chosen = f"{chat_format_of(model.path)}, by the model"
    return f"model {where}; renderer {chosen}"


def _check_environment(settings: Settings) -> None:
    """What the user wrote: code, command and tasks."""
    answer = subprocess.run(
        [sys.executable, "-m", "outloop.envs.runner.preflight", settings.model_dump_json()],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if answer.returncode != 0:
        sentence = answer.stderr.strip().splitlines()
        raise SettingsError(sentence[-1] if sentence else "the rollout function check failed")


def is_finished(settings: Settings, run_dir: Path) -> bool:
    """The run in `run_dir` has made all its steps and written its weights."""
    done = [
        int(path.name.removeprefix("step_"))
        for path in (run_dir / "checkpoints").glob("step_*")
        if path.name.removeprefix("step_").isdecimal()
    ]
    is_resumed = settings.trainer.mode == "rl" and settings.trainer.resume
    is_written = (run_dir / "hf/config.json").is_file()
    return is_resumed and is_written and max(done, default=-1) >= settings.trainer.num_steps


def make_run(settings: Settings) -> Run:
    """Write the run's folder and enter it in Redis, for parts that are started one by one.

    A run that is there with the same settings is left as it is: its parts may be running.

    Raises:
        SettingsError: buffer.redis_url is not given.
        BufferUnavailable: Redis does not answer.
    """
    redis_url = settings.buffer.redis_url
    if redis_url is None:
        raise SettingsError(
            "buffer.redis_url is missing; parts that are started one by one meet in a Redis of "
            "their own: give buffer.redis_url='redis://HOST:PORT'"
        )
    run = create_run(settings, (settings.run.dir / settings.run.name).absolute(), redis_url)
    try:
        BufferReader.connect(run).close()
    except (BufferUnavailable, SettingsError):
        _enter(run)
    return run


def _enter(run: Run) -> None:
    """Create the run in Redis, if that can hold it.

    Raises:
        SettingsError: it cannot, or a setting differs that a run cannot change.
        BufferUnavailable: it does not answer.
    """
    for url in (run.redis_url, *run.shard_urls):
        with closing(connect_sync(url)) as client:
            server = read_server(client)
        if server is not None:
            server.check()
    init_run(run)


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


def train(
    settings: Settings,
    *,
    stop: threading.Event,
    console: Console,
    placement: Placement = HERE,
) -> int:
    """Run to the last step and return the exit code: 0 finished, 130 stopped, 1 failed.

    Args:
        placement: where parts run; elsewhere than here the engine gives them their GPUs.

    Raises:
        SettingsError: a part refuses its settings, or that nothing can be learned.
        PartFailed: a part ended that cannot be restarted.
        DeadlineExceeded: a part did not come up.
        BufferUnavailable: Redis was away for longer than buffer.max_outage_s.
        BufferLost: it came back empty.
    """
    run_dir = settings.run.dir / settings.run.name
    if is_finished(settings, run_dir):
        console.print(
            f"run {settings.run.name!r} has made all of its {settings.trainer.num_steps} steps; "
            f"its weights are in {run_dir / 'hf'}. To go on, raise trainer.num_steps; to begin "
            "again, choose another run.name",
            highlight=False,
            soft_wrap=True,
        )
        console.print(result_table(run_dir.absolute()))
        return 0
    has_servers = settings.trainer.mode == "rl"
    gpus = NOT_PLACED
    if placement is HERE:
        gpus = place_gpus(settings, list_gpus(), has_servers=has_servers)
    with running(settings, stop, gpus=gpus, placement=placement) as launcher:
        run = launcher.run
        progress = RunProgress(run.dir, num_steps=settings.trainer.num_steps, console=console)
        console.print(f"run folder {settings.run.dir / settings.run.name}", highlight=False)
        console.print(_model_line(settings), highlight=False, markup=False, soft_wrap=True)
        if recipe := recipe_sentence(dict(settings.trainer), dict(settings.buffer)):
            console.print(recipe, highlight=False, markup=False, soft_wrap=True)
        for line in gpus.lines():
            console.print(line, highlight=False, markup=False)
        record_event(run.dir, "started")
        launcher.start_archiver()
        launcher.start_watchers()
        if has_servers:
            start_serving(launcher)
            start_frozen(launcher)
        else:
            start_routers(launcher)
        launcher.start("trainer", "trainer")
        for index in range(settings.env.num_runners):
            launcher.start(f"runner-{index}", "runner")
        shown_link: str | None = None
        shown_obstacle: str | None = None
        with progress:
            while not stop.is_set():
                with launcher.riding_out():
                    launcher.check()
                    shown_obstacle = _show_obstacle(launcher, shown_obstacle, console)
                    if launcher.has_trained:
                        break
                    if (link := launcher.viewer_link()) not in (None, shown_link):
                        shown_link = link
                        console.print(
                            f"its page {link}", highlight=False, markup=False, soft_wrap=True
                        )
                    if progress.update(launcher.reader.registry.statuses()):
                        launcher.usage.mark("first_step")
                launcher.sample_usage()
                stop.wait(_WATCH_INTERVAL_S)
            progress.update({})
        launcher.usage.write(run.dir / "usage.json")
        record_event(run.dir, "stopped" if stop.is_set() else "finished")
    if stop.is_set():
        draw_curve(run.dir)
        console.print("stopped; start the same command again to resume from the last checkpoint")
        return 130
    _show_result(run, console)
    return 0


def _show_obstacle(launcher: Launcher, shown: str | None, console: Console) -> str | None:
    """Say that Redis stopped writing, or writes again; what is shown now."""
    found = launcher.write_obstacle
    if (found is None) == (shown is None):
        return shown
    sentence = found or "Redis writes again; the run goes on"
    if found is not None:
        bound_s = launcher.run.settings.buffer.outage_s
        sentence += f". The run waits for it, for buffer.max_outage_s={bound_s:g} at most"
    console.print(sentence, style="yellow", highlight=False, markup=False, soft_wrap=True)
    return found


def _show_result(run: Run, console: Console) -> None:
    """What a finished run has become, and how to look into it."""
    console.print(result_table(run.dir))
    picture = draw_curve(run.dir)
    if picture is not None:
        console.print(f"curve {picture}", highlight=False, soft_wrap=True)
    if keeps_trajectories(run.settings.trajectories):
        shown = run.settings.run.dir / run.settings.run.name
        console.print(f"read its episodes: outloop view {shown}", highlight=False, soft_wrap=True)


def serve(
    settings: Settings, *, stop: threading.Event, on_ready: Callable[[Run, str], None]
) -> None:
    """Redis, servers and router until `stop` is set; `on_ready` gets the run and the router's URL.

    Raises:
        SettingsError: a part refuses its settings.
        PartFailed: a part ended that cannot be restarted.
        DeadlineExceeded: a part did not come up.
    """
    gpus = place_gpus(settings, list_gpus(), has_trainer=False)
    with running(settings, stop, gpus=gpus) as launcher:
        launcher.start_archiver()
        launcher.start_watchers()
        start_and_wait(launcher)
        if stop.is_set():
            return
        name_weights(launcher, settings.server.start_timeout_s)
        url = router_url(launcher)
        assert url is not None
        on_ready(launcher.run, url)
        while not stop.wait(_WATCH_INTERVAL_S):
            with launcher.riding_out():
                launcher.check()


def refuse_frozen(settings: Settings, where: str) -> None:
    """Refuse servers of earlier versions where none would be started.

    Raises:
        SettingsError: the settings ask for some.
    """
    if settings.server.num_frozen:
        raise SettingsError(
            f"server.num_frozen={settings.server.num_frozen}: {where} starts no servers of earlier "
            "versions; `outloop train` on one machine does. Set server.num_frozen = 0 (and "
            "server.frozen_every = 0)"
        )


def start_and_wait(launcher: Launcher) -> None:
    """Start servers and router and wait until all are registered, or until a stop.

    Raises:
        SettingsError: the settings ask for servers of earlier versions, which a trainer keeps.
    """
    settings = launcher.run.settings
    refuse_frozen(settings, "what serves without a trainer")
    start_serving(launcher)
    expected = settings.server.num_servers or len(settings.server.urls)
    timeout_s = settings.server.start_timeout_s
    launcher.wait_for(
        "servers", lambda: len(launcher.reader.registry.servers()) >= expected, timeout_s
    )
    launcher.wait_for("router", lambda: router_url(launcher) is not None, timeout_s)


def name_weights(launcher: Launcher, timeout_s: float) -> None:
    """Enter what the servers loaded as the next version, since no trainer publishes one."""
    version = launcher.reader.highest_version() + 1
    launcher.reader.announce_version(version, None)
    for entry in launcher.reader.registry.servers():
        client = ServerClient(entry.server_id, entry.url, key=launcher.run.server_key)
        client.set_version(str(version), time.monotonic() + timeout_s)
        client.close()
        launcher.reader.registry.set_server_version(entry.server_id, version, quarantined=False)
    launcher.reader.acknowledge_version(version)


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set; the second Ctrl-C interrupts at once."""
    stop = threading.Event()

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
