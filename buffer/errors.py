"""Every error that crosses the boundary of a part.

A message says what failed, `name=value`, what is allowed and what to do.

    OutloopError
    |-- SettingsError        a setting, file or import path is wrong (also a ValueError)
    |-- RecordError          a record breaks its invariants (also a ValueError)
    |-- SchemaMismatch       bytes were written by another release
    |-- BufferUnavailable    Redis is unreachable, full or read-only
    |   |-- WritesRefused    it answers and cannot write: disk, memory, replicas
    |   `-- BufferLost       it answers, but does not hold the run: waiting does not help
    |       `-- WritesLost   it holds the run, without the last of what it had acknowledged
    |-- NotFound             no such episode, group or task
    |-- Conflict             the same key was used with another content
    |-- Gone                 the episode is closed or its group is sealed
    |-- TooManyReplaced      more than env.max_replaced_share of the attempts ended without a result
    |-- FenceExpired         a lease was lost to another trainer; nothing was acknowledged
    |-- DeadlineExceeded     a wait passed its deadline; names who waited for whom
    |-- ServerUnavailable    a server did not answer, or answered that it cannot
    |-- PublishFailed        weights did not reach a server, or reached it wrongly
    |-- UpdateRefused        a gradient was not finite or a spike, or groups could not be trained
    |-- CheckpointFailed     a checkpoint was not written; the one before it stays in use
    |-- DiskFull             the run's folder had no room for as long as it may be waited for
    |-- TrackerFailed        a tracker did not take what it was given; the run goes on
    |-- EnvironmentFailure   raised by an env: its own machinery failed, not the policy
    `-- PartFailed           a process of the run ended; names it and its last words
        `-- RankKilled       a trainer rank got a signal, or no memory; the run may be started again
"""

from __future__ import annotations


class OutloopError(Exception):
    """Root of every error that outloop raises on purpose."""


class SettingsError(OutloopError, ValueError):
    """A setting, file or import path is wrong; nothing has been started."""


class RecordError(OutloopError, ValueError):
    """A record breaks its own invariants; the message names the field."""


class SchemaMismatch(OutloopError):
    """Bytes carry a schema number that this release does not read."""


class BufferUnavailable(OutloopError):
    """Redis is unreachable, full or read-only, or does not hold the run."""


class WritesRefused(BufferUnavailable):
    """Redis answers, and cannot write: its disk or memory is full, or its replicas are missing."""


class BufferLost(BufferUnavailable):
    """Redis answers, but does not hold the run: it was emptied, or is another server."""


class WritesLost(BufferLost):
    """Redis came back without the last of what it had acknowledged to this process; a trainer that
    starts again goes back to its checkpoint and is right."""


class NotFound(OutloopError):
    """No such episode, group or task."""


class Conflict(OutloopError):
    """The same idempotency key was used with another content."""


class Gone(OutloopError):
    """The episode is closed, or its group is sealed."""


class TooManyReplaced(OutloopError):
    """More attempts ended without a result than the run allows; it must not train on the rest."""


class FenceExpired(OutloopError):
    """The lease was lost; the caller must not acknowledge."""


class DeadlineExceeded(OutloopError):
    """A wait passed its deadline.

    Guarantees that the message names the waiting process, the phase and the peer.
    """

    def __init__(self, *, who: str, phase: str, peer: str, after_s: float) -> None:
        super().__init__(
            f"{who} waited {after_s:.1f} s in phase={phase!r} for {peer}; the deadline passed. "
            f"Look at the log of {peer}, or raise the deadline."
        )
        self.who = who
        self.phase = phase
        self.peer = peer
        self.after_s = after_s


class ServerUnavailable(OutloopError):
    """A server did not answer, or answered that it cannot."""


class PublishFailed(OutloopError):
    """Weights did not reach a server, or reached it wrongly."""


class UpdateRefused(OutloopError):
    """A gradient was not finite or a spike, or most of a step's groups could not be trained.

    The weights are those from before the update.
    """


class CheckpointFailed(OutloopError):
    """A checkpoint could not be written; nothing was acknowledged by it."""


class DiskFull(OutloopError):
    """The run's folder had no room for longer than buffer.max_outage_s."""


class TrackerFailed(OutloopError):
    """A tracker did not take what it was given; it is asked again, and the run goes on."""


class EnvironmentFailure(OutloopError):
    """The machinery of an env failed, not the policy; the attempt may be replaced."""


class PartFailed(OutloopError):
    """A process of the run ended unexpectedly."""


class RankKilled(PartFailed):
    """A trainer rank was ended by a signal, or the system gave it no more memory; the run goes on
    from its checkpoint."""


UNREADABLE = (RecordError, SchemaMismatch)
"""Raised by decoding: the bytes are damaged, or of another release."""
SETTINGS_EXIT_CODE = 2
"""Exit code of a part with wrong settings: starting it again would change nothing."""
RANK_KILLED_EXIT_CODE = 75
"""Exit code of a trainer that lost a rank, or what Redis had acknowledged to it: the launcher
starts it again, and it goes on from its checkpoint."""
