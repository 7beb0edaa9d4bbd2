"""`outloop runner`."""

from __future__ import annotations

import time
from pathlib import Path

import click

from outloop.cli.options import RUN
from outloop.cli.parts import run_until_signalled


@click.command()
@RUN
@click.option("--router-timeout-s", default=120.0, show_default=True)
@click.option("--router-url", help="Left out: from the run's registry in Redis.")
@click.option(
    "--runner-key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="With --router-url: the runner then needs neither Redis nor the run's other keys.",
)
@click.option(
    "--wait-when-finished",
    is_flag=True,
    help="Wait for more steps when the run is finished, where a cluster starts again what ends.",
)
def runner(
    run_dir: Path,
    router_timeout_s: float,
    router_url: str | None,
    runner_key_file: Path | None,
    wait_when_finished: bool,
) -> None:
    """Play episodes for a run."""
    from outloop.buffer.run import load_run, load_run_settings, read_secret
    from outloop.buffer.telemetry import configure_logging
    from outloop.buffer.tls import trust_authorities

    settings = load_run_settings(run_dir)
    trust_authorities(settings.run.tls_ca_file)
    from outloop.envs.runner.runner import run as run_episodes

    configure_logging("runner", settings.telemetry.log_level)
    url = router_url or _find_router(run_dir, router_timeout_s)
    if runner_key_file is not None:
        key = read_secret(runner_key_file, "--runner-key-file")
    else:
        key = load_run(run_dir).keys.runner_key
    private = [run_dir] if runner_key_file is None else [run_dir, runner_key_file]
    run_until_signalled(
        lambda stop: run_episodes(
            settings,
            router_url=url,
            runner_key=key,
            stop=stop,
            private=private,
            ends_when_finished=not wait_when_finished,
        )
    )


def _find_router(run_dir: Path, timeout_s: float) -> str:
    """The router's address from the run's registry; the runner itself does not use Redis."""
    from outloop.buffer.errors import DeadlineExceeded
    from outloop.buffer.reader import BufferReader
    from outloop.buffer.run import load_run

    reader = BufferReader.connect(load_run(run_dir))
    try:
        deadline = time.monotonic() + timeout_s
        while (facts := reader.registry.parts().get("router")) is None:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    who="runner", phase="start", peer="router", after_s=timeout_s
                )
            time.sleep(0.1)
        return facts["url"]
    finally:
        reader.close()
