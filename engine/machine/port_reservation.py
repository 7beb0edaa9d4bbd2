"""Ports that are reserved until a server listens there.

The system gives a reserved port to a process only if that process asks for it by its number. The
holder gets no connections.
"""

from __future__ import annotations

import socket


def hold_port(host: str, port: int = 0, *, is_shared: bool = False) -> socket.socket:
    """A bound socket that does not listen; its number is in `getsockname()[1]`, 0: any free one.

    Linux lets a server with SO_REUSEADDR, as every server has it, listen beside it; with
    `is_shared` several that have SO_REUSEPORT.

    Raises:
        OSError: it cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, port))
    except OSError:
        held.close()
        raise
    return held
