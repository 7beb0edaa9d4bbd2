"""What an episode's last request said, kept so that the next one costs what is new in it.

Owns: the digest by which identical requests meet. Does not own: reading bodies (dialects), retries
(front, service). Invariant: a digest depends on path and body alone, never on what came before.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from outloop.router.dialects.base import Told

_NUM_DIGITS = 32


class Heard(msgspec.Struct, frozen=True):
    """What was said, and the state of the digest after it."""

    told: Told
    path: bytes
    hasher: Any
    """Of hashlib; only copies of it go on."""


def digest(
    path: bytes, body: bytes, told: Told | None, before: Heard | None
) -> tuple[str, Heard | None]:
    """The digest of a request, and what its next one may go on from.

    What `body` repeats of `before` is not read again.
    """
    if told is None:
        return _short(hashlib.sha256(path + b"\0" + body)), None
    num_told = len(told.text)
    if before is not None and before.path == path and told.text.startswith(before.told.text):
        hasher = before.hasher.copy()
        hasher.update(body[len(before.told.text) : num_told])
    else:
        hasher = hashlib.sha256(path + b"\0" + told.text)
    heard = Heard(told, path, hasher.copy())
    hasher.update(body[num_told:])
    return _short(hasher), heard


def _short(hasher: Any) -> str:
    return str(hasher.hexdigest()[:_NUM_DIGITS])
