"""The settings of the hand-off.

Owns: names, types, defaults and own rules of `[buffer]`. Does not own: where values come from and
the rules across sections (settings). Invariant: frozen; rules refuse and never rewrite.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class BufferSettings(BaseModel):
    """The Redis hand-off."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    redis_url: str | None = None
    """None: start an embedded server in the run folder."""
    redis_password_file: Path | None = None
    """A file that holds the password of redis_url, which is then written down nowhere else. An ACL
    user is named in the URL: rediss://user@host:port/0."""
    redis_ca_file: Path | None = None
    """TLS (rediss://): certificates of the authorities that redis_url's server is trusted by; None:
    those of the system."""
    redis_cert_file: Path | None = None
    """TLS: our own certificate, for a server that asks for one."""
    redis_cert_key_file: Path | None = None
    """TLS: its key."""
    fsync: Literal["always", "everysec", "no"] = "everysec"
    max_memory_mb: int = Field(1024, gt=0)
    group_size: int = Field(8, ge=1)
    max_staleness: int = Field(1, ge=0)
    """0: synchronous. 1: one step off-policy. More: fully asynchronous."""
    lease_s: float = Field(120.0, gt=0)
    group_deadline_s: float = Field(300.0, gt=0)
    """How long after its first claim a group seals that is not complete; see `incomplete`."""
    incomplete: Literal["wait", "train", "drop"] = "train"
    """A group that lacks scored attempts at its deadline, or for good. train: with what it has, two
    at least. drop: as failed, with a dead letter. wait: it has no deadline but those of its
    attempts, and trains with what it has when the last one was given up."""
    take_window: int = Field(0, ge=0)
    """A group is taken only if it is fewer slots than this ahead of the oldest open one, so that
    fast groups do not crowd out slow ones; 0: whatever is ready."""
    priority_window: int = Field(64, ge=1, le=4096)
    """Of so many consecutive slots, those of tasks with a higher priority are played first, so that
    none waits longer than a window; 1: in the order drawn."""
    drop_zero_signal: bool = True
    """Drop groups whose rewards are all equal (drop_reason no_signal)."""
    filter_path: str | None = None
    """package.module:function, `def keep(group) -> str`: empty to train the group, else why not
    (drop_reason filtered)."""
    max_refills: int = Field(0, ge=0)
    """How often a step takes other groups for those dropped as no_signal or filtered before it
    trains a smaller batch; 0: never."""

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> BufferSettings:
        tls_files = {
            name: getattr(self, name)
            for name in ("redis_ca_file", "redis_cert_file", "redis_cert_key_file")
        }
        given = [name for name, path in tls_files.items() if path is not None]
        if given and not (self.redis_url or "").startswith("rediss://"):
            raise ValueError(
                f"buffer.{given[0]}={str(tls_files[given[0]])!r} is for TLS, but buffer.redis_url "
                "does not ask for it; begin it with rediss://, or leave the file out"
            )
        if (tls_files["redis_cert_file"] is None) != (tls_files["redis_cert_key_file"] is None):
            raise ValueError(
                "buffer.redis_cert_file and buffer.redis_cert_key_file belong together; give both "
                "or neither"
            )
        return self
