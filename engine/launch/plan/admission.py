"""The buffer's admission, without Redis: which attempt starts, which groups are taken.

Owns: the rules of buffer/redis/scripts (claim, open_window, take, lifecycle, acknowledge_version,
drop and mark_trained) that decide about time, the controller of pipeline_depth = "auto" among them.
Does not own: time itself (simulator), what is known of tasks and what a lost attempt had recorded.
Invariant: as the scripts, no more live groups than the depth and the age allow, and admitted -
trained = live groups + held credits.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings.buffer import refuse_over_provision
from outloop.buffer.tasks.durations import Candidate, longest_first

TOLERATED_WAIT = 0.05
WEIGHT_OF_PAST = 0.75
TAKES_BEFORE_LOWERING = 4


def _unknown(slot: int) -> Candidate:
    return Candidate(slot=slot, expected_ms=None)


class Attempt(Protocol):
    """What the rules look at in an attempt."""

    oldest_version: int | None
    """Of its tokens; None: it has none yet."""
    is_scored: bool


A = TypeVar("A", bound=Attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What decides who starts and who is taken; the settings of the same names."""

    group_size: int
    groups_per_step: int
    max_staleness: int
    pipeline_depth: float | Literal["auto"]
    over_provision: float = 1.0
    task_order: Literal["slot", "longest_first"] = "slot"

    def __post_init__(self) -> None:
        try:
            refuse_over_provision(self.over_provision, self.max_staleness)
        except ValueError as error:
            raise SettingsError(str(error)) from error

    @property
    def max_age(self) -> int:
        """How old a trained token may be, in publishes."""
        return max(self.max_staleness, 1 if self.over_provision > 1.0 else 0)

    @property
    def limit(self) -> int:
        """Live groups of which one batch a step trains each in time."""
        return (self.max_age + 1) * self.groups_per_step

    @property
    def provided(self) -> int:
        """Groups started for a step."""
        return min(math.ceil(self.groups_per_step * self.over_provision), self.limit)

    @property
    def beyond(self) -> int:
        """Groups started beyond those, at most; with "auto" where the controller begins."""
        depth = 1.0 if self.pipeline_depth == "auto" else self.pipeline_depth
        return min(math.ceil(depth * self.groups_per_step), self.limit - self.provided)

    @property
    def most_live(self) -> int:
        """Groups that may be live at once, whatever the controller does."""
        return self.limit if self.pipeline_depth == "auto" else self.provided + self.beyond


@dataclass(slots=True, eq=False)
class Group(Generic[A]):
    """Attempts at one task."""

    slot: int
    number: int
    """Of the groups minted so far."""
    pending: int
    """Attempts that are to be claimed."""
    begin: int
    """No token of it is older: the version it was minted under, or repaired to."""
    attempts: list[A] = field(default_factory=list)
    """Those that count, in flight or scored."""
    state: Literal["open", "ready", "leased", "gone"] = "open"
    due: int = 0
    """The version that its age is counted from."""


