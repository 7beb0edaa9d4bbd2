"""How far ahead of the trainer episodes start, and how old a trained token may be.

Both limits are settings, and both may change while the run goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outloop.buffer.errors import SettingsError
from outloop.buffer.redis.scripts import SyncScripts
from outloop.buffer.settings.buffer import checked_depth, refuse_over_provision

PipelineDepth = float | Literal["auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What admission goes by now."""

    pipeline_depth: PipelineDepth
    max_staleness: int
    over_provision: float
    groups_per_step: int
    num_for_step: int
    """Groups that are started for a step."""
    num_beyond: int
    """Groups that may be started beyond them: what pipeline_depth, or its controller, allows and
    max_staleness leaves room for."""
    num_live: int
    """Groups started and not trained or dropped."""
    cause: str
    """What the controller decided at the last take; empty before."""


class AdmissionLimits:
    """The limits of one run; the sync face."""

    def __init__(self, scripts: SyncScripts) -> None:
        self._scripts = scripts

    def read(self) -> Limits:
        """What holds now."""
        depth, staleness, ppm, per_step, num_for_step, num_beyond, num_live, cause = (
            self._scripts.call("limits", what="reading the limits of admission")
        )
        return Limits(
            pipeline_depth="auto" if depth == b"auto" else float(depth),
            max_staleness=int(staleness),
            over_provision=int(ppm) / 1e6,
            groups_per_step=int(per_step),
            num_for_step=int(num_for_step),
            num_beyond=int(num_beyond),
            num_live=int(num_live),
            cause=cause.decode(),
        )

    def change(
        self, *, pipeline_depth: PipelineDepth | None = None, max_staleness: int | None = None
    ) -> Limits:
        """Change what is given, until the run is started again; returns what holds then.

        A lower max_staleness has what is too old played again.

        Raises:
            SettingsError: a limit is negative, or leaves buffer.over_provision no room.
        """
        if pipeline_depth is not None:
            try:
                checked_depth(pipeline_depth)
            except ValueError as error:
                raise SettingsError(str(error)) from error
        if max_staleness is not None:
            if max_staleness < 0:
                raise SettingsError(f"max_staleness={max_staleness}; 0 or more is allowed")
            try:
                refuse_over_provision(self.read().over_provision, max_staleness)
            except ValueError as error:
                raise SettingsError(str(error)) from error
        self._scripts.call(
            "set_limits",
            "" if pipeline_depth is None else pipeline_depth,
            "" if max_staleness is None else max_staleness,
            what="changing the limits of admission",
        )
        return self.read()
