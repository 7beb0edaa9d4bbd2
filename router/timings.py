"""How long the router waits where no setting decides."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """Durations in seconds."""

    peer_answer_s: float = 5.0
    """A process that says nothing for so long counts as gone; so does one that no longer asks."""
    peer_round_s: float = 2.0
    """Who waits for another process's turn asks so often whether it is still there."""
    return_grace_s: float = 10.0
    """A client that left may come back with a retry this long; then its turn is recorded as
    masked."""
    stream_silence_s: float = 15.0
    """A stream that has begun sends a comment after so long without a delta, such as while a
    trainer has the servers' memory: proxies and clients close what is silent for a minute."""
    claim_wait_s: float = 2.0
    """A claim waits this long for a version to be acknowledged before it is answered 503."""
    server_grace_s: float = 5.0
    """A server that has left the registry may finish its turns for so long; it may never answer."""
    forget_after_s: float = 60.0
    """It is remembered this long of an episode that it was closed, or has expired."""
    housekeeping_s: float = 2.0
    """Between two reports of its status; it learns of runner keys in the same rhythm."""


DEFAULT_TIMINGS = Timings()
