"""A run, event by event, without any of its processes.

Owns: the order of events of runners, servers and trainer over simulated time, and what is counted
of them. Does not own: who may start and be taken (admission), how fast turns are (serving).
Invariant: a simulation is a pure function of its scenario.

Where it is simpler than a run: turns are balanced over servers perfectly; an episode's turns are of
equal length with equal waits behind them, and at most MAX_TURNS are simulated apart; claims and
closes take no time beyond `overhead_s`; evaluation is not simulated; a turn that is placed apart
from its prefix takes no longer, and turns are packed as soon as they may be.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from outloop.buffer.tasks.durations import Candidate, rank_correlation
from outloop.engine.launch.plan.admission import Admission, Group, Rules
from outloop.engine.launch.plan.lengths import Floats, Lengths, uniform
from outloop.engine.launch.plan.serving import Servers, Serving

MAX_TURNS = 3
SLOW_SHARE = 0.1
"""The longest so many of the episodes count as slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """What one episode takes. Seconds and tokens go together: the longest has the most tokens."""

    seconds: Lengths
    """Outside the model: tools, sandboxes, the verifier."""
    tokens: Lengths
    """Of the servers' work: sampled ones, and what a prompt costs in their place."""
    num_turns: int = 1
    overhead_s: float = 0.0
    """What an episode takes beside: claim, router, records, close."""
    by_task: float = 0.0
    """Share of attempts that are as long as their task is, rather than by chance."""
    lost_share: float = 0.0
    """Share of attempts that the infrastructure loses once, and that are resumed."""
    recovery_s: float = 0.0
    """Until a lost attempt goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A run to be simulated."""

    rules: Rules
    episodes: Episodes
    servers: Servers | None
    """None: the seconds of episodes contain the model's."""
    places: int
    """Episodes played at once, over all runners."""
    update_s: float
    """The trainer's time for a step, without waiting and publishing."""
    publish_s: float = 0.0
    """From the end of the update until the version is acknowledged."""
    pause_s: float = 0.0
    """Of that, time in which the servers stand still."""
    no_signal_share: float = 0.0
    """Of taken groups, those whose rewards are all equal."""
    max_refills: int = 0
    num_steps: int = 40
    num_warmup_steps: int = 5
    """Steps at the beginning that are simulated and not counted."""
    has_end: bool = False
    """The run ends with num_steps: the last ones start nothing beyond what they train, so that
    these steps wait for what is slow. False: it is a piece of a long run."""
    seed: int = 0
    quantiles: Callable[[int], Floats] | None = None
    """Slot -> how long each attempt at it is among all episodes, in [0, 1), float64 [group_size];
    None: independent of each other, but for `Episodes.by_task`. Given, nothing is known of tasks
    before they are played, so that every task_order is that of slots."""


@dataclass(slots=True, eq=False)
class _Attempt:
    group: Group[_Attempt]
    index: int
    seconds: float
    tokens: float
    num_turns: int
    lost_s: float
    started_at: float
    ended_at: float = 0.0
    turns_done: int = 0
    is_over: bool = False
    is_scored: bool = False
    oldest_version: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the trained groups of a simulation took, for a bound that holds for exactly them."""

    tokens: float
    """Mean of an episode."""
    seconds: float
    """Mean of an episode, from its start to its end if no server is shared."""
    longest_s: float
    """Mean over groups of the longest attempt's such seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What a simulation counted, warm-up left out."""

    num_steps: int
    elapsed_s: float
    trainer_busy_share: float
    """Of the time, updates and publishes."""
    trainer_wait_share: float
    server_share: float
    """Tokens of the pool over what it could give."""
    idle_server_share: float
    """Of the servers' time, that without a turn."""
    free_server_share: float
    """Of the servers' time while episodes are in flight, that without an episode."""
    moves_per_step: float
    """Turns whose prefix is on another server because turns are packed."""
    episodes_in_flight: float
    """On average."""
    staleness: dict[int, float]
    """Share of trained groups by the age of their oldest token."""
    discarded_share: float
    """Of the attempts that ended, those given up as too old; they are played again."""
    discarded_time_share: float
    """Of the time that attempts took, that of those."""
    rank_correlation: float
    """Of what the group played before said of each task's duration, with that of the trained group;
    the metric buffer/length/rank_correlation of a run."""
    slow_share_ratio: float
    """Slow among trained attempts over slow among those that started."""
    attempt_s: float
    """Mean time of a trained attempt, what shared servers add included."""
    demand: Demand

    @property
    def seconds_per_step(self) -> float:
        """The mean time from one step's end to the next."""
        return self.elapsed_s / self.num_steps

    @property
    def steps_per_hour(self) -> float:
        """3600 over that."""
        return 3600.0 / self.seconds_per_step

    @property
    def staleness_mean(self) -> float:
        """Mean age of the oldest token of a trained group."""
        return sum(age * share for age, share in self.staleness.items())


