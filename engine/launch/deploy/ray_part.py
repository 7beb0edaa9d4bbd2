"""One part of a run as the child of a Ray actor: the program that the launcher starts in its place.

It passes on the child's output and SIGTERM, and ends with the child's exit code; with that of a
killed process when the node is lost. When this process dies, Ray ends its actors, and their
children end with them.

    python -m outloop.engine.launch.deploy.ray_part --address HOST:PORT --group NAME --name server-0
        --bundles 0 -- COMMAND...
"""

from __future__ import annotations

import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import click

from outloop.buffer.terminal import echo
from outloop.engine.launch.deploy.parts import RANKS_MODULE
from outloop.engine.launch.deploy.ray_placement import NAMESPACE
from outloop.engine.launch.last_sentence import VARIABLE
from outloop.engine.machine.parent_death import die_with_parent
from outloop.engine.machine.port_reservation import hold_port

NODE_LOST_EXIT_CODE = 128 + signal.SIGKILL
_READ_TIMEOUT_S = 5.0
_READ_BYTES = 65536
_OF_THE_NODE = ("CUDA_VISIBLE_DEVICES", "HOSTNAME", VARIABLE)


class Supervisor:
    """The actor: one child program on its node."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._held: socket.socket | None = None

    def address(self) -> tuple[str, str]:
        """The node's address, and its id in the cluster."""
        import ray

        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()

    def free_port(self) -> int:
        """A port of this node that is kept free for the child."""
        self._held = hold_port("0.0.0.0")
        return int(self._held.getsockname()[1])

    def start(self, command: Sequence[str], folder: str, environment: Mapping[str, str]) -> None:
        """Start the child; beside `environment` it has what Ray gave the actor, such as GPUs."""
        self._process = subprocess.Popen(
            list(command),
            cwd=folder,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    def read(self) -> tuple[bytes, int | None]:
        """What the child wrote since, waiting a while for some; its exit code after the last."""
        assert self._process is not None
        output = self._process.stdout
        assert output is not None
        if not select.select([output], [], [], _READ_TIMEOUT_S)[0]:
            return b"", None
        data = os.read(output.fileno(), _READ_BYTES)
        return (data, None) if data else (b"", self._process.wait())

    def terminate(self) -> None:
        """SIGTERM to the child."""
        if self._process is not None:
            self._process.terminate()


@click.command()
@click.option("--address", required=True)
@click.option("--group", required=True)
@click.option("--name", required=True)
@click.option("--bundles", required=True, help="Numbers in the group, with commas.")
@click.option("--advertise", is_flag=True, help="Append --advertise with the node's address.")
@click.option("--ranks-per-node", type=int, help="Start the command by torchrun on each bundle.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def main(
    address: str,
    group: str,
    name: str,
    bundles: str,
    advertise: bool,
    ranks_per_node: int | None,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND in bundles of a placement group, and end as it ends."""
    import ray

    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    try:
        code = _run(
            name,
            group,
            [int(number) for number in bundles.split(",")],
            command,
            advertise=advertise,
            ranks_per_node=ranks_per_node,
            stop=stop,
        )
    except ray.exceptions.RayActorError as error:
        _print(f"{name}: its node or its actor is gone: {str(error).splitlines()[0]}")
        code = NODE_LOST_EXIT_CODE
    finally:
        ray.shutdown()
    sys.exit(code if code >= 0 else 128 - code)


def _run(
    name: str,
    group: str,
    bundles: Sequence[int],
    command: Sequence[str],
    *,
    advertise: bool,
    ranks_per_node: int | None,
    stop: threading.Event,
) -> int:
    """The exit code: the first that is not 0, after which the others are stopped."""
    import ray

    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in _OF_THE_NODE and not key.startswith("RAY_")
    }
    actors = [_actor(name, group, number) for number in bundles]
    hosts = []
    for actor in actors:
        host, node = ray.get(actor.address.remote())
        hosts.append(host)
        _print(f"{name}: on node {node} at {host}")
    words = list(command)
    if advertise:
        words += ["--advertise", hosts[0]]
    if ranks_per_node is not None:
        port = ray.get(actors[0].free_port.remote())
        words = _by_torchrun(words, len(actors), ranks_per_node, f"{hosts[0]}:{port}")
    _print(f"{name}: {shlex.join(words)}")
    ray.get([actor.start.remote(words, os.getcwd(), environment) for actor in actors])
    return _follow(actors, stop)


def _actor(name: str, group: str, number: int) -> Any:
    """One on the bundle `number`, which has all of the bundle's GPUs."""
    import ray
    from ray.util.placement_group import get_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    found = get_placement_group(group)
    given = dict(found.bundle_specs[number])
    cpus, gpus, memory = (given.pop(kind, 0) for kind in ("CPU", "GPU", "memory"))
    return (
        ray.remote(Supervisor)
        .options(
            num_cpus=cpus,
            num_gpus=gpus,
            memory=memory,
            resources=given,
            # One call reads while another stops the child.
            max_concurrency=2,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                found, placement_group_bundle_index=number
            ),
        )
        .remote()
    )


def _follow(actors: Sequence[Any], stop: threading.Event) -> int:
    """Pass the children's output on until all have ended; the first exit code that is not 0."""
    import ray

    reading = {actor.read.remote(): actor for actor in actors}
    code, is_stopping = 0, False
    while reading:
        ready, _ = ray.wait(list(reading), timeout=0.5)
        for reference in ready:
            actor = reading.pop(reference)
            output, ended = ray.get(reference)
            sys.stdout.buffer.write(output)
            sys.stdout.flush()
            if ended is None:
                reading[actor.read.remote()] = actor
            code = code or ended or 0
        if (stop.is_set() or code) and not is_stopping:
            is_stopping = True
            for actor in actors:
                actor.terminate.remote()
    return code


def _by_torchrun(
    command: Sequence[str], num_nodes: int, ranks_per_node: int, meeting: str
) -> list[str]:
    """The command as ranks on every node, which meet at `meeting`."""
    interpreter, *rest = command
    return [
        *("env", "PYTHONSAFEPATH=1"),
        *(interpreter, "-m", "torch.distributed.run", "--nnodes", str(num_nodes)),
        *("--nproc-per-node", str(ranks_per_node), "--rdzv-backend", "c10d"),
        *("--rdzv-id", "trainer", "--rdzv-endpoint", meeting),
        *(*RANKS_MODULE, *rest[rest.index("-m") + 2 :]),
    ]


def _print(line: str) -> None:
    echo(f"outloop: {line}")


if __name__ == "__main__":
    main()
