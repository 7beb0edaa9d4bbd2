"""The settings `[buffer]`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qs, urlsplit

from pydantic import Field, field_validator, model_validator

from outloop.buffer.settings.section import Section


class BufferSettings(Section):
    """The Redis hand-off."""

    redis_url: str | None = None
    """None: start an embedded server in the run folder. sentinel://host:port,host:port/group/db:
    the primary of the group that these Sentinels watch. redis+cluster://host:port,host:port: the
    primary of a Redis Cluster that owns the run's keys."""
    min_replicas: int = Field(0, ge=0)
    """So many replicas have a record before it is acknowledged. 1: a primary that dies takes
    nothing with it that was acknowledged. 0: it may take the last records, and their episodes are
    played again."""
    redis_password_file: Path | None = None
    """A file that holds the password of redis_url, which itself must not hold one: settings are
    written into the run folder. An ACL user is named in the URL: rediss://user@host:port/0."""
    redis_password_env: str | None = None
    """Environment variable that holds the password instead, in every process of the run."""
    redis_ca_file: Path | None = None
    """TLS (rediss://): certificates of the authorities that redis_url's server is trusted by; None:
    those of the system."""
    redis_cert_file: Path | None = None
    """TLS: our own certificate, for a server that requires one."""
    redis_cert_key_file: Path | None = None
    """TLS: its key."""
    fsync: Literal["always", "everysec", "no"] = "everysec"
    """When Redis writes to disk: everysec may lose the last second when the machine loses power."""
    max_memory_mb: int = Field(1024, gt=0)
    """Of the embedded Redis; when it is full, new turns are refused, not old ones dropped."""
    group_size: int = Field(8, ge=1)
    """Episodes of one task that are compared with each other."""
    max_staleness: int = Field(1, ge=0)
    """How many publishes old a trained token may be. 0: synchronous. 1: one step off-policy. More:
    fully asynchronous. The trainer waits for groups that would become older. May be changed while
    the run goes on."""
    lease_s: float = Field(120.0, gt=0)
    """A trainer that does not renew for so long loses the groups it took."""
    max_outage_s: float | None = Field(None, ge=0)
    """How long trainer, servers and launcher wait for a Redis that went away or cannot write, and
    the trainer for room on the disk of the run's folder, before the run ends with a sentence; left
    out: half of lease_s, which is the most, since leases must outlive the wait. Turns wait for
    router.buffer_timeout_s."""
    pipeline_depth: float | Literal["auto"] = "auto"
    """How many steps ahead of the trainer episodes may start: beyond those for the step that comes
    next, pipeline_depth * groups_per_step groups are in flight or ready. 0: none. auto: as few as
    keep the trainer from waiting. Of both limits the narrower holds: where max_staleness leaves
    room for fewer groups, fewer are started. May be changed while the run goes on."""
    over_provision: float = Field(1.0, allow_inf_nan=False)
    """Partial rollouts: so many times groups_per_step groups, 1 or more, are started for a step,
    which takes those that are complete first; the others go on and belong to the next. At
    max_staleness 0 their tokens are then one publish old when they are trained."""
    group_deadline_s: float | None = Field(None, gt=0)
    """How long after its first claim a group seals that is not complete; see `incomplete`. Left
    out: when each of its attempts has ended, at the attempt's own deadline at the latest."""
    cuts_slow_episodes: bool = False
    """Allows a group_deadline_s below the deadline of an episode. What it cuts off is never trained
    and counts against env.max_replaced_share."""
    incomplete: Literal["train", "drop"] = "train"
    """A group that lacks scored attempts when it seals. train: with what it has, two at least.
    drop: as failed, with a dead letter."""
    priority_window: int = Field(64, ge=1, le=4096)
    """Of so many consecutive slots, those of tasks with a higher priority are played first, so that
    none waits longer than a window; 1: in task order."""
    drop_zero_signal: bool = True
    """Drop groups whose rewards are all equal (drop_reason no_signal)."""
    filter_path: str | None = None
    """package.module:function, `def keep(group: ScoredGroup) -> str`: empty to train it, else why
    not (drop_reason filtered)."""
    max_refills: int = Field(0, ge=0)
    """How often a step takes other groups for those dropped as no_signal or filtered before it
    trains a smaller batch; 0: never."""

    @property
    def max_age(self) -> int:
        """How many publishes old a trained token may be: max_staleness, and one more than 0 where
        over_provision carries groups into the next step."""
        return max(self.max_staleness, int(self.over_provision > 1))

    @property
    def outage_s(self) -> float:
        """max_outage_s, or what it is when left out."""
        return self.lease_s / 2 if self.max_outage_s is None else self.max_outage_s

    @field_validator("pipeline_depth", mode="before")
    @classmethod
    def _check_depth(cls, value: object) -> object:
        return checked_depth(value)

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> BufferSettings:
        self._refuse_what_has_no_effect()
        refuse_over_provision(self.over_provision, self.max_staleness)
        if self.outage_s > self.lease_s / 2:
            raise ValueError(
                f"buffer.max_outage_s={self.outage_s:g} exceeds half of buffer.lease_s="
                f"{self.lease_s:g}: the trainer would lose its leases while it waits; raise "
                f"lease_s to {2 * self.outage_s:g}, or lower max_outage_s"
            )
        if self.cuts_slow_episodes and self.group_deadline_s is None:
            raise ValueError(
                "buffer.cuts_slow_episodes=true without buffer.group_deadline_s has no effect; set "
                "group_deadline_s, or leave cuts_slow_episodes out"
            )
        if holds_password(self.redis_url or ""):
            raise ValueError(
                "buffer.redis_url holds a password, and settings are written into the run folder; "
                "put the password into a file and name it as buffer.redis_password_file, or into "
                "an environment variable and name it as buffer.redis_password_env"
            )
        if self.redis_password_file is not None and self.redis_password_env is not None:
            raise ValueError(
                f"buffer.redis_password_file={str(self.redis_password_file)!r} and "
                f"buffer.redis_password_env={self.redis_password_env!r}: one of them is allowed"
            )
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

    def _refuse_what_has_no_effect(self) -> None:
        if self.min_replicas and self.redis_url is None:
            raise ValueError(
                f"buffer.min_replicas={self.min_replicas} has no effect without buffer.redis_url: "
                "the embedded server has no replicas; leave it out, or give redis_url"
            )
        if self.max_refills and not self.drop_zero_signal and self.filter_path is None:
            raise ValueError(
                f"buffer.max_refills={self.max_refills} has no effect: it needs "
                "buffer.drop_zero_signal = true or buffer.filter_path; leave it out, or set one"
            )


