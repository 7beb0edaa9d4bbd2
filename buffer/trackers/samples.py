"""Sample episodes for trackers that show tables: the first few of each policy version."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from outloop.buffer.trackers.tracker import RunFacts, SeenEpisode

COLUMNS = ("episode", "task", "purpose", "version", "reward", "fate", "outcome", "tokens", "text")
_MAX_CHARS = 4000


class Samples:
    """Chooses, of each version, the first `num_episodes` that ended."""

    def __init__(self, num_episodes: int) -> None:
        self._num_episodes = num_episodes
        self._version = -1
        self._num_chosen = 0

    @classmethod
    def of(cls, run: RunFacts) -> Samples:
        """As the run's settings want."""
        return cls(int(run.settings["telemetry"]["num_sample_episodes"]))

    def choose(self, episodes: Sequence[SeenEpisode]) -> list[tuple[int, list[SeenEpisode]]]:
        """(version, those to show) for each version that goes on or begins; an older one does not
        come again."""
        shown = []
        in_order = sorted(
            (one for one in episodes if one.policy_version is not None),
            key=lambda one: one.policy_version or 0,
        )
        for version, members in groupby(in_order, key=lambda one: one.policy_version or 0):
            if version < self._version:
                continue
            if version > self._version:
                self._version, self._num_chosen = version, 0
            chosen = list(members)[: self._num_episodes - self._num_chosen]
            self._num_chosen += len(chosen)
            if chosen:
                shown.append((version, chosen))
        return shown


def row_of(episode: SeenEpisode) -> list[str | int | float | None]:
    """A row with COLUMNS."""
    text = episode.text
    if len(text) > _MAX_CHARS:
        half = _MAX_CHARS // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return [
        episode.episode_id,
        episode.task_id,
        episode.purpose,
        episode.policy_version,
        episode.reward,
        episode.fate,
        episode.outcome,
        episode.num_output_tokens,
        text,
    ]
