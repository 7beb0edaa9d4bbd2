"""User ids of this machine for programs that nobody trusts: one for each session.

The kernel counts much by user, whatever the namespace: processes, pipe buffers, descriptors in
flight, watches. Sessions of one user would take these from each other.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

NOBODY = 65534
"""Owns the folders that sessions begin with."""
_RANGES = (
    # Neither people, nor services, nor containers of systemd or of user namespaces.
    range(1_900_000_000, 1_967_000_000),
    # Where this process has a container's 65,536 ids only.
    range(20_000, 60_000),
)


def new_user() -> int | None:
    """A user and group id for one session or program; None: this process may not change users.

    Ids are random, so that processes that start sessions need not agree. Two sessions that are
    given the same one share its counts, and nothing else.
    """
    if os.getuid() != 0:
        return None
    mapped = [
        range(first, first + count)
        for first, _, count in (
            map(int, line.split()) for line in Path("/proc/self/uid_map").read_text().splitlines()
        )
    ]
    for ids in _RANGES:
        if any(ids[0] in one and ids[-1] in one for one in mapped):
            return ids[secrets.randbelow(len(ids))]
    return NOBODY


def base_owner() -> int | None:
    """The user who owns the folders that sessions begin with; None: this process's own."""
    return NOBODY if os.getuid() == 0 else None
