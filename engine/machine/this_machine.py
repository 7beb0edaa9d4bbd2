"""Whether an address is one of this machine's."""

from __future__ import annotations

import ipaddress
import socket

import psutil


def is_elsewhere(host: str) -> bool:
    """Tell whether a host is known to be another machine; False for a name that nobody resolves."""
    try:
        found = {_bare(str(entry[4][0])) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    addresses = [ipaddress.ip_address(name) for name in found]
    if any(address.is_loopback or address.is_unspecified for address in addresses):
        return False
    own = {_bare(entry.address) for entries in psutil.net_if_addrs().values() for entry in entries}
    return found.isdisjoint(own)


def _bare(address: str) -> str:
    """An IPv6 address without its interface, fe80::1%eth0."""
    return address.partition("%")[0]
