"""`outloop serve`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from outloop.buffer.terminal import echo
from outloop.cli.options import CONFIG, SET


@click.command()
@CONFIG
@SET
def serve(config: Path, overrides: tuple[str, ...]) -> None:
    """Serve the policy of CONFIG behind the router; prints one JSON line when ready."""
    import outloop
    from outloop.buffer.settings import load_settings
    from outloop.buffer.telemetry import configure_logging
    from outloop.engine.launch.stop_signals import stop_on_signals

    settings = load_settings(config, overrides)
    configure_logging("launcher", settings.telemetry.log_level)
    with stop_on_signals() as stop, outloop.serve(settings, stop=stop) as served:
        if stop.is_set():
            sys.exit(130)
        facts = {
            "base_url": served.base_url,
            "runner_key": served.runner_key,
            "admin_url": served.admin_url,
            "admin_key": served.admin_key,
            "redis_url": served.redis_url,
        }
        echo(json.dumps(facts))
        served.wait()
