"""Ports for programs that are told where to listen before they start."""

import random
import socket
from pathlib import Path

_FIRST = 10_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int, *, beside: int = 0) -> list[int]:
    """Different ports of loopback that nobody listens on, nor on those that are `beside` higher.

    They are none of those that the system gives to connections and to who asks for any port: one
    that is free now may be such a one's before the program listens.
    """
    found: list[int] = []
    candidates = random.SystemRandom().sample(range(_FIRST, _end() - beside), 1000)
    for port in candidates:
        if len(found) == count:
            return found
        both = {port, port + beside}
        if all(map(_is_free, both)) and both.isdisjoint({one + beside for one in found}):
            found.append(port)
    raise AssertionError(f"no {count} of {len(candidates)} ports are free")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _end() -> int:
    """The first port that the system gives by itself; on Linux by default 32768."""
    return int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32_768
