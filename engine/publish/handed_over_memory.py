"""Which servers could read memory that is handed over: those on the trainer's machine."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

import structlog

from outloop.buffer.errors import SettingsError
from outloop.buffer.records import ServerEntry
from outloop.buffer.settings import Settings
from outloop.engine.machine.this_machine import is_elsewhere

_log = structlog.get_logger()
_TRANSPORTS = ("shared_memory", "cuda_ipc")


def hands_over_memory(settings: Settings) -> bool:
    """Whether servers map the trainer's memory instead of receiving weights."""
    return settings.publish.transport in _TRANSPORTS


def refuse_servers_elsewhere(settings: Settings) -> None:
    """Refuse servers of server.urls that could not map the GPU memory of this machine.

    Raises:
        SettingsError: publish.transport is cuda_ipc, and a server is on another machine.
    """
    if settings.publish.transport != "cuda_ipc":
        return
    for url in settings.server.urls:
        if is_elsewhere(urlsplit(url).hostname or ""):
            raise SettingsError(_sentence(settings.publish.transport, url))


class HandedOverMemory:
    """Looks where servers are, and says of each once that it is elsewhere."""

    def __init__(self, transport: str) -> None:
        """`transport`: its name in publish.transport."""
        self._transport = transport
        self._is_elsewhere: dict[str, bool] = {}

    def refusals(self, entries: Sequence[ServerEntry]) -> dict[str, str]:
        """Give the servers that are on other machines, by id: why, and what to do.

        SGLang's scheduler ends when it is handed memory that is not there.
        """
        found: dict[str, str] = {}
        for entry in entries:
            host = urlsplit(entry.url).hostname or ""
            is_new = host not in self._is_elsewhere
            if is_new:
                self._is_elsewhere[host] = is_elsewhere(host)
            if self._is_elsewhere[host]:
                found[entry.server_id] = _sentence(self._transport, entry.url)
                if is_new:
                    _log.warning("server_elsewhere", url=entry.url, reason=found[entry.server_id])
        return found


def _sentence(transport: str, url: str) -> str:
    return (
        f'publish.transport="{transport}" with a server at {url}: memory is handed over on one '
        'machine, and that is another one. Set publish.transport = "collective", or "disk" where '
        "trainer and servers share the run's folder"
    )
