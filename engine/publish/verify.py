"""Whether a server holds what was sent.

Owns: which checksums are compared for which kind of server. Does not own: their definitions
(checksum), the phases around it (transaction). Invariant: a server passes only if it names exactly
the tensors that were sent, each with the checksum of the bytes that were sent.
"""

from __future__ import annotations

from collections.abc import Iterable

from outloop.buffer.errors import PublishFailed
from outloop.engine.publish.buckets import Fed
from outloop.engine.publish.checksum import Algorithm
from outloop.engine.publish.client import ServerClient

_ALGORITHM: Algorithm = "xxh3_128"


def algorithms_for(kinds: Iterable[str]) -> tuple[Algorithm, ...]:
    """Checksums that must be computed to verify servers of these kinds."""
    return (_ALGORITHM,) if any(True for _ in kinds) else ()


def verify_server(client: ServerClient, fed: Fed, deadline: float) -> None:
    """Ask the server what it holds and compare.

    Raises:
        PublishFailed: a tensor differs, is missing, or was never sent.
    """
    held = client.checksums(_ALGORITHM, deadline)
    compare_checksums(client.server_id, fed.checksums[_ALGORITHM], held)


def compare_checksums(server_id: str, sent: dict[str, str], held: dict[str, str]) -> None:
    """Refuse a server whose weights are not what was sent.

    Both map names to checksums of the tensor's bytes. A server that names its parameters otherwise
    (SGLang fuses some) needs its names translated before.

    Raises:
        PublishFailed: a tensor differs, is missing, or was never sent.
    """
    wrong = sorted(name for name, value in sent.items() if held.get(name, value) != value)
    missing = sorted(sent.keys() - held.keys())
    unsent = sorted(held.keys() - sent.keys())
    for names, what in (
        (wrong, "differ from what was sent"),
        (missing, "were sent but are not there"),
        (unsent, "were never sent"),
    ):
        if names:
            raise PublishFailed(
                f"{server_id}: {len(names)} tensors {what}, the first is {names[0]!r}; "
                "the server is fed again by the next publish"
            )
