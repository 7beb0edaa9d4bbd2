"""An episode whose fate is decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from outloop.buffer.records import OpenEpisode

Fate = Literal["trained", "dropped", "evaluated", "lost"]
"""What became of an episode. lost: its attempt ended without a result that counts."""


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """An ended episode in the queue; the script packs the same fields."""

    episode_id: str
    fate: Fate
    reason: str
    """dropped: the drop_reason. lost: infrastructure, environment, stale, or cut by its group's
    deadline or drop. Otherwise empty."""
    ended_at_ms: int
    """When its fate was decided, Unix ms."""
    num_tokens: int
    slot: int
    """Of its group; -1: it belongs to none."""
    group_size: int
    trained_version: int
    """The policy_version published after the update that trained it; -1: none did."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedEpisode:
    """An entry with its episode."""

    entry: Entry
    episode: OpenEpisode
    closed_at: float | None
    """Unix seconds; None if it was never closed."""
