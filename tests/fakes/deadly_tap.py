"""A tap in front of a server process that kills the server at one of the calls."""

from typing import Any

from fakes.tap import Tap

MOMENTS = ("before", "during", "after")


class DeadlyTap(Tap):
    """Kills `server` before, during or after its first call of `path`, the `skip` ones aside."""

    def __init__(self, server: Any, path: str, moment: str, *, skip: int = 0) -> None:
        assert moment in MOMENTS
        self._server = server
        self._path = path
        self._moment = moment
        self._num_skipped = skip
        self._is_now = False
        super().__init__(server.url)

    def on_call(self, path: str) -> None:
        """Kill before."""
        self._is_now = path == self._path
        if self._is_now and self._num_skipped:
            self._num_skipped -= 1
            self._is_now = False
        self._kill_if("before")

    def on_sent(self, path: str) -> None:
        """Kill during."""
        self._kill_if("during")

    def on_answer(self, path: str) -> None:
        """Kill after."""
        self._kill_if("after")

    def _kill_if(self, moment: str) -> None:
        if self._is_now and moment == self._moment:
            self._server.kill()
