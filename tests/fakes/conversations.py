"""Conversations for supervised training, without a buffer."""

import itertools
from collections.abc import Iterator
from typing import Self

from outloop.buffer.records import Trajectory


class Conversations:
    """The reader's SFT calls on a list that becomes final at the second look."""

    def __init__(self, trajectories: list[Trajectory], *, ends: bool = True) -> None:
        self._trajectories = trajectories
        self._ends = ends
        self._looks = itertools.count()
        self.states: list[str] = []
        self.statuses: list[dict[str, str]] = []

    def sft_progress(self) -> tuple[int, bool]:
        return len(self._trajectories), self._ends and next(self._looks) > 0

    def sft_trajectories(self) -> Iterator[Trajectory]:
        yield from self._trajectories

    def set_run_state(self, state: str) -> None:
        self.states.append(state)

    @property
    def registry(self) -> Self:
        """The same object stands for the run's processes."""
        return self

    def report_status(self, part: str, fields: dict[str, str]) -> None:
        self.statuses.append(fields)
