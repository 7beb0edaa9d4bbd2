"""Start runs from Python, and read runs that were started anywhere.

Functions import what they need when they are called, so that `import outloop` is fast.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TextIO, cast

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

    from outloop.buffer.run import Run as RunHandle
    from outloop.buffer.settings import Settings
    from outloop.buffer.transcripts import Transcript

_STOP_TIMEOUT_S = 180.0
_WATCH_INTERVAL_S = 0.25


class Run:
    """A run in its folder, wherever it was started, up or not.

    Raises:
        SettingsError: the folder is not a run.
    """

    folder: Path
    """Absolute."""
    exit_code: int | None
    """0: finished. 130: stopped before. None: not ended, or started by another process."""

    def __init__(self, folder: str | Path) -> None:
        from outloop.buffer.run import load_run_settings

        self.folder = Path(folder).absolute()
        self._background: _Background | None = None
        self.exit_code = None
        load_run_settings(self.folder)

    @classmethod
    def _starting(cls, folder: Path) -> Run:
        """A run that this process is starting; it has no files yet."""
        run = cls.__new__(cls)
        run.folder = folder.absolute()
        run.exit_code = None
        run._background = None
        return run

    def __repr__(self) -> str:
        state = "up" if self.is_up else "not up"
        return f"<outloop.Run {str(self.folder)!r}, {state}>"

    @property
    def settings(self) -> Settings:
        """The resolved settings of the run."""
        from outloop.buffer.run import load_run_settings

        return load_run_settings(self.folder)

    @property
    def weights(self) -> Path:
        """Hugging Face folder of the trained weights; it exists when the run has finished."""
        return self.folder / "hf"

    @property
    def is_up(self) -> bool:
        """True while a launcher on this machine runs the run's parts."""
        if self._background is not None:
            return self._background.is_alive
        from outloop.engine.launch.launcher_process import find_launcher

        return find_launcher(self.folder) is not None

    def metrics(self) -> list[dict[str, Any]]:
        """One row for each step and each evaluation; `pandas.DataFrame(run.metrics())` works.

        Names are those of docs/metrics.md, and `step` and `time` (Unix seconds).
        """
        from outloop.buffer.telemetry import read_metrics

        return read_metrics(self.folder)

    def record(self, values: Mapping[str, float], *, step: int | None = None) -> None:
        """Add numbers of your own to the run's metrics, each as `user/NAME`.

        They reach the page, the trackers and Prometheus with the others.

        Args:
            step: that they belong to; None: the last one.
        """
        from outloop.buffer.telemetry import MetricsWriter

        if step is None:
            step = max((int(row["step"]) for row in self.metrics()), default=0)
        with MetricsWriter(self.folder) as writer:
            writer.write(step, {f"user/{name}": value for name, value in values.items()})

    def episodes(self, *, failed: bool = False, limit: int | None = None) -> list[Transcript]:
        """Closed episodes as text, in the order in which they ended.

        Those of the archive, and those that have no place in it yet. Without an archive: the last
        64 that failed, and others until a checkpoint contains their group or the group is dropped.

        Args:
            failed: only those that failed.
            limit: the newest so many; None: all.

        Raises:
            SettingsError: the copy of the policy's tokenizer in the folder cannot be read.
            BufferUnavailable: the run has no archive, and its Redis is gone.
        """
        from outloop.buffer.errors import BufferUnavailable
        from outloop.buffer.open_run import joined
        from outloop.buffer.trajectories.folder import FOLDER, MANIFEST
        from outloop.buffer.transcripts import Transcript, read_transcripts

        folder, known, found = self.folder / FOLDER, set[str](), list[Transcript]()
        if (folder / MANIFEST).exists():
            from outloop.buffer.trajectories.archived_transcripts import (
                archived_ids,
                read_archived_transcripts,
            )

            known = archived_ids(folder)
            found = read_archived_transcripts(folder, failed=failed, limit=limit)
        try:
            with joined(self.folder) as reader:
                held = list(read_transcripts(reader, self.folder, failed=failed))
        except BufferUnavailable:
            if not known:
                raise
            held = []
        found += [one for one in held if one.episode_id not in known]
        return found if limit is None else found[-limit:]

    def curve(self) -> Path | None:
        """Draw the learning curve so far; the picture, or None without points or matplotlib."""
        from outloop.engine.launch.run_summary import draw_curve

        return draw_curve(self.folder)

    def plot(self, *names: str) -> Figure:
        """The learning curve so far, or a chart for each metric of `names`; shown by a notebook.

        Raises:
            ImportError: matplotlib is not installed; it comes with outloop[plot].
            SettingsError: no step has one of `names`.
        """
        from outloop.buffer.errors import SettingsError
        from outloop.engine.launch.run_summary import curve_figure, metrics_figure, read_curve

        if not names:
            return curve_figure(read_curve(self.folder))
        rows = self.metrics()
        known = sorted({name for row in rows for name in row} - {"step", "time"})
        for name in names:
            if name not in known:
                raise SettingsError(f"metric {name!r} was not recorded; {', '.join(known)} were")
        return metrics_figure(rows, names)

    def follow(self, every_s: float = 1.0) -> Iterator[list[dict[str, Any]]]:
        """The rows of metrics that are new, again and again, until the run is not up any more.

        A failure of the run is raised by `wait`.
        """
        seen, is_up = 0, True
        while is_up:
            is_up = self.is_up
            rows = self.metrics()
            if len(rows) > seen:
                yield rows[seen:]
                seen = len(rows)
            elif is_up:
                # Another process writes the file, and cannot signal.
                threading.Event().wait(every_s)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the end of a run started with `wait=False`; its exit code, None after a timeout.

        Raises:
            OutloopError: the run failed; the message says why.
        """
        if self._background is not None and self._background.join(timeout_s):
            self.exit_code = self._background.exit_code
        return self.exit_code

    def stop(self, timeout_s: float = _STOP_TIMEOUT_S) -> None:
        """Stop the run after a checkpoint; the same `train` resumes from it.

        Does nothing if the run is not up.

        Raises:
            DeadlineExceeded: it is still up after `timeout_s`.
            Conflict: another `Run` object of this process started it.
        """
        from outloop.buffer.errors import Conflict, DeadlineExceeded

        late = DeadlineExceeded(
            who="outloop.Run.stop", phase="stop", peer="the launcher", after_s=timeout_s
        )
        if self._background is not None:
            self._background.stop.set()
            if not self._background.join(timeout_s):
                raise late
            self.exit_code = self._background.exit_code
            return
        import psutil

        from outloop.engine.launch.launcher_process import find_launcher

        process = find_launcher(self.folder)
        if process is None:
            return
        if process.pid == os.getpid():
            raise Conflict(
                f"the run in {str(self.folder)!r} was started by this process; call stop() of the "
                "Run that train(..., wait=False) returned"
            )
        try:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout_s)
        except psutil.NoSuchProcess:
            return
        except psutil.TimeoutExpired:
            raise late from None


def train(
    config: str | Path | Mapping[str, Any] | Settings,
    *,
    settings: Mapping[str, Any] | Sequence[str] = (),
    single_process: bool = False,
    wait: bool = True,
    console: Console | None = None,
    stop: threading.Event | None = None,
    on: Literal["here", "slurm", "ray"] = "here",
) -> Run:
    """Train a policy: start all parts on this machine, and watch them until the last step.

    A run that was stopped resumes from its last checkpoint.

    Args:
        config: a TOML file, a mapping of sections, or resolved settings.
        settings: overrides, `{"trainer.num_steps": 20, "env.rollout_function_path": "my:play"}`.
            A rollout function is given by its import path: other processes import it.
        single_process: run all parts in this process, for a debugger.
        wait: False: return at once; see `Run.wait` and `Run.stop`.
        console: where progress is shown; None: standard output, or nowhere with `wait=False`.
        stop: an event that ends the run when it is set.
        on: "slurm": inside a job of `outloop submit slurm`, place the parts in its components.
            "ray": place them on the nodes of a Ray cluster.

    Raises:
        SettingsError: the settings or the user's files are wrong; nothing was started.
        OutloopError: a part failed, or nothing could be learned.
    """
    from rich.console import Console

    from outloop.buffer.telemetry import LossyStream
    from outloop.engine.launch import training
    from outloop.engine.launch.model_folder import with_model_folder
    from outloop.engine.launch.settings_checks import check_before_start

    resolved = with_model_folder(_resolve(config, settings))
    check_before_start(resolved)
    run = Run._starting(resolved.run.dir / resolved.run.name)
    shown = console or Console(file=cast(TextIO, LossyStream(sys.stdout)), quiet=not wait)

    def work(stopping: threading.Event) -> int:
        if single_process:
            from outloop.single import train_in_one_process

            return train_in_one_process(resolved, stop=stopping, console=shown)
        if on == "slurm":
            from outloop.engine.launch.deploy.slurm import placed_by_slurm

            placement = placed_by_slurm(resolved)
            return training.train(resolved, stop=stopping, console=shown, placement=placement)
        if on == "ray":
            from outloop.engine.launch.deploy.ray_placement import placed_by_ray

            with placed_by_ray(resolved) as (placed, by_ray):
                return training.train(placed, stop=stopping, console=shown, placement=by_ray)
        return training.train(resolved, stop=stopping, console=shown)

    if wait:
        run.exit_code = work(stop or threading.Event())
    else:
        run._background = _Background(work, stop or threading.Event())
    return run


def serve(
    config: str | Path | Mapping[str, Any] | Settings,
    *,
    settings: Mapping[str, Any] | Sequence[str] = (),
    stop: threading.Event | None = None,
) -> Serving:
    """Serve a policy behind the router, without training: Redis, servers and router.

    A context manager: entering waits until the policy answers, leaving stops the parts.

    Raises:
        SettingsError: the settings are wrong; nothing was started.
    """
    from outloop.engine.launch.model_folder import with_model_folder
    from outloop.engine.launch.settings_checks import check_before_start

    resolved = with_model_folder(_resolve(config, settings))
    check_before_start(resolved, plays=False)
    return Serving(resolved, stop or threading.Event())


class Serving:
    """A served policy; addresses and keys are set inside `with`."""

    base_url: str
    """Of the OpenAI-compatible API, ending in /v1; each episode has an address of its own."""
    admin_url: str
    """Of the routes that open and close episodes."""
    runner_key: str
    """The key to open episodes and to claim tasks."""
    admin_key: str
    """The key to control the router."""
    redis_url: str
    """Of the run's Redis, without password."""
    keys_file: Path
    """Where the keys are, as JSON."""

    def __init__(self, settings: Settings, stop: threading.Event) -> None:
        self._settings = settings
        self._stop = stop
        self._is_ready = threading.Event()
        self._background: _Background | None = None
        self.run = Run._starting(settings.run.dir / settings.run.name)

    def __enter__(self) -> Serving:
        self._background = _Background(self._serve, self._stop)
        while not self._is_ready.wait(_WATCH_INTERVAL_S):
            if self._background.join(0.0):
                break
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._background is not None
        self._stop.set()
        self._background.join(_STOP_TIMEOUT_S)

    def wait(self) -> None:
        """Wait until the policy is not served any more.

        Raises:
            OutloopError: a part failed.
        """
        assert self._background is not None
        while not self._background.join(_WATCH_INTERVAL_S):
            pass

    def _serve(self, stop: threading.Event) -> int:
        from outloop.engine.launch import serving

        serving.serve(self._settings, stop=stop, on_ready=self._set_addresses)
        return 0

    def _set_addresses(self, run: RunHandle, url: str) -> None:
        self.base_url, self.admin_url = f"{url}/v1", url
        self.runner_key, self.admin_key = run.keys.runner_key, run.keys.admin_key
        self.redis_url = run.redis_address
        self.keys_file = run.keys_file
        self._is_ready.set()


