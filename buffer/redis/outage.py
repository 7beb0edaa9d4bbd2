"""A blocking client that lives through a Redis that goes away and comes back.

One that answers and cannot write, as with a full disk, is away for whoever writes.

`Patience` repeats what failed, so it is for callers whose every write may be applied twice, as
those of `outloop.buffer.reader` may. `Continuity` finds out, for each new connection and before
anything is sent over it, whether the server still has what it had acknowledged.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import redis
import structlog
from redis.backoff import NoBackoff
from redis.retry import Retry

from outloop.buffer.errors import BufferLost, WritesLost
from outloop.buffer.redis.refused_writes import refused_write

T = TypeVar("T")
_AGAIN_S = 0.2
_STOPPING_S = 10.0
"""How long a process that was asked to stop waits at most: it holds a GPU that the next one wants,
and its Redis may have ended with the launcher."""
_AT_ONCE = Retry(NoBackoff(), 0)
LOST_RUN = (
    "Redis came back without this run: its data folder or append-only file is gone, or another "
    "server answers there. Nothing can be trained on. Restore the data, or start the same command "
    "again, which resumes from the last checkpoint and plays again what that does not contain"
)
"""The sentence on a Redis that was emptied while the run was up."""
_log = structlog.get_logger()


class Patience(Retry):
    """Repeats a command, or a pipeline, until the server executes it, or was away or refused to
    write for `max_outage_s`, or for ten seconds once `is_stopping`."""

    __hash__ = Retry.__hash__

    def __init__(self, max_outage_s: float, is_stopping: Callable[[], bool]) -> None:
        super().__init__(NoBackoff(), -1, (redis.ConnectionError, redis.TimeoutError))
        self._max_outage_s = max_outage_s
        self._is_stopping = is_stopping
        self._calls = threading.local()

    def __deepcopy__(self, memo: dict[int, Any]) -> Patience:
        # redis-py gives each connection a copy; all of a thread's calls are one wait.
        return self

    def call_with_retry(
        self,
        do: Callable[[], T],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> T:
        """What `do` returns, once it does; connecting within a command is part of its wait."""
        if getattr(self._calls, "is_inside", False):
            return _AT_ONCE.call_with_retry(do, fail, is_retryable, with_failure_count)
        self._calls.is_inside = True
        try:
            return self._call(do, fail, is_retryable, with_failure_count)
        finally:
            self._calls.is_inside = False

    def _call(
        self,
        do: Callable[[], T],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None,
        with_failure_count: bool,
    ) -> T:
        began_at: float | None = None
        num_failures = 0
        while True:
            try:
                answer = do()
            except redis.AuthenticationError:
                raise
            except redis.RedisError as error:
                why = refused_write(error)
                if why is None:
                    if not isinstance(error, self._supported_errors):
                        raise
                    if is_retryable and not is_retryable(error):
                        raise
                    num_failures += 1
                    # Closes the connection; over the one that brought a refusal all goes on.
                    fail(error, num_failures) if with_failure_count else fail(error)
                now = time.monotonic()
                if began_at is None:
                    began_at = now
                    what = "redis_awaited" if why is None else "redis_cannot_write"
                    _log.warning(what, max_s=self._max_outage_s, error=str(error))
                if now - began_at >= self._max_s():
                    if why is None:
                        raise
                    raise redis.ResponseError(
                        f"{error}, for buffer.max_outage_s={self._max_outage_s:g}"
                    ) from error
                time.sleep(_AGAIN_S)
            else:
                if began_at is not None:
                    _log.warning("redis_is_back", after_s=round(time.monotonic() - began_at, 2))
                return answer

    def _max_s(self) -> float:
        stopping_s = _STOPPING_S if self._is_stopping() else self._max_outage_s
        return min(self._max_outage_s, stopping_s)


class Continuity:
    """The number of a trainer's writes that the server acknowledged, kept here and there.

    The file of a server that syncs once a second may lack its last writes when it is killed. One
    that lacks any of ours is refused, since what followed from them was not lost.
    """

    def __init__(self, meta_key: str, state_key: str) -> None:
        self._meta_key = meta_key
        self._state_key = state_key
        self._num_writes: int | None = None
        """None until the run was found."""
        self._lock = threading.Lock()

    @property
    def count_command(self) -> tuple[str, str, str, int]:
        """To be sent behind each write; `note` gets its answer."""
        return ("HINCRBY", self._state_key, "trainer_writes", 1)

    def note(self, answer: Any) -> None:
        """The answer to `count_command`; an error counts nothing."""
        if isinstance(answer, int):
            with self._lock:
                self._num_writes = max(answer, self._num_writes or 0)

    def check(self, connection: Any) -> None:
        """Prepare a connection that was just made, and look what its server holds.

        Raises:
            BufferLost: the run was there before, and is not.
            WritesLost: it is, without our last writes.
        """
        connection.on_connect()
        # Before the server is asked: other threads have their writes acknowledged meanwhile, which
        # its answer may not count yet.
        with self._lock:
            known = self._num_writes
        connection.send_command("EXISTS", self._meta_key)
        has_run = bool(connection.read_response())
        connection.send_command("HGET", self._state_key, "trainer_writes")
        num_writes = int(connection.read_response() or 0)
        with self._lock:
            if has_run and self._num_writes is None:
                self._num_writes = num_writes
        if known is None or (has_run and num_writes >= known):
            return
        connection.disconnect()
        if not has_run:
            raise BufferLost(LOST_RUN)
        raise WritesLost(
            f"Redis came back without the last {known - num_writes} writes that it had "
            "acknowledged to the trainer; the trainer goes back to its last checkpoint, with which "
            'the buffer is brought in line. buffer.fsync="always" loses none'
        )
