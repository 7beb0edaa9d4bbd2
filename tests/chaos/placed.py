"""`outloop train` whose parts live on hosts of their own: python placed.py CONFIG HOSTS.

HOSTS is a JSON object: part -> [the words before its command, its address]; other parts live here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from outloop.buffer.errors import OutloopError
from outloop.buffer.settings import load_settings
from outloop.buffer.telemetry import configure_logging
from outloop.engine.launch.settings_checks import check_before_start
from outloop.engine.launch.stop_signals import stop_on_signals
from outloop.engine.launch.training import train

LISTENING = ("router", "server")


class OnHosts:
    """Where each part lives."""

    def __init__(self, places: Mapping[str, tuple[list[str], str]]) -> None:
        self._places = places

    def command(self, name: str, part: str, command: Sequence[str]) -> list[str]:
        """The command line on the part's host."""
        before, address = self._places.get(name) or self._places.get(part) or ([], "")
        advertised = ("--advertise", address) if address and part in LISTENING else ()
        return [*before, *command, *advertised]


def main() -> int:
    """Train, as the command line does."""
    config, places = sys.argv[1:]
    settings = load_settings(Path(config), ())
    configure_logging("launcher", settings.telemetry.log_level)
    try:
        check_before_start(settings)
        with stop_on_signals() as stop:
            placement = OnHosts(json.loads(Path(places).read_text()))
            return train(settings, stop=stop, console=Console(), placement=placement)
    except OutloopError as error:
        print(f"outloop: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
