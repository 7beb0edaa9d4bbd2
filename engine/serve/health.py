"""Whether a server still answers, and how many probes in a row it has missed."""

from __future__ import annotations

import asyncio
import time

from outloop.buffer.errors import OutloopError, SettingsError
from outloop.engine.publish.server_client import KeyRefused, ServerClient


class Watch:
    """Probes the server at `url` for the version it holds."""

    def __init__(
        self, server_id: str, url: str, *, timeout_s: float, max_missed: int, key: str | None
    ) -> None:
        """`key`: of the server, see `Run.server_key`."""
        self.url = url
        self._client = ServerClient(server_id, url, key=key)
        self._timeout_s = timeout_s
        self._max_missed = max_missed
        self._num_missed = 0

    @property
    def is_lost(self) -> bool:
        """It missed `max_missed` probes in a row."""
        return self._num_missed >= self._max_missed

    async def weight_version(self) -> str | None:
        """The version that the server reports; None if it does not answer in time.

        Raises:
            SettingsError: it wants another key.
        """
        version = await asyncio.to_thread(self._ask)
        self._num_missed = 0 if version is not None else self._num_missed + 1
        return version

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _ask(self) -> str | None:
        try:
            info = self._client.model_info(time.monotonic() + self._timeout_s)
        except KeyRefused as error:
            raise SettingsError(str(error)) from error
        except OutloopError:
            return None
        return str(info.get("weight_version"))
