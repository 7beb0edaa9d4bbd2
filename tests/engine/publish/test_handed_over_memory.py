"""Memory is handed over to servers of this machine; others are known by their addresses.

Addresses of others are those that documentation has for itself: no machine has them.
"""

import socket
from pathlib import Path
from typing import Any

import psutil
import pytest
import structlog

from outloop.buffer.errors import SettingsError
from outloop.buffer.records import ServerEntry
from outloop.buffer.settings import Settings
from outloop.engine.machine.this_machine import is_elsewhere
from outloop.engine.publish.handed_over_memory import HandedOverMemory, refuse_servers_elsewhere

OWN = [
    entry.address
    for entries in psutil.net_if_addrs().values()
    for entry in entries
    if entry.family in (socket.AF_INET, socket.AF_INET6)
]
CUDA = {"kind": "sglang", "device": "cuda", "dtype": "bfloat16", "num_servers": 0}


@pytest.mark.parametrize(
    "host", [*OWN, "localhost", "127.0.0.7", "::1", "0.0.0.0", "no-such-name.invalid", ""]
)
def test_this_machine_is_known_by_every_address(host: str) -> None:
    """A name that nobody resolves is not known to be another machine."""
    assert not is_elsewhere(host)


@pytest.mark.parametrize("host", ["192.0.2.7", "198.51.100.1", "2001:db8::7"])
def test_another_machine_is_known_by_its_address(host: str) -> None:
    """By both families."""
    assert is_elsewhere(host)


@pytest.mark.parametrize("transport", ["shared_memory", "cuda_ipc"])
def test_servers_elsewhere_are_not_handed_memory(transport: str) -> None:
    """Each is said once, with what to set; servers of this machine are fed."""
    urls = ["http://127.0.0.1:1", "http://192.0.2.7:30000", "http://[2001:db8::7]:30000"]
    entries = [
        ServerEntry(
            server_id=url, url=url, kind="sglang", policy_version=None, is_quarantined=False
        )
        for url in urls
    ]
    memory = HandedOverMemory(transport)
    with structlog.testing.capture_logs() as logs:
        refusals = [memory.refusals(entries) for _ in range(2)]
    assert [list(found) for found in refusals] == [urls[1:]] * 2
    assert f'publish.transport="{transport}" with a server at {urls[1]}' in refusals[0][urls[1]]
    assert [log["url"] for log in logs] == urls[1:]


@pytest.mark.parametrize(
    ("transport", "url", "is_refused"),
    [
        ("cuda_ipc", "http://192.0.2.7:30000", True),
        ("cuda_ipc", "http://127.0.0.1:30000", False),
        # Loads from files of the fallback, as before.
        ("shared_memory", "http://192.0.2.7:30000", False),
        ("disk", "http://192.0.2.7:30000", False),
    ],
)
def test_cuda_ipc_to_another_machine_is_refused_first(
    transport: str, url: str, is_refused: bool, tmp_path: Path
) -> None:
    """Before a run is started."""
    server: dict[str, Any] = CUDA | {"urls": ("http://localhost:1", url)}
    settings = Settings(model={"path": tmp_path}, server=server, publish={"transport": transport})
    if not is_refused:
        refuse_servers_elsewhere(settings)
        return
    with pytest.raises(SettingsError, match=r"at http://192\.0\.2\.7:30000.*collective"):
        refuse_servers_elsewhere(settings)
