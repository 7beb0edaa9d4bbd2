"""A run on a Ray cluster: one that is there, or one of this machine alone.

The launcher reserves the resources of all parts at once, as one placement group, so that a run
never starts in half. Each part is then the child of an actor in its bundle (`ray_part`), and the
launcher watches, restarts and stops it as on one machine; Redis, routers, the archiver and the
launcher itself stay on this machine. When a node is lost, Ray finds its bundles another place, and
the launcher starts their parts again there. The run's folder, the interpreter and the model must be
on a file system that all nodes share.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import structlog

from outloop.buffer.errors import DeadlineExceeded, SettingsError
from outloop.buffer.redis.client import wait_for_redis
from outloop.buffer.run import make_run_folder, with_access
from outloop.buffer.settings import Settings
from outloop.engine.launch.child_process import PartProcess
from outloop.engine.launch.deploy.parts import (
    apart,
    gpus_of_server,
    gpus_of_trainer_node,
    num_servers,
    ranks_of_node,
    with_given,
)
from outloop.engine.machine.port_reservation import hold_port

NAMESPACE = "outloop"
_CONNECT_TIMEOUT_S = 10.0
_REDIS_TIMEOUT_S = 120.0
_REDIS_STOP_TIMEOUT_S = 20.0
_MB = 1_000_000

_log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """What one process of a part, or one machine of the trainer, is given on its node."""

    part: str
    resources: dict[str, float]
    """As Ray names them: CPU, GPU, memory in bytes, accelerator_type:NAME."""


def bundles_of(settings: Settings) -> tuple[Bundle, ...]:
    """Those of the run's placement group, in its order.

    Raises:
        SettingsError: ranks do not divide among the trainer's machines.
    """
    deploy = settings.deploy
    found = []
    for part, number, gpus in (
        ("server", num_servers(settings), gpus_of_server(settings)),
        ("trainer", deploy.trainer_nodes, gpus_of_trainer_node(settings)),
        ("runner", settings.env.num_runners, 0),
    ):
        given = deploy.resources(part)  # type: ignore[arg-type]
        resources = {"CPU": float(given.cpus), "memory": float(given.memory_mb * _MB)}
        if gpus:
            resources["GPU"] = float(gpus)
            if deploy.gpu_type is not None:
                resources[f"accelerator_type:{deploy.gpu_type}"] = 0.001
        found += [Bundle(part=part, resources=resources)] * number
    return tuple(found)


class RayPlacement:
    """Starts servers, trainer and runners in the bundles of a placement group."""

    def __init__(
        self,
        settings: Settings,
        *,
        address: str,
        group: str,
        host: str,
    ) -> None:
        """`address`: of the cluster; `group`: the placement group's name; `host`: this machine."""
        self._settings = settings
        self._address = address
        self._group = group
        self._host = host
        self._bundles = bundles_of(settings)

    def command(self, name: str, part: str, command: Sequence[str]) -> list[str]:
        """As Placement says; a part that listens registers the address of its own node."""
        if part == "router":
            return [*command, "--advertise", self._host]
        numbers = [number for number, bundle in enumerate(self._bundles) if bundle.part == part]
        if not numbers:
            return list(command)
        options = []
        if part == "trainer":
            if len(numbers) > 1:
                options = ["--ranks-per-node", str(ranks_of_node(self._settings))]
        else:
            numbers = [numbers[int(name.rpartition("-")[2])]]
        if part == "server":
            options = ["--advertise"]
        place = bundle_command(self._address, self._group, name, numbers)
        return [*place, *options, "--", *command]


def bundle_command(address: str, group: str, name: str, numbers: Sequence[int]) -> list[str]:
    """The beginning of the command line that runs a program in bundles; see `ray_part`."""
    return [
        *(sys.executable, "-P", "-m", "outloop.engine.launch.deploy.ray_part"),
        *("--address", address, "--group", group, "--name", name),
        *("--bundles", ",".join(map(str, numbers))),
    ]


def is_ray_installed() -> bool:
    """This interpreter finds the package."""
    return find_spec("ray") is not None


@contextmanager
def placed_by_ray(
    settings: Settings, *, is_installed: Callable[[], bool] = is_ray_installed
) -> Iterator[tuple[Settings, RayPlacement]]:
    """Settings with addresses that other nodes reach, and where the parts go; frees all at the end.

    The cluster is that of RAY_ADDRESS, or the one that runs on this machine; without either, Ray is
    started on this machine for the time of the run.

    Raises:
        SettingsError: Ray is not installed, or the cluster has not what the run needs.
        DeadlineExceeded: the cluster had no room within server.start_timeout_s.
    """
    with reserved_on_ray(settings, is_installed=is_installed) as held:
        given = apart(settings, redis_url=None, trainer_host=_host_of_trainer(settings, held.group))
        with ExitStack() as stack:
            if settings.buffer.redis_url is None:
                given |= stack.enter_context(_redis(settings, held.host))
            placed = with_given(settings, given, engine="ray")
            placement = RayPlacement(
                placed, address=held.address, group=held.group_name, host=held.host
            )
            yield placed, placement


@dataclass(frozen=True, kw_only=True, slots=True)
class RayReservation:
    """What all parts of a run need, held in a cluster."""

    address: str
    """Of the cluster, as HOST:PORT."""
    group: Any
    """The placement group, whose bundles are those of `bundles_of`."""
    group_name: str
    host: str
    """The address of this machine."""


