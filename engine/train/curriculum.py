"""Which list of tasks is played how often, by how often each is solved.

A list that is always solved, or never, teaches nothing; one that is solved half of the time teaches
most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outloop.buffer.records import Group
from outloop.buffer.settings import Settings
from outloop.engine.train.data.scored_groups import scored, source_of
from outloop.engine.train.interfaces import Reader


def weight_of(pass_rate: float, *, base: float, floor: float) -> float:
    """base * (floor + (1 - floor) * 4 p (1 - p)), at most `base`.

    p (1 - p) is the variance of a reward of 0 or 1, the score of learnability of Rutherford et al.,
    arXiv:2408.15099, section 4. Differs from the paper, which picks single levels by it: here it
    scales the weight of a whole list, and a floor keeps every list measured.
    """
    return base * (floor + (1.0 - floor) * 4.0 * pass_rate * (1.0 - pass_rate))


class Curriculum:
    """Moves the weights of a run's task lists while it goes on; after a restart it measures again,
    from the weights that were in force."""

    def __init__(self, settings: Settings, reader: Reader) -> None:
        self._plan = settings.trainer.curriculum
        self._reader = reader
        tasks = settings.env.tasks
        self._bases = (
            {name: source.weight for name, source in tasks.items() if source.weight > 0}
            if isinstance(tasks, Mapping)
            else {}
        )
        self._rates: dict[str, float] = {}

    def follow(self, groups: Sequence[Group], *, step: int) -> dict[str, float]:
        """Measure the groups of a take, dropped ones too, and change the weights if it is time.

        Returns the metrics.
        """
        if not self._plan.every:
            return {}
        for name, passed in self._passed(groups).items():
            rate = sum(passed) / len(passed)
            before = self._rates.get(name, rate)
            self._rates[name] = self._plan.smoothing * before + (1.0 - self._plan.smoothing) * rate
        weights = {
            name: weight_of(rate, base=self._bases[name], floor=self._plan.floor)
            for name, rate in self._rates.items()
        }
        if step % self._plan.every == 0:
            self._reader.change_task_weights(weights)
        return {f"source/{name}/pass_rate": rate for name, rate in self._rates.items()} | {
            f"source/{name}/weight": weight for name, weight in weights.items()
        }

    def _passed(self, groups: Sequence[Group]) -> dict[str, list[bool]]:
        """Of each list whether each scored episode solved its task."""
        found: dict[str, list[bool]] = {}
        for group in groups:
            name = source_of(group)
            if name in self._bases:
                found.setdefault(name, []).extend(
                    t.episode.reward.value >= self._plan.pass_reward
                    for t in scored(group)
                    if t.episode.reward is not None
                )
        return {name: passed for name, passed in found.items() if passed}
