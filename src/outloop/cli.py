"""The `outloop` command.

Owns: names of subcommands and flags, exit codes, and how an error is shown. Does not own: any
behaviour; each subcommand calls one function of one part. Invariant: a part's process imports only
that part; an OutloopError is shown as one sentence, anything else with its traceback.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import click

from outloop.buffer.cli.buffer import buffer
from outloop.buffer.cli.tasks import tasks
from outloop.buffer.errors import (
    RANK_KILLED_EXIT_CODE,
    OutloopError,
    RankKilled,
    SettingsError,
)
from outloop.converting import convert
from outloop.debugging import replay_recorded, replay_step, rollout, train_recorded

HANG_EXIT_CODE = 3
"""Of a trainer that made no progress for trainer.hang_timeout_s."""
_RUN = click.option(
    "--run",
    "run_dir",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder of the run to join.",
)
_SET = click.option(
    "--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override one setting."
)
_ADVERTISE = click.option(
    "--advertise",
    metavar="HOST",
    help="Name or address under which other machines reach this one.",
)
_CONFIG = click.argument("config", type=click.Path(path_type=Path))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="outloop")
def cli() -> None:
    """Train agents by reinforcement learning, with the loop outside."""


@cli.command()
@_CONFIG
@_SET
@click.option("--rollout-function-path", metavar="PACKAGE.MODULE:FUNCTION")
@click.option("--agent-command", metavar="'PROGRAM {task_file}'", help="In place of a function.")
@click.option("--verifier", metavar="MODULE:FUNCTION or COMMAND", help="Scores an agent command.")
@click.option("--single-process", is_flag=True, help="All parts in this process, for a debugger.")
def train(
    config: Path,
    overrides: tuple[str, ...],
    rollout_function_path: str | None,
    agent_command: str | None,
    verifier: str | None,
    single_process: bool,
) -> None:
    """Train the policy of CONFIG: starts every part on this machine and watches them."""
    from rich.console import Console

    from outloop.buffer.settings import load_settings
    from outloop.buffer.telemetry import configure_logging
    from outloop.engine.launch import launcher

    for name, value in (
        ("rollout_function_path", rollout_function_path),
        ("agent_command", agent_command),
        ("verifier", verifier),
    ):
        if value is not None:
            # JSON's strings are TOML's.
            overrides = (*overrides, f"env.{name}={json.dumps(value)}")
    settings = load_settings(config, overrides)
    configure_logging("launcher", settings.telemetry.log_level)
    launcher.check_before_start(settings, config.parent)
    with launcher.stop_on_signals() as stop:
        if single_process:
            from outloop.single import train_in_one_process

            sys.exit(train_in_one_process(settings, stop=stop, console=Console()))
        sys.exit(launcher.train(settings, stop=stop, console=Console()))


@cli.command()
@_CONFIG
@_SET
def serve(config: Path, overrides: tuple[str, ...]) -> None:
    """Serve the policy of CONFIG behind the router; prints one JSON line when ready."""
    from rich.console import Console

    from outloop.buffer.settings import load_settings
    from outloop.buffer.telemetry import configure_logging
    from outloop.engine.launch import launcher

    settings = load_settings(config, overrides)
    configure_logging("launcher", settings.telemetry.log_level)
    launcher.check_before_start(settings, config.parent, plays=False)
    with launcher.stop_on_signals() as stop:
        sys.exit(launcher.serve(settings, stop=stop, console=Console()))


@cli.command("init")
@_CONFIG
@_SET
def init_command(config: Path, overrides: tuple[str, ...]) -> None:
    """Make the run of CONFIG in its folder and in Redis, for parts that are started elsewhere."""
    from outloop.buffer.settings import load_settings
    from outloop.engine.launch import launcher

    settings = load_settings(config, overrides)
    launcher.check_before_start(settings, config.parent)
    click.echo(launcher.make_run(settings).dir)


@cli.command("new-policy")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True)
@click.option("--conversations", metavar="SOURCE", help="JSONL file or module:function.")
@click.option(
    "--import-dir",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Where SOURCE is looked for after the working directory.",
)
@click.option("--seed", default=0, show_default=True)
@click.option("--vocab-size", default=640, show_default=True)
@click.option("--hidden-size", default=64, show_default=True)
@click.option("--num-layers", default=2, show_default=True)
@click.option("--max-context-tokens", default=512, show_default=True)
def new_policy(
    out: Path, conversations: str | None, import_dir: Path | None, seed: int, **sizes: int
) -> None:
    """Make a small random policy, its tokenizer trained on conversations, for a laptop."""
    from outloop.engine.models.random_init import Sizes, write_policy
    from outloop.envs.tasks.sft_conversations import read_conversations

    rows = (
        read_conversations(conversations, setting="--conversations", import_dir=import_dir)
        if conversations is not None
        else ()
    )
    click.echo(f"{out}: {write_policy(out, seed, rows, Sizes(**sizes))} random weights")


@cli.command()
@click.option(
    "--drift",
    "run_dir",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="RUN",
    help="Say instead why episodes of the run in this folder broke into branches.",
)
def doctor(run_dir: Path | None) -> None:
    """Say what is installed, what is missing and what this machine can run."""
    if run_dir is not None:
        from outloop.buffer.cli.buffer import show_drift

        return show_drift(run_dir)
    from outloop.engine.launch.doctor import examine

    sys.exit(examine())


@cli.command()
@_RUN
@click.option("--port", type=int, help="In place of router.port.")
@_ADVERTISE
def router(run_dir: Path, port: int | None, advertise: str | None) -> None:
    """Run the router of a run."""
    from outloop.buffer.run import load_run
    from outloop.router.main import own_the_process
    from outloop.router.main import serve as serve_router

    run = load_run(run_dir)
    _configure("router", run.settings.telemetry.log_level)
    own_the_process()
    _until_signalled(
        lambda stop: serve_router(
            run, stop=stop, on_ready=_ready("router"), port=port, advertise=advertise
        )
    )


@cli.command()
@_RUN
@click.option("--index", default=0, show_default=True)
@click.option("--port", default=0, help="0, the default: any free one.")
@_ADVERTISE
def server(run_dir: Path, index: int, port: int, advertise: str | None) -> None:
    """Run one server of a run."""
    from outloop.buffer.run import load_run
    from outloop.engine.serve.main import serve as serve_weights

    run = load_run(run_dir)
    _configure(f"server-{index}", run.settings.telemetry.log_level)
    _until_signalled(
        lambda stop: serve_weights(
            run,
            index,
            stop=stop,
            on_ready=_ready(f"server-{index}"),
            port=port,
            advertise=advertise,
        )
    )


@cli.command()
@_RUN
@click.option("--router-timeout-s", default=120.0, show_default=True)
@click.option("--router-url", help="Left out: from the run's registry in Redis.")
@click.option(
    "--runner-key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="With --router-url: the runner then needs neither Redis nor the run's other keys.",
)
def runner(
    run_dir: Path, router_timeout_s: float, router_url: str | None, runner_key_file: Path | None
) -> None:
    """Play episodes for a run."""
    from outloop.buffer.run import load_run, load_run_settings, read_secret
    from outloop.envs.runner.runner import run as run_episodes

    settings = load_run_settings(run_dir)
    _configure("runner", settings.telemetry.log_level)
    url = router_url or _find_router(run_dir, router_timeout_s)
    if runner_key_file is not None:
        key = read_secret(runner_key_file, "--runner-key-file")
    else:
        key = load_run(run_dir).keys.runner_key
    _until_signalled(lambda stop: run_episodes(settings, router_url=url, runner_key=key, stop=stop))


@cli.command()
@_RUN
def trainer(run_dir: Path) -> None:
    """Train the policy of a run; starts torchrun when trainer.num_ranks asks for several."""
    import warnings

    # megatron-core announces at import what it does without Transformer Engine and Apex.
    warnings.filterwarnings("ignore", module="megatron")
    from outloop.buffer.run import load_run

    run = load_run(run_dir)
    num_ranks, rank = run.settings.trainer.num_ranks, os.environ.get("RANK")
    _configure("trainer" if rank is None else f"trainer-{rank}", run.settings.telemetry.log_level)
    if num_ranks > 1 and rank is None:
        from outloop.engine.launch.torchrun import run_ranks

        run_ranks(run_dir, num_ranks=num_ranks)
        return
    from outloop.engine.launch.launcher import stop_on_signals
    from outloop.engine.launch.torchrun import as_rank
    from outloop.engine.train.main import train as train_policy

    with as_rank(), stop_on_signals() as stop:
        train_policy(run, stop=stop, on_hang=_end_hanging)


buffer.add_command(replay_recorded)
cli.add_command(buffer)
cli.add_command(tasks)
for command in (train_recorded, rollout, replay_step, convert):
    cli.add_command(command)


def _end_hanging(sentence: str) -> None:
    """End this process at once: the call that hangs never returns."""
    sys.stderr.write(f"outloop: {sentence}\n")
    sys.stderr.flush()
    os._exit(HANG_EXIT_CODE)


def _configure(part: str, level: str) -> None:
    from outloop.buffer.telemetry import configure_logging

    configure_logging(part, level)


def _ready(part: str) -> Callable[[str], None]:
    import structlog

    return lambda url: structlog.get_logger().info("part_ready", name=part, url=url)


def _find_router(run_dir: Path, timeout_s: float) -> str:
    """The router's address from the run's registry; Redis is left again before the part starts."""
    import time

    from outloop.buffer.errors import DeadlineExceeded
    from outloop.buffer.reader import BufferReader
    from outloop.buffer.run import load_run

    reader = BufferReader.connect(load_run(run_dir))
    try:
        deadline = time.monotonic() + timeout_s
        while (facts := reader.parts().get("router")) is None:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    who="runner", phase="start", peer="router", after_s=timeout_s
                )
            time.sleep(0.1)
        return facts["url"]
    finally:
        reader.close()


def _until_signalled(part: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    import uvloop

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        await part(stop)

    uvloop.run(run())


def main() -> None:
    """Entry point: every outloop error becomes one sentence and exit code 2 (settings) or 1."""
    try:
        cli()
    except SettingsError as error:
        click.echo(f"outloop: {error}", err=True)
        # engine.launch.launcher knows this code as SETTINGS_EXIT_CODE.
        sys.exit(2)
    except RankKilled as error:
        click.echo(f"outloop: {error}", err=True)
        sys.exit(RANK_KILLED_EXIT_CODE)
    except OutloopError as error:
        click.echo(f"outloop: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
