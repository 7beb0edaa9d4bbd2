"""What a run needs of the machine that it starts on, beside what every run needs.

Each check looks and changes nothing. On a cluster every node is examined (`launch/nodes`).
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from importlib import metadata, resources
from pathlib import Path

import httpx
from packaging.requirements import Requirement

from outloop.buffer.errors import BufferUnavailable, OutloopError, SettingsError
from outloop.buffer.redis.client import connect_sync, of_run, translated
from outloop.buffer.redis.keys import hash_tag
from outloop.buffer.redis.requirements import read_server
from outloop.buffer.redis.rights import check_rights
from outloop.buffer.run import read_secret, with_access
from outloop.buffer.settings import Settings
from outloop.engine.launch.finding import Finding, bad, good
from outloop.engine.launch.settings_checks import check_settings
from outloop.engine.machine.port_reservation import hold_port

_REDIS_TIMEOUT_S = 5.0
_MAX_ROUND_TRIP_S = 0.05
MAX_CLOCK_SKEW_S = 2.0
"""What clocks may differ by: deadlines and times in logs are compared between machines."""
_HEALTH_TIMEOUT_S = 5.0
_BYTES_OF_STATE = 12
"""For each parameter a checkpoint holds a float32 weight and two float32 moments."""
_GB = 1e9
_PLATFORM_OF_LOCK = ("Linux", "x86_64", ("3", "11"))
_LOCKED = re.compile(r"([a-z0-9-]+)==(\S+) ")
_MAX_SHOWN = 5
_HAS_RIGHTS = "its user has the rights that a run needs"


def examine_run(settings: Settings, *, has_routers: bool = True) -> Iterator[Finding]:
    """Every finding, in the order in which a run would fail.

    Args:
        has_routers: the routers would be here: their port, the keys of their upstreams and servers
            that were started elsewhere matter. False on a node of a cluster with other parts only.
    """
    yield _packages()
    yield from _lock()
    yield _checked("settings", lambda: check_settings(settings), "model, tasks and code load")
    yield from _redis(settings)
    if has_routers:
        yield from _ports(settings)
        yield from _upstream_keys(settings)
        yield from _servers(settings)
    yield from _server_key(settings)
    yield _disk(settings)


def _checked(what: str, check: Callable[[], object], found: str) -> Finding:
    try:
        check()
    except OutloopError as error:
        return bad(what, "refused", str(error))
    return good(what, found)


def _packages() -> Finding:
    """Installed packages against the releases that outloop names, extras included."""
    wrong = []
    for text in metadata.requires("outloop") or ():
        requirement = Requirement(text)
        marker = requirement.marker
        # Of an extra: the package matters where it is installed.
        extra = re.search(r"""extra\s*==\s*["']([^"']+)["']""", text)
        if marker is not None and not marker.evaluate({"extra": extra[1] if extra else ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            if extra is None:
                wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version}, wanted {requirement.specifier}")
    if wrong:
        return bad(
            "packages",
            "; ".join(dict.fromkeys(wrong)),
            "install outloop again into an environment of its own",
        )
    return good("packages", "the releases that outloop asks for")


def _lock() -> Iterator[Finding]:
    """Installed packages against requirements.lock, which is for one platform."""
    here = (platform.system(), platform.machine(), platform.python_version_tuple()[:2])
    if here != _PLATFORM_OF_LOCK:
        return
    found = [_LOCKED.match(line) for line in _lock_text().splitlines()]
    locked = {match[1]: match[2] for match in found if match}
    other, num_same = [], 0
    for name, release in locked.items():
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            # Of an extra that is not used here.
            continue
        if installed == release:
            num_same += 1
        else:
            other.append(f"{name} {installed} (lock: {release})")
    if not other:
        yield good("requirements.lock", f"{num_same} packages, each in the release of the lock")
        return
    more = f" and {len(other) - _MAX_SHOWN} others" if len(other) > _MAX_SHOWN else ""
    yield bad(
        "requirements.lock",
        ", ".join(other[:_MAX_SHOWN]) + more,
        "the tests ran with the releases of the lock; pip install --no-deps -r requirements.lock "
        "in a checkout installs them",
        is_required=False,
    )


def _lock_text() -> str:
    return resources.files("outloop").joinpath("requirements.lock").read_text()


def _redis(settings: Settings) -> Iterator[Finding]:
    """The given Redis: reached, durable, keeping everything, near, and of one mind about time."""
    url = settings.buffer.redis_url
    if url is None:
        return
    what = "buffer.redis_url"
    # That of the run would be in the same part of a cluster, or in another one alike.
    tag = hash_tag(settings.run.name)
    try:
        access = of_run(with_access(url, settings.buffer), tag)
        client = connect_sync(access, timeout_s=_REDIS_TIMEOUT_S)
    except SettingsError as error:
        yield bad(what, "refused", str(error))
        return
    with closing(client):
        try:
            server = read_server(client)
            rights = _checked(
                what,
                partial(check_rights, client, tag),
                _HAS_RIGHTS,
            )
            before = time.time()
            with translated("reading its clock"):
                seconds, microseconds = client.time()
            after = time.time()
        except BufferUnavailable as error:
            yield bad(what, "away", str(error))
            return
    yield rights
    if server is None:
        yield bad(
            what,
            "its user may not ask INFO",
            "check by hand: 6.2 or newer, appendonly yes, maxmemory-policy noeviction",
            is_required=False,
        )
    else:
        yield _checked(what, server.check, f"Redis {server.version}")
        if not server.keeps_log:
            yield bad(
                what,
                "appendonly=no",
                "what it acknowledged is lost when it ends; set appendonly to yes",
                is_required=False,
            )
    if after - before > _MAX_ROUND_TRIP_S:
        yield bad(
            what,
            f"{(after - before) * 1e3:.0f} ms for a command",
            "every turn waits for several; put Redis near the routers",
            is_required=False,
        )
    skew_s = seconds + microseconds / 1e6 - (before + after) / 2
    if abs(skew_s) > MAX_CLOCK_SKEW_S + (after - before):
        yield bad(
            "clock",
            f"{skew_s:+.1f} s against Redis",
            "deadlines and times in the logs disagree between machines; run NTP",
            is_required=False,
        )
    yield good(what, f"{(after - before) * 1e3:.1f} ms for a command")


def _ports(settings: Settings) -> Iterator[Finding]:
    """Those that the settings name: a running part has them already."""
    router = settings.router
    if not router.port:
        return
    what = f"port {router.port}"
    shares = router.num_processes > 1 or router.shares_port
    try:
        hold_port(router.host, router.port, is_shared=shares).close()
    except OSError as error:
        yield bad(
            what,
            f"cannot listen on {router.host}: {error.strerror}",
            "stop what listens there, or change router.host and router.port (0: any free one)",
        )
    else:
        yield good(what, f"free on {router.host}")


def _upstream_keys(settings: Settings) -> Iterator[Finding]:
    """Keys of upstreams, whose variables the settings only name."""
    for name, upstream in settings.router.upstreams.items():
        variable = upstream.api_key_env
        if variable is not None and not os.environ.get(variable):
            yield bad(
                f"router.upstreams.{name}",
                f"{variable} is not set",
                f"export {variable}, the key of {upstream.base_url}",
            )


def _server_key(settings: Settings) -> Iterator[Finding]:
    """The key of servers, whose file the settings only name."""
    path = settings.server.api_key_file
    if path is not None:
        yield _checked(
            "server.api_key_file", lambda: read_secret(path, "server.api_key_file"), "readable"
        )


def _servers(settings: Settings) -> Iterator[Finding]:
    """Servers that were started elsewhere."""
    for url in settings.server.urls:
        try:
            answer = httpx.get(f"{url.rstrip('/')}/health", timeout=_HEALTH_TIMEOUT_S)
        except httpx.HTTPError as error:
            yield bad(url, f"{type(error).__name__}: {error}", "start it, or correct server.urls")
            continue
        if answer.is_success:
            yield good(url, "answers")
        else:
            yield bad(url, f"/health answers {answer.status_code}", "see its log")


def _disk(settings: Settings) -> Finding:
    """Room for the checkpoints that are kept, one that is being written, and the final weights."""
    folder = (settings.run.dir / settings.run.name).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    parameters, weights = size_of_model(settings)
    wanted = parameters * _BYTES_OF_STATE * (settings.trainer.keep_checkpoints + 1) + weights
    text = f"{free / _GB:.0f} GB free in {folder}, about {wanted / _GB:.1f} GB for checkpoints"
    if free < wanted:
        return bad(
            "disk", text, "free some, lower trainer.keep_checkpoints, or choose another run.dir"
        )
    return good("disk", text)


def size_of_model(settings: Settings) -> tuple[float, int]:
    """How many parameters the files of the model have, and their bytes."""
    weights = sum(path.stat().st_size for path in settings.model.path.glob("model*.safetensors"))
    return weights / _bytes_of_weight(settings.model.path), weights


def _bytes_of_weight(folder: Path) -> int:
    """Of one parameter in the model's files, by their configuration; 2 where it does not say."""
    path = folder / "config.json"
    text = path.read_text() if path.is_file() else ""
    return 4 if re.search(r'"(torch_)?dtype":\s*"float32"', text) else 2