@contextmanager
def reserved_on_ray(
    settings: Settings, *, is_installed: Callable[[], bool] = is_ray_installed
) -> Iterator[RayReservation]:
    """Join the cluster and hold what the run's parts need; frees all at the end.

    Raises:
        SettingsError: as `placed_by_ray`.
        DeadlineExceeded: as `placed_by_ray`.
    """
    if not is_installed():
        raise SettingsError(
            "on='ray' needs the package ray, which is not installed; run pip install 'outloop[ray]'"
        )
    import ray

    with ExitStack() as stack:
        _join_cluster(bundles_of(settings))
        stack.callback(ray.shutdown)
        host = ray.util.get_node_ip_address()
        address = ray.get_runtime_context().gcs_address
        name = f"{settings.run.name}-{secrets.token_hex(4)}"
        group = _reserve(settings, name)
        stack.callback(ray.util.remove_placement_group, group)
        yield RayReservation(address=address, group=group, group_name=name, host=host)


def _join_cluster(bundles: Sequence[Bundle]) -> None:
    """Join the cluster of RAY_ADDRESS or of this machine; without one, start one with room."""
    import ray

    quiet = {"namespace": NAMESPACE, "log_to_driver": False, "configure_logging": False}
    address = os.environ.get("RAY_ADDRESS")
    if address is not None:
        _check_address(address)
        ray.init(address=address, **quiet)
        return
    try:
        ray.init(address="auto", **quiet)
    except ConnectionError:
        wanted = sum(bundle.resources["CPU"] for bundle in bundles)
        # Parts of a run on one machine share its cores; Ray only counts them.
        ray.init(num_cpus=max(os.cpu_count() or 1, math.ceil(wanted)), **quiet)


def _check_address(address: str) -> None:
    """Refuse an address where nothing listens: Ray would try for minutes and end the process."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"RAY_ADDRESS={address!r}: no Ray cluster answers there ({error}); give the HOST:PORT "
            "that `ray start --head` prints, or unset it to use this machine"
        ) from error


def _reserve(settings: Settings, name: str) -> Any:
    """The placement group with every bundle of the run, once all of them have a node."""
    import ray
    from ray.util.placement_group import placement_group

    bundles = [bundle.resources for bundle in bundles_of(settings)]
    timeout_s = settings.server.start_timeout_s
    wanted: dict[str, float] = {}
    for bundle in bundles:
        for kind, amount in bundle.items():
            wanted[kind] = wanted.get(kind, 0.0) + amount
    there = ray.cluster_resources()
    lacking = {
        kind: f"{_amount(kind, amount)} wanted, {_amount(kind, there.get(kind, 0.0))} there"
        for kind, amount in wanted.items()
        if amount > there.get(kind, 0.0)
    }
    if lacking:
        _log.warning("ray_cluster_is_too_small", waits_s=timeout_s, **lacking)
    group = placement_group(bundles, strategy="PACK", name=name)
    if not group.wait(timeout_s):
        ray.util.remove_placement_group(group)
        short = "; ".join(f"{kind}: {text}" for kind, text in lacking.items())
        raise DeadlineExceeded(
            who="launcher",
            phase="start",
            peer=f"room in the Ray cluster ({short or 'other programs hold its resources'}); lower "
            "[deploy.parts], env.num_runners or server.num_servers, or add nodes",
            after_s=timeout_s,
        )
    return group


def _amount(kind: str, amount: float) -> str:
    return f"{amount / _MB:.0f} MB" if kind == "memory" else f"{amount:g}"


def _host_of_trainer(settings: Settings, group: Any) -> str:
    """The address of the node with the trainer's first bundle."""
    import ray

    bundles = bundles_of(settings)
    number = next(n for n, bundle in enumerate(bundles) if bundle.part == "trainer")
    node = ray.util.placement_group_table(group)["bundles_to_node_id"][number]
    return next(str(row["NodeManagerAddress"]) for row in ray.nodes() if row["NodeID"] == node)


@contextmanager
def _redis(settings: Settings, host: str) -> Iterator[dict[str, object]]:
    """A Redis with a password on this machine, and the settings that name it."""
    run_dir = (settings.run.dir / settings.run.name).absolute()
    make_run_folder(settings, run_dir)
    password = settings.buffer.redis_password_file
    if password is None:
        password = run_dir / "redis_password"
        if not password.exists():
            password.touch(mode=0o600)
            password.write_text(secrets.token_hex(32))
    with closing(hold_port("0.0.0.0")) as held:
        port = held.getsockname()[1]
        given: dict[str, object] = {
            "buffer.redis_url": f"redis://{host}:{port}",
            "buffer.redis_password_file": str(password),
        }
        process = PartProcess(
            "redis",
            [
                *(
                    sys.executable,
                    "-P",
                    "-m",
                    "outloop.cli",
                    "redis",
                    "--dir",
                    str(run_dir / "redis"),
                ),
                *("--host", "0.0.0.0", "--port", str(port), "--password-file", str(password)),
                *("--fsync", settings.buffer.fsync),
                *("--max-memory-mb", str(settings.buffer.max_memory_mb)),
            ],
            run_dir / "logs/redis.log",
            {},
        )
        try:
            url = with_access(
                str(given["buffer.redis_url"]), with_given(settings, given, engine="ray").buffer
            )
            wait_for_redis(url, _REDIS_TIMEOUT_S)
            yield given
        finally:
            process.stop(_REDIS_STOP_TIMEOUT_S)
