"""The network interface of a part, set before it makes a process group."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, MutableMapping

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings

NETWORK = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
"""Read by NCCL and gloo when a group is made."""


def name_network(
    settings: Settings,
    *,
    environment: MutableMapping[str, str] = os.environ,
    interfaces: Callable[[], Collection[str]] | None = None,
) -> None:
    """Tell `run.network_interface` to NCCL and gloo.

    A name that the environment has already stays, so another machine can have another name.

    Args:
        interfaces: of this machine; None: those of the kernel.

    Raises:
        SettingsError: this machine has no such interface.
    """
    name = settings.run.network_interface
    if name is None:
        return
    missing = [variable for variable in NETWORK if variable not in environment]
    here = {each for _, each in socket.if_nameindex()} if interfaces is None else interfaces()
    if missing and name not in here:
        raise SettingsError(
            f"run.network_interface={name!r} is not on this machine, which has "
            f"{', '.join(sorted(here))}; where it has another name, set "
            f"{' and '.join(missing)} in this part's environment"
        )
    environment.update(dict.fromkeys(missing, name))
