"""A run's Redis: it is started again when it ends, and its outages have a bound."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from outloop.buffer.errors import BufferLost, BufferUnavailable, PartFailed, WritesRefused
from outloop.buffer.events import record_event
from outloop.buffer.reader import BufferReader
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.redis.refused_writes import ended_for_room
from outloop.buffer.run import Run
from outloop.engine.launch.restarts import Restarts, end_reason

REDIS = "redis"
"""Its name beside those of the parts."""
_WRITE_INTERVAL_S = 1.0
"""How often Redis is asked whether it can write."""
_FULL_WAIT_S = 1.0
"""Before a Redis that ended for want of room is started again."""

_log = structlog.get_logger()


class RedisWatch:
    """Looks at Redis for the launcher, which calls `check` again and again."""

    def __init__(
        self, run: Run, reader: BufferReader, restarts: Restarts, own: EmbeddedRedis | None
    ) -> None:
        """`own`: the run's own server, started again when it ends; None: it is somebody else's."""
        self.write_obstacle: str | None = None
        """Why Redis cannot write, as it was asked last; whoever writes waits then."""
        self._run = run
        self._reader = reader
        self._restarts = restarts
        self._own = own
        self._started = time.monotonic()
        self._due: float | None = None
        """When a server that ended is started again, by the monotonic clock."""
        self._away_since: float | None = None
        """When Redis was first found away, by the monotonic clock; None: it answers."""
        self._writes_asked_at = 0.0

    @property
    def pid(self) -> int | None:
        """Of the run's own server."""
        return None if self._own is None else self._own.pid

    def check(self) -> None:
        """Start the run's own server again if it ended; ask Redis whether it can write.

        Raises:
            PartFailed: the server ended too often in a row soon after its start.
            BufferUnavailable: Redis is away; see `riding_out`.
            BufferLost: it came back empty.
        """
        self._restart()
        self._reader.check_run()
        if self._away_since is not None:
            _log.warning("redis_is_back", after_s=round(time.monotonic() - self._away_since, 2))
            self._away_since = None
        self._ask_to_write()

    @contextmanager
    def riding_out(self) -> Iterator[None]:
        """Let what is done within fail because Redis is away, for buffer.max_outage_s.

        Raises:
            BufferUnavailable: it was away for longer.
            BufferLost: it came back empty.
        """
        try:
            yield
        except BufferLost:
            raise
        except BufferUnavailable as error:
            max_s = self._run.settings.buffer.outage_s
            now = time.monotonic()
            if self._away_since is None:
                self._away_since = now
                what = "redis_is_away"
                if isinstance(error, WritesRefused):
                    what = "redis_cannot_write"
                _log.warning(what, max_s=max_s, error=str(error))
            if now - self._away_since >= max_s:
                raise BufferUnavailable(
                    f"{error}. The run waited for it for buffer.max_outage_s={max_s:g}; start the "
                    "same command again when it is back"
                ) from error

    def _restart(self) -> None:
        """Start the run's own server again if it ended, after its back-off.

        Raises:
            PartFailed: it ended too often in a row soon after its start.
        """
        code = None if self._own is None else self._own.exit_code
        if self._own is None or code is None:
            return
        reason = end_reason(code, "")
        now = time.monotonic()
        if self._due is None:
            words, folder = self._own.last_words(), self._own.data_dir
            obstacle = ended_for_room(code, words, folder)
            if obstacle is None:
                wait_s = self._restarts.wait_s(REDIS, lived_s=now - self._started)
            else:
                # Until there is room it ends with each write; who writes has a bound.
                self._note_obstacle(obstacle)
                wait_s, self._writes_asked_at = _FULL_WAIT_S, now + 3 * _FULL_WAIT_S
            if wait_s is None:
                raise PartFailed(
                    f"the run's Redis ended too often ({reason}); its last lines:\n"
                    f"{self._own.last_words()}"
                )
            self._due = now + wait_s
        if now >= self._due:
            self._due = None
            _log.warning("part_restarted", name=REDIS, exit_code=code, reason=reason)
            record_event(self._run.dir, "part_restarted", part=REDIS, exit_code=code, reason=reason)
            self._started = now
            self._own.start_again()

    def _ask_to_write(self) -> None:
        """Find out whether it can, now and then. It ends nothing here: each writer has its bound.

        Raises:
            BufferUnavailable: Redis does not answer.
        """
        now = time.monotonic()
        if now - self._writes_asked_at < _WRITE_INTERVAL_S:
            return
        self._writes_asked_at = now
        self._note_obstacle(self._reader.write_obstacle())

    def _note_obstacle(self, found: str | None) -> None:
        before, self.write_obstacle = self.write_obstacle, found
        if found is not None and before is None:
            record_event(self._run.dir, "redis_cannot_write", reason=found)
        if found is None and before is not None:
            record_event(self._run.dir, "redis_writes_again")
