"""`outloop train`: a run from its start to the last step."""

from __future__ import annotations

import threading
from pathlib import Path

from rich.console import Console

from outloop.buffer.chat_format import chat_format_of
from outloop.buffer.errors import SettingsError
from outloop.buffer.events import record_event
from outloop.buffer.rich_terminal import show, show_table
from outloop.buffer.run import Run
from outloop.buffer.settings import Settings
from outloop.buffer.settings.recipes import recipe_sentence
from outloop.buffer.trajectories.trained import keeps_trajectories
from outloop.engine.launch.console import RunProgress
from outloop.engine.launch.gpu_placement import NOT_PLACED, place_gpus
from outloop.engine.launch.launcher import (
    WATCH_INTERVAL_S,
    Launcher,
    running,
    start_frozen,
    start_routers,
    start_serving,
)
from outloop.engine.launch.model_folder import read_model_config
from outloop.engine.launch.placement import HERE, Placement
from outloop.engine.launch.plan.memory import ModelShape
from outloop.engine.launch.run_summary import draw_curve, result_table
from outloop.engine.machine.visible_gpus import list_gpus

_SMALL_PARAMS, _SMALL_RATE = 10e6, 1e-5
_LARGE_PARAMS, _LARGE_RATE = 300e6, 5e-4


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
        show(
            console,
            f"run {settings.run.name!r} has made all of its {settings.trainer.num_steps} steps; "
            f"its weights are in {run_dir / 'hf'}. To go on, raise trainer.num_steps; to begin "
            "again, choose another run.name",
        )
        show_table(console, result_table(run_dir.absolute()))
        return 0
    has_servers = settings.trainer.mode == "rl"
    gpus = NOT_PLACED
    if placement is HERE:
        gpus = place_gpus(settings, list_gpus(), has_servers=has_servers)
    with running(settings, stop, gpus=gpus, placement=placement) as launcher:
        run = launcher.run
        progress = RunProgress(run.dir, num_steps=settings.trainer.num_steps, console=console)
        show(console, f"run folder {settings.run.dir / settings.run.name}")
        show(console, _model_line(settings))
        if sentence := unfit_rate(settings):
            show(console, f"warning: {sentence}", style="yellow")
        if recipe := recipe_sentence(dict(settings.trainer), dict(settings.buffer)):
            show(console, recipe)
        for line in gpus.lines():
            show(console, line)
        record_event(run.dir, "started")
        _start_parts(launcher)
        shown_link: str | None = None
        shown_obstacle: str | None = None
        with progress:
            while not stop.is_set():
                with launcher.redis.riding_out():
                    launcher.check()
                    shown_obstacle = _show_obstacle(launcher, shown_obstacle, console)
                    if launcher.has_trained:
                        # What the trainer said last.
                        progress.update(launcher.reader.registry.statuses())
                        break
                    if (link := launcher.viewer_link()) not in (None, shown_link):
                        shown_link = link
                        show(console, f"its page {link}")
                    progress.update(launcher.reader.registry.statuses())
                stop.wait(WATCH_INTERVAL_S)
            progress.update({})
        record_event(run.dir, "stopped" if stop.is_set() else "finished")
    if stop.is_set():
        draw_curve(run.dir)
        show(console, "stopped; start the same command again to resume from the last checkpoint")
        return 130
    _show_result(run, console)
    return 0


def _start_parts(launcher: Launcher) -> None:
    """All of them, in the order in which others wait for them."""
    settings = launcher.run.settings
    launcher.start_archiver()
    launcher.start_watchers()
    if settings.trainer.mode == "rl":
        start_serving(launcher)
        start_frozen(launcher)
    else:
        start_routers(launcher)
    launcher.start("trainer", "trainer")
    for index in range(settings.env.num_runners):
        launcher.start(f"runner-{index}", "runner")


def _show_obstacle(launcher: Launcher, shown: str | None, console: Console) -> str | None:
    """Say that Redis stopped writing, or writes again; what is shown now."""
    found = launcher.redis.write_obstacle
    if (found is None) == (shown is None):
        return shown
    sentence = found or "Redis writes again; the run goes on"
    if found is not None:
        bound_s = launcher.run.settings.buffer.outage_s
        sentence += f". The run waits for it, for buffer.max_outage_s={bound_s:g} at most"
    show(console, sentence, style="yellow")
    return found


def _show_result(run: Run, console: Console) -> None:
    """What a finished run has become, and how to look into it."""
    show_table(console, result_table(run.dir))
    picture = draw_curve(run.dir)
    if picture is not None:
        show(console, f"curve {picture}")
    if run.settings.trainer.mode == "rl" and keeps_trajectories(run.settings.trajectories):
        shown = run.settings.run.dir / run.settings.run.name
        show(console, f"read its episodes: outloop view {shown}")


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


def unfit_rate(settings: Settings) -> str:
    """A sentence if the learning rate is that of models of another size; empty if it fits."""
    rate = settings.trainer.learning_rate
    try:
        config, source = read_model_config(settings)
        num_params = ModelShape.of_config(config, source=source).num_params
    except SettingsError:
        # A model whose parameters cannot be counted.
        return ""
    size = f"the model has {num_params / 1e6:,.2f} million parameters"
    if num_params < _SMALL_PARAMS and rate <= _SMALL_RATE:
        return (
            f"{size}, and trainer.learning_rate={rate:g} is for models of some billion: it will "
            "hardly learn. A random model of this size takes 1e-3 and more"
        )
    if num_params > _LARGE_PARAMS and rate >= _LARGE_RATE:
        return (
            f"{size}, and trainer.learning_rate={rate:g} is for models of a million: it ruins a "
            "large one. 1e-6 is usual"
        )
    return ""


def _model_line(settings: Settings) -> str:
    """Which weights and chat format the run has, for a person."""
    model = settings.model
    where = f"{model.repository} at {model.revision}" if model.repository else str(model.path)
    chosen = model.renderer
    if chosen == "auto":
        chosen = f"{chat_format_of(model.path)}, by the model"
    return f"model {where}; renderer {chosen}"
