"""The line between the supervisor and an interpreter: inputs one way, a status for each the other.

The interpreter runs a policy's code, which may do what it likes to its end: it can say a wrong
status of its own inputs, and nothing else. Nothing here waits for it.
"""

from __future__ import annotations

import os
import time

from outloop.envs.sandbox.guest import program

_MAX_STATUS_BYTES = 64
_CHUNK_BYTES = 65536
_ENDING_S = 1.0
"""An interpreter that closes its end has so long to end."""


class Input:
    """One input, and until when it may run; `is_end`: the interpreter is to end."""

    def __init__(self, wall_ms: int, token: bytes, text: bytes, is_end: bool) -> None:
        self.started = time.monotonic()
        self.deadline = self.started + wall_ms / 1000
        self.token = token
        self.text = text
        self.is_end = is_end


def receive() -> Input:
    """The next input from the host; ends this process if the session was closed."""
    try:
        wall_ms, token, text, *end = program.receive(0)
    except EOFError:
        os._exit(0)
    return Input(int(wall_ms), token, text, bool(end))


class Line:
    """The supervisor's end."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._left = b""
        self._token = b""
        self._taken = b""
        self._closed_at: float | None = None
        self.status: bytes | None = None
        """Of the input under way, once it is there: what stands behind its token."""

    def put(self, asked: Input) -> None:
        """Begin an input; what is said of earlier ones does not count any more."""
        self._left, self._token, self.status = asked.text, asked.token, None

    def give(self) -> None:
        """Write as much of the input as the interpreter takes now."""
        try:
            while self._left:
                self._left = self._left[os.write(self._fd, self._left[:_CHUNK_BYTES]) :]
        except BlockingIOError:
            return
        except OSError:
            self._left = b""  # The interpreter has closed its end; taking notices.

    def take(self) -> bool:
        """Read what is there now; False: the interpreter has closed its end."""
        try:
            chunk = os.read(self._fd, _CHUNK_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            chunk = b""
        *lines, rest = (self._taken + chunk).split(b"\n")
        self._taken = rest[-_MAX_STATUS_BYTES:]
        for line in lines:
            token, _, status = line.rpartition(b" ")
            if token == self._token and self.status is None:
                self.status = status[:_MAX_STATUS_BYTES]
        if not chunk:
            self._closed_at = time.monotonic()
        return bool(chunk)

    @property
    def is_left(self) -> bool:
        """The interpreter closed its end and did not end soon after: no status will come."""
        return self._closed_at is not None and time.monotonic() > self._closed_at + _ENDING_S

    def wait_ms(self, asked: Input | None, tick_ms: int) -> float:
        """How long to wait for something to happen."""
        if self._left:
            return 1.0
        if asked is None:
            return float(tick_ms)
        left_ms = 1000 * (asked.deadline - time.monotonic())
        return max(1.0, min(float(tick_ms), left_ms))
