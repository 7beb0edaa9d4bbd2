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
@click.option("--show-keys", is_flag=True, help="Print the runner key and the admin key too.")
def serve(config: Path, overrides: tuple[str, ...], show_keys: bool) -> None:
    """Serve the policy of CONFIG behind the router; prints one JSON line when ready.

    The line holds addresses, and the file in which the keys are.
    """
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
            "admin_url": served.admin_url,
            "redis_url": served.redis_url,
            "keys_file": str(served.keys_file.absolute()),
        }
        if show_keys:
            # Else they end where stdout does: in logs.
            facts |= {"runner_key": served.runner_key, "admin_key": served.admin_key}
        echo(json.dumps(facts))
        served.wait()
