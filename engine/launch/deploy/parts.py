"""What every engine asks of the settings: how many processes of which part, and their GPUs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings, build_settings

TRAINER_PORT = 29500
"""Where the ranks of several trainer machines meet."""
PAGE_PORT = 9100
"""Of the page for Prometheus, where the settings leave it open."""
RANKS_MODULE = ("-m", "--", "outloop.cli")
"""How torchrun is given the program: without `--` it takes our `--run` for one of its own options,
which it lets people shorten."""


def num_servers(settings: Settings) -> int:
    """Processes of `outloop server`; attached servers have one each, which watches them.

    Raises:
        SettingsError: servers of earlier versions are asked for, which no engine places.
    """
    if settings.server.num_frozen:
        raise SettingsError(
            f"server.num_frozen={settings.server.num_frozen}: servers of earlier versions are "
            "started by `outloop train` on one machine alone; leave it out"
        )
    if settings.trainer.mode != "rl":
        return 0
    return settings.server.num_servers or len(settings.server.urls)


def gpus_of_server(settings: Settings) -> int:
    """Of each server; 0 for one on a CPU, and for one that was started elsewhere."""
    server = settings.server
    is_on_gpu = server.num_servers and server.device.startswith("cuda")
    return server.tensor_parallel_size if is_on_gpu else 0


def ranks_of_node(settings: Settings) -> int:
    """Trainer ranks on each of deploy.trainer_nodes machines.

    Raises:
        SettingsError: they do not divide.
    """
    ranks, nodes = settings.trainer.num_ranks, settings.deploy.trainer_nodes
    if ranks % nodes:
        raise SettingsError(
            f"trainer.num_ranks={ranks} with deploy.trainer_nodes={nodes}: each machine has as "
            "many ranks; choose a multiple"
        )
    return ranks // nodes


def gpus_of_trainer_node(settings: Settings) -> int:
    """On each machine of the trainer; `auto` means GPUs where they are listed or servers have any.

    Raises:
        SettingsError: ranks do not divide among the machines.
    """
    trainer = settings.trainer
    is_on_gpu = trainer.device.startswith("cuda") or (
        trainer.device == "auto" and bool(trainer.gpus or gpus_of_server(settings))
    )
    return ranks_of_node(settings) if is_on_gpu else 0


def apart(settings: Settings, *, redis_url: str | None, trainer_host: str) -> dict[str, object]:
    """Settings that parts on several machines need, by name: addresses, and weights by a way there.

    Args:
        redis_url: of a Redis that the engine starts; None: that of the settings.
        trainer_host: where servers reach the trainer.
    """
    given: dict[str, object] = {"router.host": "0.0.0.0", "server.host": "0.0.0.0"}
    if redis_url is not None:
        given["buffer.redis_url"] = redis_url
    if settings.publish.transport in ("shared_memory", "cuda_ipc"):
        given["publish.transport"] = "disk"
    elif settings.publish.transport == "collective":
        given["publish.host"] = trainer_host
    return given


def has_archiver(settings: Settings) -> bool:
    """Whether trajectories are kept. Where the settings leave that to what is installed, they are:
    an image of docker/Dockerfile has pyarrow."""
    return settings.trajectories.enabled is not False


def has_monitor(settings: Settings) -> bool:
    """Whether somebody wants alarms or the page for Prometheus."""
    return settings.alarms.enabled or settings.telemetry.prometheus_port is not None


def watched(settings: Settings) -> dict[str, object]:
    """Settings of archiver and monitor on several machines, by name: what is kept does not depend
    on what an image holds, and the page is at a fixed port that others reach."""
    given: dict[str, object] = {}
    if has_archiver(settings):
        given["trajectories.enabled"] = True
    if settings.telemetry.prometheus_port is not None:
        given["telemetry.prometheus_host"] = "0.0.0.0"
        given["telemetry.prometheus_port"] = settings.telemetry.prometheus_port or PAGE_PORT
    return given


def with_given(settings: Settings, given: Mapping[str, object], *, engine: str) -> Settings:
    """The settings with those of `given`, by section.name, in place of their own.

    Raises:
        SettingsError: one of them is refused; `engine` is named in the sentence.
    """
    tree = settings.model_dump(mode="json")
    for name, value in given.items():
        section, _, field = name.partition(".")
        tree[section][field] = value
    return build_settings(tree, source=f"on={engine!r}")


def refuse_certificates(settings: Settings) -> None:
    """Refuse what names files of this machine, to which the files of an engine do not reach.

    Raises:
        SettingsError: router or servers are to have certificates.
    """
    for section, endpoint in (("router", settings.router), ("server", settings.server)):
        if endpoint.tls_cert_file is not None:
            raise SettingsError(
                f"{section}.tls_cert_file={str(endpoint.tls_cert_file)!r}: the parts of these "
                "files speak plain HTTP among each other; leave it out, and put a proxy or an "
                "ingress with TLS before the router (router.public_url)"
            )


def override_words(given: Mapping[str, object]) -> list[str]:
    """As words of a command line; JSON's values are TOML's."""
    return [f"--set={name}={json.dumps(value)}" for name, value in given.items()]


def fingerprint(*texts: str) -> str:
    """Eight digits that change with the texts."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:8]
