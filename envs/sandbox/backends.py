"""All sandboxes, by name.

The sandbox that is named is used, or an error says why it cannot be; there is no weaker fallback.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from outloop.buffer.errors import SettingsError
from outloop.envs.sandbox.api import Limits, Sandbox
from outloop.envs.sandbox.bubblewrap import BubblewrapSandbox
from outloop.envs.sandbox.container import ContainerSandbox
from outloop.envs.sandbox.unprotected import SubprocessSandbox

SANDBOXES: Mapping[str, Callable[..., Sandbox]] = {
    "bubblewrap": BubblewrapSandbox,
    "container": ContainerSandbox,
    "subprocess": SubprocessSandbox,
}


def open_sandbox(name: str = "bubblewrap", limits: Limits | None = None, **options: Any) -> Sandbox:
    """Open the sandbox of that name; `limits` are the defaults of its sessions.

    Raises:
        SettingsError: no such name, or this machine does not support it.
    """
    if name not in SANDBOXES:
        raise SettingsError(f"sandbox={name!r}; {', '.join(SANDBOXES)} are allowed")
    return SANDBOXES[name](limits, **options)
