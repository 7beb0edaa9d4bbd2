"""`outloop serve`: Redis, servers and routers without a trainer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from outloop.buffer.errors import SettingsError
from outloop.buffer.run import Run
from outloop.buffer.settings import Settings
from outloop.engine.launch.gpu_placement import place_gpus
from outloop.engine.launch.launcher import (
    WATCH_INTERVAL_S,
    Launcher,
    router_url,
    running,
    start_serving,
)
from outloop.engine.machine.visible_gpus import list_gpus
from outloop.engine.publish.server_client import ServerClient


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
        while not stop.wait(WATCH_INTERVAL_S):
            with launcher.redis.riding_out():
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
