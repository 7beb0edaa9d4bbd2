"""Servers of Redis on loopback that a test watches and kills."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import redis
from redis.crc import key_slot

from fakes.ports import free_ports
from outloop.buffer.redis.embedded import find_server

_FORM_S = 60.0


class RedisServers:
    """Processes by their port."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, port: int, lines: Sequence[str], *options: str) -> None:
        """A server with these lines of configuration."""
        home = self._folder / str(port)
        home.mkdir(parents=True)
        head = [f"port {port}", "bind 127.0.0.1", f"dir {home}", "repl-diskless-sync-delay 0"]
        (home / "server.conf").write_text("\n".join([*head, *lines]) + "\n")
        self._run(port, *options)

    def start_again(self, port: int) -> None:
        """One that was killed, with what its folder holds."""
        self._run(port)

    def _run(self, port: int, *options: str) -> None:
        self._processes[port] = subprocess.Popen(
            [str(find_server()), str(self._folder / str(port) / "server.conf"), *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def signal(self, port: int, number: signal.Signals) -> None:
        """To one of them."""
        os.kill(self._processes[port].pid, number)

    def kill(self, port: int) -> None:
        """As a machine that loses power."""
        self.signal(port, signal.SIGKILL)
        self._processes[port].wait()

    def stop(self) -> None:
        """End what is left."""
        for process in self._processes.values():
            process.kill()
            process.wait()


class Cluster(RedisServers):
    """A Redis Cluster of three primaries, and of spare nodes that own nothing yet."""

    def __init__(self, folder: Path, *, num_spares: int, lines: Sequence[str] = ()) -> None:
        super().__init__(folder)
        # Nodes talk to each other on the port that is 10,000 higher.
        ports = free_ports(3 + num_spares, beside=10_000)
        self.primaries, self.spares = ports[:3], ports[3:]
        for port in ports:
            cluster = ["cluster-enabled yes", "cluster-node-timeout 1000"]
            self.start(port, ["save ''", "appendonly no", *cluster, *lines])

    @property
    def url(self) -> str:
        """Names two of the primaries; the others are to be found."""
        return f"redis+cluster://127.0.0.1:{self.primaries[0]},127.0.0.1:{self.primaries[1]}"

    def form(self) -> None:
        """Join the nodes and share the slots out among the primaries."""
        ports = [*self.primaries, *self.spares]
        for port in ports:
            self._until(lambda port=port: self.ask(port, "PING"))
        for port in ports[1:]:
            self.ask(port, "CLUSTER", "MEET", "127.0.0.1", ports[0])
        bounds = [0, 5461, 10923, 16384]
        for port, first, last in zip(self.primaries, bounds, bounds[1:], strict=False):
            self.ask(port, "CLUSTER", "ADDSLOTS", *range(first, last))
        for port in ports:
            self._until(lambda port=port: self._is_whole(port, len(ports)))

    def replicate(self, primary: int) -> None:
        """Have all spare nodes copy a primary, and wait until they do."""
        self._replicate(dict.fromkeys(self.spares, primary))

    def replicate_all(self) -> None:
        """Have as many spare nodes copy each primary, and wait until they do."""
        self._replicate(dict(zip(self.spares, cycle(self.primaries), strict=False)))

    def _replicate(self, primaries: Mapping[int, int]) -> None:
        """Have replicas copy their primaries."""
        for port, primary in primaries.items():
            name = self.ask(primary, "CLUSTER", "MYID").decode()
            self._until(lambda port=port, name=name: self.ask(port, "CLUSTER", "REPLICATE", name))
        for primary, number in Counter(primaries.values()).items():
            self._until(lambda primary=primary, number=number: self._num_copies(primary) == number)
        # A node that does not know it as a replica would not vote for it.
        for port in self.primaries:
            self._until(lambda port=port: self._num_known_replicas(port) == len(primaries))

    def owner(self, slot: int, *, among: Sequence[int]) -> int:
        """The port of the primary of a slot, as one of the nodes `among` says it."""
        for port in among:
            for first, last, primary, *_ in self.ask(port, "CLUSTER", "SLOTS"):
                if first <= slot <= last:
                    return int(primary[1])
        raise AssertionError(f"slot {slot} has no primary")

    def owner_of(self, tag: str) -> int:
        """The port of the primary that has the keys with this hash tag."""
        return self.owner(key_slot(tag.encode()), among=self.primaries)

    def wait_for_owner(self, owner: int, slot: int) -> None:
        """Until every primary of the beginning says that `owner` has the slot."""
        for port in self.primaries:
            self._until(lambda port=port: self.owner(slot, among=[port]) == owner)

    def ask(self, port: int, *command: Any) -> Any:
        """A node's answer."""
        client = redis.Redis(port=port, protocol=2, socket_timeout=5)
        try:
            return client.execute_command(*command)
        finally:
            client.close()

    def _is_whole(self, port: int, num_nodes: int) -> bool:
        info = dict(
            line.split(":") for line in self._text(port, "CLUSTER", "INFO").split("\r\n") if line
        )
        return info["cluster_state"] == "ok" and int(info["cluster_known_nodes"]) == num_nodes

    def _num_known_replicas(self, port: int) -> int:
        return self._text(port, "CLUSTER", "NODES").count("slave ")

    def _num_copies(self, primary: int) -> int:
        states = self.ask(primary, "INFO", "replication").values()
        return sum(isinstance(one, dict) and one["state"] == "online" for one in states)

    def _text(self, port: int, *command: str) -> str:
        answer = self.ask(port, *command)
        return answer.decode() if isinstance(answer, bytes) else str(answer)

    def _until(self, call: Any) -> None:
        deadline = time.monotonic() + _FORM_S
        while True:
            try:
                if call():
                    return
            except redis.RedisError:
                if time.monotonic() > deadline:
                    raise
            assert time.monotonic() < deadline
            time.sleep(0.05)