class Admission(Generic[A]):
    """The state of a run's groups."""

    def __init__(self, rules: Rules, candidate: Callable[[int], Candidate] = _unknown) -> None:
        """`candidate`: what is known of a slot's task when the window of the slot opens."""
        self.rules = rules
        self._candidate = candidate
        self._window: deque[int] = deque()
        """Slots that are started next."""
        self.beyond = rules.beyond
        """Set by the controller."""
        self.steps_left: int | None = None
        """Of the run: nothing is started that none of them will train. None: it has no end."""
        self.lost: list[A] = []
        """Attempts given up as too old; the simulator empties it."""
        self._admitted = 0
        self._trained = 0
        self._held = 0
        self._cursor = 0
        self._minted = 0
        self._acknowledged = 0
        self._fill: list[tuple[int, int, Group[A]]] = []
        self._live: dict[int, Group[A]] = {}
        """Open and ready groups by number."""
        self._due: Counter[int] = Counter()
        """Number of live groups by `due`."""
        self._ready: list[tuple[int, int, int]] = []
        """(due, slot, number), sorted."""
        self._controller = _Controller(rules)

    # Claims.

    def claim(self) -> Group[A] | None:
        """A place of the oldest open group that has one, or of a new one; None: no more may be."""
        while self._fill:
            slot, _, group = self._fill[0]
            if group.state == "open" and group.pending > 0:
                group.pending -= 1
                return group
            heapq.heappop(self._fill)
        num_live = self._admitted - self._trained
        if self.steps_left is not None and num_live >= self.steps_left * self.rules.groups_per_step:
            return None
        if num_live >= self.rules.provided + self.beyond:
            self._controller.is_depth_reached = True
            return None
        slot = self._next_slot()
        self._admitted += 1
        self._minted += 1
        begin = self._acknowledged
        group = Group(slot, self._minted, self.rules.group_size - 1, begin, due=begin)
        heapq.heappush(self._fill, (slot, group.number, group))
        self._live[group.number] = group
        self._due[begin] += 1
        return group

    def _next_slot(self) -> int:
        if not self._window:
            first = self._cursor
            if self.rules.task_order == "slot":
                self._window.append(first)
            else:
                slots = range(first, first + self.rules.groups_per_step)
                self._window.extend(longest_first([self._candidate(slot) for slot in slots]))
            self._cursor += len(self._window)
        return self._window.popleft()

    def score(self, attempt: A, group: Group[A]) -> bool:
        """An attempt ended with a reward. False: it is too old, and played again."""
        if self._is_too_old(attempt):
            self._lose(attempt, group)
            return False
        attempt.is_scored = True
        if group.pending == 0 and all(one.is_scored for one in group.attempts):
            group.state = "ready"
            oldest = [a.oldest_version for a in group.attempts if a.oldest_version is not None]
            self._set_due(group, min(oldest, default=group.begin))
            bisect.insort(self._ready, (group.due, group.slot, group.number))
        return True

    def _is_too_old(self, attempt: A) -> bool:
        oldest = attempt.oldest_version
        return oldest is not None and self._acknowledged - oldest > self.rules.max_age

    def _lose(self, attempt: A, group: Group[A]) -> None:
        group.attempts.remove(attempt)
        group.pending += 1
        heapq.heappush(self._fill, (group.slot, group.number, group))
        self.lost.append(attempt)

    def _set_due(self, group: Group[A], due: int) -> None:
        self._forget_due(group)
        group.due = due
        self._due[due] += 1

    def _forget_due(self, group: Group[A]) -> None:
        self._due[group.due] -= 1
        if not self._due[group.due]:
            del self._due[group.due]

    # Versions.

    def acknowledge(self, version: int) -> None:
        """Every server serves `version`: what no batch may hold any more is played again."""
        self._acknowledged = version
        oldest = version - self.rules.max_age
        for group in list(self._live.values()):
            if group.due < oldest:
                self._repair(group, oldest)

    def _repair(self, group: Group[A], oldest: int) -> None:
        """Attempts that are too old are played again; the others stay."""
        if group.state == "ready":
            self._ready.remove((group.due, group.slot, group.number))
        begin = self._acknowledged
        for attempt in list(group.attempts):
            if self._is_too_old(attempt):
                self._lose(attempt, group)
                continue
            unknown = self._acknowledged if attempt.is_scored else oldest
            tokens = attempt.oldest_version
            begin = min(begin, unknown if tokens is None else tokens)
        group.begin = begin
        self._set_due(group, begin)
        if group.state == "ready":
            group.state = "open" if group.pending else "ready"
            if group.state == "ready":
                bisect.insort(self._ready, (group.due, group.slot, group.number))

    # The trainer.

    def take(self, count: int, now: float) -> list[Group[A]] | None:
        """Lease the `count` ready groups that become too old first.

        None: fewer are ready, or without a group that is still open a live one would be too old
        before its turn. Held credits are released.
        """
        self.release_held()
        is_short = len(self._ready) < count
        ready = self._ready[:count]
        if is_short or self._is_held(ready, count):
            self._controller.note_wait("short" if is_short else "slow", now)
            return None
        self._controller.note_wait(None, now)
        taken = [self._live.pop(number) for _, _, number in ready]
        del self._ready[:count]
        for group in taken:
            group.state = "leased"
            self._forget_due(group)
        if count >= self.rules.groups_per_step and self.rules.pipeline_depth == "auto":
            self.beyond = self._controller.adapt(self.beyond, len(self._ready), now)
        return taken

    def _is_held(self, ready: list[tuple[int, int, int]], count: int) -> bool:
        """Whether groups that are due within some steps would not fit into the batches of those."""
        batch, age = self.rules.groups_per_step, self.rules.max_age
        for steps in range(age + 1):
            if steps * batch >= len(self._live):
                return False
            bound = self._acknowledged - age + steps + 1
            num_due = sum(number for due, number in self._due.items() if due < bound)
            num_here = bisect.bisect_left(ready, (bound, -1, -1))
            if num_here < min(count, num_due - steps * batch):
                return True
        return False

    def drop(self, group: Group[A]) -> None:
        """The trainer does not train what it took; the credit returns with the next take."""
        group.state = "gone"
        self._held += 1

    def release_held(self) -> None:
        """Return the credits of dropped groups."""
        self._admitted -= self._held
        self._held = 0

    def mark_trained(self, groups: list[Group[A]]) -> None:
        """The published weights contain these groups."""
        for group in groups:
            group.state = "gone"
        self._trained += len(groups)
        self.release_held()


