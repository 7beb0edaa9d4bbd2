"""A server that was started outside of the run.

It takes part in the run only while it answers. A server that comes back, or that was started again,
is entered without a version, so that it loads all weights before it serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

import msgspec
import structlog

from outloop.buffer.errors import DeadlineExceeded, OutloopError
from outloop.buffer.records import Libraries
from outloop.buffer.run import Run
from outloop.engine.publish.server_client import ServerClient
from outloop.engine.publish.verification.logprob_probe import UNVERIFIED
from outloop.engine.serve.health import Watch
from outloop.engine.serve.logprob_convention import check_logprobs
from outloop.engine.serve.registration import UNTOLD, Registration

_POLL_S = 0.5
_PROBE_TIMEOUT_S = 5.0
_MAX_MISSED_PROBES = 3
_log = structlog.get_logger()


async def attach(run: Run, registration: Registration, url: str, *, stop: asyncio.Event) -> None:
    """Enter the server at `url` whenever it answers, until `stop`; then take it out again.

    Raises:
        DeadlineExceeded: it did not answer within server.start_timeout_s.
        SettingsError: its logprobs are not those that training needs, or it wants another key.
        ServerUnavailable, PublishFailed: it went away, or is no SGLang, while it was asked.
    """
    key = run.server_key
    watch = Watch(
        registration.server_id,
        url,
        timeout_s=_PROBE_TIMEOUT_S,
        max_missed=_MAX_MISSED_PROBES,
        key=key,
    )
    timeout_s = run.settings.server.start_timeout_s
    deadline = time.monotonic() + timeout_s
    is_entered = False

    async def enter() -> None:
        libraries = await asyncio.to_thread(_libraries_at, registration.server_id, url, key)
        await asyncio.to_thread(registration.enter, url, libraries)

    try:
        while not stop.is_set():
            # The registry first: a publish sets the version on the server before the registry.
            entered = await asyncio.to_thread(registration.held_version) if is_entered else None
            held = await watch.weight_version()
            if held is not None and not is_entered:
                await asyncio.to_thread(
                    check_logprobs,
                    registration.server_id,
                    url,
                    dtype=run.settings.server.dtype,
                    timeout_s=timeout_s,
                    key=key,
                )
                await enter()
                _log.info("server_attached", server_id=registration.server_id, url=url)
                is_entered = True
            elif held is not None and _is_another(held, entered):
                await enter()
                _log.warning("server_started_anew", server_id=registration.server_id, url=url)
            elif is_entered and watch.is_lost:
                await asyncio.to_thread(registration.withdraw)
                _log.warning("server_lost", server_id=registration.server_id, url=url)
                is_entered, deadline = False, time.monotonic() + timeout_s
            elif not is_entered and time.monotonic() > deadline:
                raise DeadlineExceeded(
                    who=registration.server_id, phase="attach", peer=url, after_s=timeout_s
                )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _POLL_S)
    finally:
        await asyncio.to_thread(registration.withdraw)
        watch.close()


def _libraries_at(server_id: str, url: str, key: str | None) -> Libraries:
    """What a server tells of its libraries: the torch server all, SGLang 0.5.23 nothing."""
    client = ServerClient(server_id, url, key=key)
    try:
        told = client.server_info(time.monotonic() + _PROBE_TIMEOUT_S).get("libraries", {})
        return msgspec.convert(told, Libraries)
    except (OutloopError, msgspec.ValidationError) as error:
        _log.info("libraries_not_told", server_id=server_id, error=str(error))
        return UNTOLD
    finally:
        client.close()


def _is_another(held: str, entered: int | None) -> bool:
    """Whether a server that was entered with a version has lost it."""
    if entered is None or held == str(entered) or held.startswith(UNVERIFIED):
        return False
    return not (held.isdecimal() and int(held) > entered)