@dataclass(slots=True)
class _Counts:
    started_at: float = 0.0
    busy_s: float = 0.0
    wait_s: float = 0.0
    tokens_before: float = 0.0
    idle_before_s: float = 0.0
    in_flight_s: float = 0.0
    playing_s: float = 0.0
    free_s: float = 0.0
    num_moved: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    num_lost: int = 0
    num_groups: int = 0
    trained_s: float = 0.0
    lost_s: float = 0.0
    num_started: int = 0
    num_started_slow: int = 0
    num_trained: int = 0
    num_trained_slow: int = 0
    demand_tokens: float = 0.0
    demand_s: float = 0.0
    demand_longest_s: float = 0.0
    predictions: list[tuple[float, float]] = field(default_factory=list)
    num_steps: int = 0


def simulate(scenario: Scenario) -> Simulated:
    """Play `scenario` and count."""
    return _Simulation(scenario).run()


class _Simulation:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._admission = Admission[_Attempt](scenario.rules, self._candidate)
        self._serving = Serving(scenario.servers) if scenario.servers else None
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._now = 0.0
        self._version = 0
        self._num_playing = 0
        self._is_announced = False
        """A version is announced and not acknowledged: nothing is claimed."""
        self._is_paused = False
        self._is_waiting = True
        self._waits_since = 0.0
        self._missing = scenario.rules.groups_per_step
        self._batch: list[Group[_Attempt]] = []
        self._num_refills = 0
        self._step = 0
        self._counts = _Counts()
        self._drawn: dict[int, tuple[Floats, Floats, Floats]] = {}
        whole = scenario.episodes.seconds.plus(scenario.episodes.tokens, self._alone_s(1.0))
        self._slow_from = float(np.quantile(whole.values, 1.0 - SLOW_SHARE))
        self._num_looked_at = 0
        """Groups of which it was asked whether they have a signal."""

    def run(self) -> Simulated:
        scenario = self._scenario
        if scenario.has_end:
            self._admission.steps_left = scenario.num_steps
        self._claim()
        while self._step < scenario.num_steps:
            if self._serving is not None:
                self._counts.num_moved += self._serving.keep(self._num_playing)
            at = self._events[0][0] if self._events else float("inf")
            turn_at = self._serving.next_end() if self._serving else float("inf")
            assert min(at, turn_at) < float("inf"), "nothing will happen any more"
            self._pass(min(at, turn_at))
            if turn_at < at and self._serving is not None:
                attempt = self._serving.end_next()
                assert isinstance(attempt, _Attempt)
                self._end_turn(attempt)
            else:
                heapq.heappop(self._events)[2]()
        return self._result()

    def _pass(self, now: float) -> None:
        self._counts.in_flight_s += (now - self._now) * self._num_playing
        if self._serving is not None and self._scenario.servers and self._num_playing:
            num_free = self._scenario.servers.count - self._serving.num_kept
            num_free = max(num_free, self._scenario.servers.count - self._num_playing)
            self._counts.playing_s += now - self._now
            self._counts.free_s += (now - self._now) * num_free
        self._now = now
        if self._serving is not None:
            self._serving.advance(now)

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (self._now + seconds, self._number, call))

    # Runners.

    def _claim(self) -> None:
        while self._num_playing < self._scenario.places and not self._is_announced:
            group = self._admission.claim()
            if group is None:
                return
            self._start(group)

    def _start(self, group: Group[_Attempt]) -> None:
        if group.number not in self._drawn:
            self._drawn[group.number] = self._draw(group.slot)
        seconds, tokens, lost_s = self._drawn[group.number]
        # An attempt that is played again takes the place, and the length, of the lost one.
        taken = {attempt.index for attempt in group.attempts}
        index = next(i for i in range(self._scenario.rules.group_size) if i not in taken)
        attempt = _Attempt(
            group=group,
            index=index,
            seconds=float(seconds[index]),
            tokens=float(tokens[index]),
            num_turns=max(1, min(self._scenario.episodes.num_turns, MAX_TURNS)),
            lost_s=float(lost_s[index]),
            started_at=self._now,
        )
        group.attempts.append(attempt)
        self._num_playing += 1
        self._counts.num_started += 1
        self._counts.num_started_slow += self._is_slow(attempt)
        overhead_s = self._scenario.episodes.overhead_s + attempt.lost_s
        if overhead_s:
            self._after(overhead_s, lambda: self._begin_turn(attempt))
        else:
            self._begin_turn(attempt)

    def _candidate(self, slot: int) -> Candidate:
        """What is known of the task at a slot: its group was played before, under no load."""
        if self._scenario.quantiles is not None:
            return Candidate(slot=slot, expected_ms=None)
        seconds, tokens, _ = self._draw(slot, is_earlier=True)
        taken_s = seconds + tokens * self._alone_s(1.0)
        return Candidate(slot=slot, expected_ms=1000.0 * float(taken_s.mean()))

    def _draw(self, slot: int, *, is_earlier: bool = False) -> tuple[Floats, Floats, Floats]:
        """Seconds, tokens and time lost of a group's attempts, or of its task's earlier group."""
        episodes, size = self._scenario.episodes, self._scenario.rules.group_size
        seed, stream = self._scenario.seed, 2 if is_earlier else 0
        own, kind, lost = uniform(3 * size + 1, seed=seed, stream=stream, index=slot)[1:].reshape(
            3, size
        )
        if self._scenario.quantiles is not None:
            ranks = self._scenario.quantiles(slot)
        else:
            task = uniform(1, seed=seed, stream=0, index=slot)
            ranks = np.where(kind >= episodes.by_task, own, task)
        lost_s = np.where(lost < episodes.lost_share, episodes.recovery_s, 0.0)
        return episodes.seconds.at(ranks), episodes.tokens.at(ranks), lost_s

    def _begin_turn(self, attempt: _Attempt) -> None:
        if attempt.is_over:
            return
        # A turn that arrives while servers stand still is sampled by the next version.
        if attempt.oldest_version is None:
            attempt.oldest_version = self._version + self._is_paused
        if self._serving is None:
            self._end_turn(attempt)
        else:
            self._serving.add(attempt.tokens / attempt.num_turns, attempt)

    def _end_turn(self, attempt: _Attempt) -> None:
        if attempt.is_over:
            return
        attempt.turns_done += 1
        wait_s = attempt.seconds / attempt.num_turns
        if attempt.turns_done < attempt.num_turns:
            self._after(wait_s, lambda: self._begin_turn(attempt))
        else:
            self._after(wait_s, lambda: self._end(attempt))

    def _end(self, attempt: _Attempt) -> None:
        if attempt.is_over:
            return
        self._finish(attempt)
        self._admission.score(attempt, attempt.group)
        self._count_lost()
        self._take()
        self._claim()

    def _finish(self, attempt: _Attempt) -> None:
        attempt.is_over = True
        attempt.ended_at = self._now
        self._num_playing -= 1

    # The trainer.

    def _take(self) -> None:
        if not self._is_waiting:
            return
        taken = self._admission.take(self._missing, self._now)
        if taken is None:
            return
        self._counts.wait_s += self._now - self._waits_since
        self._is_waiting = False
        self._batch += taken
        scenario = self._scenario
        self._num_looked_at += 1
        chance = uniform(len(taken), seed=scenario.seed, stream=1, index=self._num_looked_at)
        lost = int((chance < scenario.no_signal_share).sum())
        if lost and self._num_refills < scenario.max_refills:
            self._num_refills += 1
            self._missing = lost
            for group in self._batch[-lost:]:
                self._admission.drop(group)
                del self._drawn[group.number]
                self._count_trained(group)
            del self._batch[-lost:]
            self._is_waiting, self._waits_since = True, self._now
            # The credits return with this take, and let others start.
            self._admission.release_held()
            self._claim()
            self._take()
            return
        self._after(scenario.update_s, self._publish)

    def _publish(self) -> None:
        self._is_announced = True
        early_s = self._scenario.publish_s - self._scenario.pause_s
        self._after(max(0.0, early_s), self._pause)

    def _pause(self) -> None:
        self._is_paused = True
        if self._serving is not None:
            self._serving.pause()
        self._after(min(self._scenario.pause_s, self._scenario.publish_s), self._settle)

    def _settle(self) -> None:
        """The version is acknowledged: credits return, groups that became too old end."""
        scenario, counts = self._scenario, self._counts
        if self._serving is not None:
            self._serving.resume()
        self._is_announced = self._is_paused = False
        for group in self._batch:
            counts.staleness[self._version - group.due] += 1
            del self._drawn[group.number]
            self._count_trained(group)
        self._version += 1
        if scenario.has_end:
            self._admission.steps_left = scenario.num_steps - self._step - 1
        self._admission.mark_trained(self._batch)
        self._admission.acknowledge(self._version)
        self._count_lost()
        counts.busy_s += scenario.update_s + scenario.publish_s
        counts.num_steps += 1
        self._step += 1
        self._batch, self._num_refills = [], 0
        self._missing = scenario.rules.groups_per_step
        self._is_waiting, self._waits_since = True, self._now
        if self._step == scenario.num_warmup_steps:
            self._counts = _Counts(started_at=self._now)
            if self._serving:
                self._counts.tokens_before = self._serving.tokens
                self._counts.idle_before_s = self._serving.idle_s
        self._take()
        self._claim()

    # What is counted.

    def _alone_s(self, tokens: float) -> float:
        servers = self._scenario.servers
        return tokens / servers.tokens_per_s_alone if servers else 0.0

    def _is_slow(self, attempt: _Attempt) -> bool:
        return attempt.seconds + self._alone_s(attempt.tokens) > self._slow_from

    def _count_trained(self, group: Group[_Attempt]) -> None:
        counts, longest = self._counts, 0.0
        for attempt in group.attempts:
            overhead_s = self._scenario.episodes.overhead_s + attempt.lost_s
            alone_s = overhead_s + attempt.seconds + self._alone_s(attempt.tokens)
            longest = max(longest, alone_s)
            counts.demand_s += alone_s
            counts.demand_tokens += attempt.tokens
            counts.trained_s += attempt.ended_at - attempt.started_at
            counts.num_trained += 1
            counts.num_trained_slow += self._is_slow(attempt)
        counts.demand_longest_s += longest
        counts.num_groups += 1
        expected = self._candidate(group.slot).expected_ms
        if expected is not None:
            taken = math.fsum(a.ended_at - a.started_at for a in group.attempts)
            counts.predictions.append((expected, taken / len(group.attempts)))

    def _count_lost(self) -> None:
        """Attempts given up as too old end now; their places are free."""
        for attempt in self._admission.lost:
            if not attempt.is_over:
                self._finish(attempt)
            self._counts.num_lost += 1
            self._counts.lost_s += attempt.ended_at - attempt.started_at
        self._admission.lost.clear()

    def _result(self) -> Simulated:
        counts, scenario = self._counts, self._scenario
        elapsed_s = max(self._now - counts.started_at, 1e-12)
        capacity = scenario.servers.capacity if scenario.servers else 0.0
        tokens = (self._serving.tokens if self._serving else 0.0) - counts.tokens_before
        idle_s = (self._serving.idle_s if self._serving else 0.0) - counts.idle_before_s
        num_servers = scenario.servers.count if scenario.servers else 0
        servers_s, playing_s = elapsed_s * num_servers, counts.playing_s * num_servers
        num_taken = max(1, sum(counts.staleness.values()))
        started = counts.num_started_slow / max(1, counts.num_started)
        trained = counts.num_trained_slow / max(1, counts.num_trained)
        spent_s = counts.trained_s + counts.lost_s
        return Simulated(
            num_steps=counts.num_steps,
            elapsed_s=elapsed_s,
            trainer_busy_share=counts.busy_s / elapsed_s,
            trainer_wait_share=counts.wait_s / elapsed_s,
            server_share=tokens / (capacity * elapsed_s) if capacity else 0.0,
            idle_server_share=idle_s / servers_s if servers_s else 0.0,
            free_server_share=counts.free_s / playing_s if playing_s else 0.0,
            moves_per_step=counts.num_moved / max(1, counts.num_steps),
            episodes_in_flight=counts.in_flight_s / elapsed_s,
            staleness={age: number / num_taken for age, number in sorted(counts.staleness.items())},
            discarded_share=counts.num_lost / max(1, counts.num_lost + counts.num_trained),
            discarded_time_share=counts.lost_s / spent_s if spent_s else 0.0,
            rank_correlation=rank_correlation(counts.predictions),
            slow_share_ratio=trained / started if started else 1.0,
            attempt_s=counts.trained_s / max(1, counts.num_trained),
            demand=Demand(
                tokens=counts.demand_tokens / max(1, counts.num_trained),
                seconds=counts.demand_s / max(1, counts.num_trained),
                longest_s=counts.demand_longest_s / max(1, counts.num_groups),
            ),
        )
