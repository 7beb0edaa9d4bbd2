"""What the router counts about itself.

Owns: names and labels of its Prometheus metrics. Does not own: where they are shown. Invariant:
one registry per router app; labels have few values.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from outloop.buffer.records import FinishReason, Turn

_LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_BRANCH_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)


class _TurnTally(Collector):
    """What is counted for every turn, as plain numbers: a metric of its own takes a lock, and more
    time than all of them here."""

    def __init__(self) -> None:
        self.num_finished: dict[str, int] = dict.fromkeys(get_args(FinishReason), 0)
        self.num_prompt_tokens = self.num_output_tokens = 0
        self._num_by_latency = [0] * (len(_LATENCY_BUCKETS) + 1)
        self._latency_s = 0.0

    def observe(self, latency_s: float) -> None:
        """One more answer."""
        self._num_by_latency[bisect_left(_LATENCY_BUCKETS, latency_s)] += 1
        self._latency_s += latency_s

    def collect(self) -> Iterator[Metric]:
        """As Prometheus has them."""
        turns = CounterMetricFamily("router_turns", "turns recorded", labels=["finish_reason"])
        for reason, number in self.num_finished.items():
            turns.add_metric([reason], number)
        yield turns
        tokens = CounterMetricFamily(
            "router_tokens", "ids by where they come from", labels=["source"]
        )
        tokens.add_metric(["prompt"], self.num_prompt_tokens)
        tokens.add_metric(["output"], self.num_output_tokens)
        yield tokens
        bounds = [*map(str, map(float, _LATENCY_BUCKETS)), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._num_by_latency), strict=True))
        yield HistogramMetricFamily(
            "router_turn_seconds",
            "time from request to answer",
            buckets=buckets,
            sum_value=self._latency_s,
        )


class RouterMetrics:
    """Counters, gauges and histograms of one router."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._tally = _TurnTally()
        self.registry.register(self._tally)
        self.replays = Counter(
            "router_replayed_turns",
            "requests answered with a turn that was recorded or under way",
            registry=self.registry,
        )
        self.resumed = Counter(
            "router_resumed_turns",
            "turns of lost attempts that answered the agent that plays them again",
            registry=self.registry,
        )
        self.undelivered = Counter(
            "router_undelivered_turns", "turns whose client had left", registry=self.registry
        )
        self.breaks = Counter(
            "router_branch_breaks",
            "turns that started a branch instead of continuing one",
            ["cause"],
            registry=self.registry,
        )
        self.branches_per_episode = Histogram(
            "router_branches_per_episode",
            "branches of an episode when it closes",
            buckets=_BRANCH_BUCKETS,
            registry=self.registry,
        )
        self.observe_latency = self._tally.observe
        """Seconds from a request to its answer."""
        self.refusals = Counter(
            "router_refusals", "requests refused", ["code"], registry=self.registry
        )
        self.proxied = Counter(
            "router_proxied_requests",
            "requests handed on to upstreams",
            ["model"],
            registry=self.registry,
        )
        self.episodes = Counter("router_opened_episodes", "episodes opened", registry=self.registry)
        self.in_flight = Gauge(
            "router_turns_in_flight", "turns being answered now", registry=self.registry
        )

    def count(self, turn: Turn, *, is_break: bool, is_replayed: bool = False) -> None:
        """One more turn was recorded; one that a lost attempt had recorded was not drawn."""
        if is_replayed:
            self.resumed.inc()
            return
        tally = self._tally
        tally.num_finished[turn.finish_reason] += 1
        tally.num_prompt_tokens += len(turn.prompt_ids)
        tally.num_output_tokens += len(turn.output_ids)
        if is_break:
            self.breaks.labels(turn.branch_cause).inc()

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)
