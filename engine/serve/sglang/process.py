"""One SGLang server: started, watched, stopped.

When `serve_sglang` returns or raises, none of its processes is left. The launcher, or the user of
`outloop server`, starts it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import time
import uuid
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import psutil
import structlog

from outloop.buffer.errors import DeadlineExceeded, PartFailed, SettingsError
from outloop.buffer.registry import advertised_url
from outloop.buffer.settings import Settings
from outloop.buffer.tls import check_certificate
from outloop.engine.machine.parent_death import die_with_parent
from outloop.engine.machine.port_reservation import hold_port
from outloop.engine.serve.health import Watch
from outloop.engine.serve.sglang.arguments import (
    REFUSED_EXIT_CODE,
    process_environment,
    start_command,
)

_POLL_S = 0.25
_PROBE_INTERVAL_S = 5.0
_PROBE_TIMEOUT_S = 10.0
_MAX_MISSED_PROBES = 6
_STOP_TIMEOUT_S = 10.0
_log = structlog.get_logger()


async def serve_sglang(
    settings: Settings,
    *,
    stop: asyncio.Event,
    on_bound: Callable[[str], Awaitable[None]],
    port: int = 0,
    advertise: str | None = None,
    key: str | None = None,
) -> None:
    """Start SGLang, call `on_bound` with its URL when it answers, and watch it until `stop`.

    Args:
        key: SGLang's api_key and admin_api_key; it is on no command line and in no environment.

    Raises:
        SettingsError: there is no SGLang here, or it refuses its arguments.
        DeadlineExceeded: it did not answer within server.start_timeout_s.
        PartFailed: it ended, or no longer answers.
    """
    if port:
        await _serve_at(port, settings, stop, on_bound, advertise, key)
        return
    # SGLang binds its port half a minute after it is given one.
    with hold_port(settings.server.host) as held:
        await _serve_at(held.getsockname()[1], settings, stop, on_bound, advertise, key)


async def _serve_at(
    port: int,
    settings: Settings,
    stop: asyncio.Event,
    on_bound: Callable[[str], Awaitable[None]],
    advertise: str | None,
    key: str | None,
) -> None:
    server = settings.server
    is_tls = server.tls_cert_file is not None
    url = advertised_url(server.host, port, advertise, is_tls=is_tls)
    host = urlsplit(url).hostname
    check_certificate("server", server, ca_file=settings.run.tls_ca_file, host=host)
    identity = f"started-{uuid.uuid4().hex[:12]}"
    command = start_command(settings, port=port, identity=identity)
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=subprocess.PIPE,
        env=process_environment(settings),
        # SGLang's other processes end when this one does.
        preexec_fn=lambda: die_with_parent(signal.SIGKILL),
    )
    watch = Watch("sglang", url, timeout_s=_PROBE_TIMEOUT_S, max_missed=_MAX_MISSED_PROBES, key=key)
    try:
        await _hand_over(process, key)
        timeout_s = settings.server.start_timeout_s
        if not await _wait_until_it_answers(timeout_s, process, watch, identity, stop):
            return
        await on_bound(url)
        _log.info("server_ready", url=url, purpose="policy", pid=process.pid)
        await _watch(process, watch, stop)
    finally:
        watch.close()
        await _end(process)


async def _hand_over(process: Process, key: str | None) -> None:
    """Write the key to the process's standard input: other users can read command lines."""
    assert process.stdin is not None
    process.stdin.write(f"{key or ''}\n".encode())
    with contextlib.suppress(ConnectionError):
        # A process that ended already is noticed by the wait for its answer.
        await process.stdin.drain()
    process.stdin.close()


async def _wait_until_it_answers(
    timeout_s: float, process: Process, watch: Watch, identity: str, stop: asyncio.Event
) -> bool:
    """True when it answers, False when stopped first."""
    deadline = time.monotonic() + timeout_s
    while await watch.weight_version() != identity:
        _check_alive(process)
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                who="server",
                phase="start",
                peer=f"SGLang at {watch.url} (pid {process.pid})",
                after_s=timeout_s,
            )
        if await _stopped(stop, _POLL_S):
            return False
    return True


async def _watch(process: Process, watch: Watch, stop: asyncio.Event) -> None:
    """Return when `stop` is set.

    Raises:
        PartFailed: SGLang ended, or did not answer for long.
    """
    probe_at = time.monotonic() + _PROBE_INTERVAL_S
    while not await _stopped(stop, _POLL_S):
        _check_alive(process)
        if time.monotonic() < probe_at:
            continue
        await watch.weight_version()
        if watch.is_lost:
            raise PartFailed(
                f"SGLang at {watch.url} (pid {process.pid}) did not answer num_probes="
                f"{_MAX_MISSED_PROBES} of {_PROBE_TIMEOUT_S:.0f} s each; see the log above"
            )
        probe_at = time.monotonic() + _PROBE_INTERVAL_S


async def _stopped(stop: asyncio.Event, timeout_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), timeout_s)
    return stop.is_set()


def _check_alive(process: Process) -> None:
    code = process.returncode
    if code is None:
        return
    if code == REFUSED_EXIT_CODE:
        raise SettingsError("SGLang refused its arguments; the log above has the reason")
    raise PartFailed(f"SGLang ended with exit_code={code}; see the log above")


async def _end(process: Process) -> None:
    """Stop SGLang and every process it started: SIGTERM, then SIGKILL."""
    tree: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        tree = psutil.Process(process.pid).children(recursive=True)
    if process.returncode is None:
        process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _STOP_TIMEOUT_S)
    for child in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    if process.returncode is None:
        process.kill()
        await process.wait()