class _Controller:
    """The depth of pipeline_depth = "auto", as take.lua adapts it once for each batch."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.is_depth_reached = False
        """Since the last batch, a claim found admission full."""
        self._cause: Literal["short", "slow"] | None = None
        self._since = 0.0
        self._waited = {"short": 0.0, "slow": 0.0}
        self._leased_at: float | None = None
        self._period = self._short = self._slow = 0.0
        self._least_left: int | None = None
        self._takes = 0

    def note_wait(self, cause: Literal["short", "slow"] | None, now: float) -> None:
        """What the trainer waits for from now on; None: it waits no longer."""
        if self._cause is not None:
            self._waited[self._cause] += now - self._since
        self._cause, self._since = cause, now

    def adapt(self, beyond: int, left: int, now: float) -> int:
        """How many groups are started beyond a step's from now on.

        Args:
            left: ready groups that the batch left over.
        """
        waited, self._waited = self._waited, {"short": 0.0, "slow": 0.0}
        began, self._leased_at = self._leased_at, now
        is_reached, self.is_depth_reached = self.is_depth_reached, False
        if began is None:
            return beyond
        self._period = WEIGHT_OF_PAST * self._period + max(now - began, 1e-3)
        self._short = WEIGHT_OF_PAST * self._short + waited["short"]
        self._slow = WEIGHT_OF_PAST * self._slow + waited["slow"]
        self._least_left = left if self._least_left is None else min(self._least_left, left)
        self._takes += 1
        change = self._change(beyond, is_reached=is_reached)
        if change > 0 or self._takes >= TAKES_BEFORE_LOWERING:
            self._least_left, self._takes = left, 0
        return beyond + change

    def _change(self, beyond: int, *, is_reached: bool) -> int:
        room = self._rules.limit - self._rules.provided - beyond
        step = max(1, self._rules.groups_per_step // 8)
        tolerated = TOLERATED_WAIT * self._period
        is_short, is_slow = self._short > tolerated, self._slow > tolerated
        if is_short and self._short > self._slow:
            return min(step, room) if is_reached else 0
        if self._takes < TAKES_BEFORE_LOWERING:
            return 0
        change = 0
        if not is_short and not is_slow and self._least_left:
            change = -max(1, self._least_left // 2)
        elif is_slow and self._short < self._slow / 4:
            change = -step
        return max(change, -beyond)