class _Background:
    """Runs `work(stop)` in a thread, which ends after all parts that it started."""

    def __init__(self, work: Callable[[threading.Event], int], stop: threading.Event) -> None:
        self.stop = stop
        self.exit_code: int | None = None
        self._error: BaseException | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name="outloop", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_s: float | None) -> bool:
        """True once it has ended; raises what it raised, once."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        error, self._error = self._error, None
        if error is not None:
            raise error
        return True

    def _run(self) -> None:
        try:
            self.exit_code = self._work(self.stop)
        except BaseException as error:  # noqa: BLE001 - join raises it
            self._error = error


def _resolve(
    config: str | Path | Mapping[str, Any] | Settings,
    overrides: Mapping[str, Any] | Sequence[str],
) -> Settings:
    from outloop.buffer.settings import Settings, load_settings, settings_of, with_overrides

    words = tuple(overrides) if not isinstance(overrides, Mapping) else _as_words(overrides)
    if isinstance(config, Settings):
        return with_overrides(config, words) if words else config
    if isinstance(config, Mapping):
        return settings_of(config, words, folder=Path.cwd(), source="config")
    return load_settings(Path(config), words)


def _as_words(overrides: Mapping[str, Any]) -> tuple[str, ...]:
    """As arguments of `--set`: JSON's numbers, strings, booleans and lists are valid TOML."""
    return tuple(
        f"{name}={json.dumps(str(value) if isinstance(value, Path) else value)}"
        for name, value in overrides.items()
    )
