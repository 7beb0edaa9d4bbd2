"""Several hosts on one machine: network namespaces on a bridge, each with an address of its own.

Owns: making and removing them, and what happens to the link of one: cut, slow. Does not own: which
part lives where (placed). Invariant: names carry the process id, and nothing is left of them when
`hosts` returns. Needs root, and `ip` and `tc` of iproute2.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

NETWORK = "10.{}.{}"
SLOW = ("rate", "1mbit", "burst", "16kb", "latency", "400ms")
"""A link of 1 Mbit/s with a queue of 0.4 s."""


@dataclass(frozen=True, slots=True)
class Host:
    """One of them."""

    namespace: str
    link: str
    """Its end on the bridge."""
    bridge: str
    address: str

    def command(self, command: Sequence[str]) -> list[str]:
        """The command line that runs there."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def cut(self) -> None:
        """Nothing arrives there or from there any more; nobody is told."""
        call("ip", "link", "set", self.link, "nomaster")

    def join(self) -> None:
        """The end of `cut`."""
        call("ip", "link", "set", self.link, "master", self.bridge)

    def slow(self, shape: Sequence[str] = SLOW) -> None:
        """What goes there, and what comes from there, has a link as `shape` says."""
        call("tc", "qdisc", "add", "dev", self.link, "root", "tbf", *shape)
        call(*self.command(["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *shape]))

    def hurry(self) -> None:
        """The end of `slow`."""
        call("tc", "qdisc", "del", "dev", self.link, "root")
        call(*self.command(["tc", "qdisc", "del", "dev", "eth0", "root"]))


def call(*words: str) -> None:
    """Run a command; what it said is in the error.

    Raises:
        RuntimeError: it failed.
    """
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=20)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")


def why_not() -> str:
    """Why there can be no namespaces here; empty where there can."""
    if os.getuid() != 0:
        return "network namespaces need root; run it as root"
    name = f"olprobe{os.getpid()}"
    try:
        call("ip", "netns", "add", name)
        call("ip", "netns", "del", name)
    except (OSError, RuntimeError) as error:
        return f"network namespaces cannot be made here: {error}"
    return ""


@contextmanager
def hosts(names: Sequence[str]) -> Iterator[dict[str, Host]]:
    """A host for each name; this process reaches them by the bridge, as they do each other."""
    number = os.getpid()
    network = NETWORK.format(64 + number // 250 % 64, number % 250)
    bridge = f"ol{number}"
    made = {}
    with ExitStack() as stack:
        call("ip", "link", "add", bridge, "type", "bridge")
        stack.callback(call, "ip", "link", "del", bridge)
        call("ip", "address", "add", f"{network}.1/24", "dev", bridge)
        call("ip", "link", "set", bridge, "up")
        for index, name in enumerate(names):
            host = Host(
                f"ol{number}-{name}", f"ol{number}v{index}", bridge, f"{network}.{10 + index}"
            )
            call("ip", "netns", "add", host.namespace)
            stack.callback(call, "ip", "netns", "del", host.namespace)
            call(
                *("ip", "link", "add", host.link, "type", "veth"),
                *("peer", "name", "eth0", "netns", host.namespace),
            )
            # A namespace that is deleted gives its links back some time later.
            stack.callback(call, "ip", "link", "del", host.link)
            call("ip", "link", "set", host.link, "master", bridge, "up")
            for words in (
                ["address", "add", f"{host.address}/24", "dev", "eth0"],
                ["link", "set", "eth0", "up"],
                ["link", "set", "lo", "up"],
            ):
                call(*host.command(["ip", *words]))
            made[name] = host
        yield made
