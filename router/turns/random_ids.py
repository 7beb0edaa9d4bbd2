"""Ids that nobody can guess.

Owns: drawing them. Does not own: what they name. Invariant: each is as good as one of `secrets`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

_NUM_AT_ONCE = 256


def random_ids(num_bytes: int) -> Iterator[str]:
    """Hexadecimal ids of `num_bytes` random bytes, without end.

    The system is asked for many at once: a call of it for each costs more than all else about an
    id. A process that is forked must make its own.
    """
    while True:
        drawn = os.urandom(num_bytes * _NUM_AT_ONCE).hex()
        size = 2 * num_bytes
        yield from (drawn[at : at + size] for at in range(0, len(drawn), size))