def checked_depth(value: object) -> object:
    """`value` as it is, if it is "auto" or a number of steps.

    Raises:
        ValueError: it is neither.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value != "auto" and not (is_number and 0 <= float(str(value)) < math.inf):
        raise ValueError(
            f'buffer.pipeline_depth={value!r}: a number of steps from 0 on, or "auto", is allowed'
        )
    return value


def refuse_over_provision(over_provision: float, max_staleness: int) -> None:
    """Refuse to start fewer groups for a step than it trains, or more than can be trained before
    they are too old.

    Raises:
        ValueError: it would.
    """
    if over_provision < 1.0:
        raise ValueError(
            f"buffer.over_provision={over_provision:g} starts fewer groups than a step trains, so "
            "that no batch would be full; 1 or more is allowed"
        )
    most = max(max_staleness, 1) + 1
    if over_provision > most:
        raise ValueError(
            f"buffer.over_provision={over_provision:g} with buffer.max_staleness={max_staleness}: "
            f"of {over_provision:g} batches started together one is trained a step, and the last "
            f"would be older than {most - 1}; 1 to {most} is allowed, or raise max_staleness to "
            f"{math.ceil(over_provision) - 1}"
        )


def beyond_age(pipeline_depth: float | Literal["auto"], max_staleness: int) -> str:
    """A sentence if max_staleness leaves no room for the depth, else empty."""
    if pipeline_depth == "auto" or pipeline_depth <= max_staleness:
        return ""
    return (
        f"buffer.pipeline_depth={pipeline_depth:g} exceeds buffer.max_staleness={max_staleness}: "
        f"groups are started {max_staleness} steps ahead, since those beyond would be too old "
        f"before their turn; raise max_staleness to {math.ceil(pipeline_depth)}, or lower "
        "pipeline_depth"
    )


def holds_password(url: str) -> bool:
    """True if a URL of Redis holds a password."""
    try:
        parts = urlsplit(url)
        return bool(parts.password) or "password" in parse_qs(parts.query)
    except ValueError:
        # No URL, which connecting will report; it may hold a password all the same.
        return "@" in url
