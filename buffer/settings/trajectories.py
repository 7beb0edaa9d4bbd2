"""The settings of the trajectory archive: `[trajectories]`."""

from __future__ import annotations

from pydantic import Field

from outloop.buffer.settings.section import Section


class TrajectorySettings(Section):
    """What is kept of ended episodes, in runs/NAME/trajectories."""

    enabled: bool | None = None
    """Keep every ended episode with its tokens. Left out: if pyarrow is installed, which
    outloop[view] and outloop[laptop] bring."""
    flush_s: float = Field(2.0, gt=0)
    """How often what has ended is written."""
    share: float = Field(1.0, ge=0, le=1)
    """Of the groups of training, by a hash of their ids; evaluations are always kept."""
    max_episodes: int | None = Field(None, gt=0)
    """The newest so many are kept, to the file; left out: all."""
    max_mb: float = Field(10_000.0, gt=0)
    """Size of the files; the oldest ones are removed."""
    max_waiting_tokens: int = Field(20_000_000, gt=0)
    """Token ids of ended episodes that wait in Redis for the archiver, about ten bytes each; when
    there are more, the oldest are given up and counted."""
