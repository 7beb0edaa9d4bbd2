"""What the router counts about itself.

Owns: names and labels of its Prometheus metrics. Does not own: where they are shown. Invariant:
one registry per router app; labels have few values.
"""

from __future__ import annotations

from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from outloop.buffer.records import FinishReason, Turn

_LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_BRANCH_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)


class RouterMetrics:
    """Counters, gauges and histograms of one router."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.turns = Counter(
            "router_turns", "turns recorded", ["finish_reason"], registry=self.registry
        )
        self.tokens = Counter(
            "router_tokens", "ids by where they come from", ["source"], registry=self.registry
        )
        self.turn_seconds = Histogram(
            "router_turn_seconds",
            "time from request to answer",
            buckets=_LATENCY_BUCKETS,
            registry=self.registry,
        )
        for reason in get_args(FinishReason):
            self.turns.labels(reason)
        for source in ("prompt", "output"):
            self.tokens.labels(source)
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
        self.posted = Counter(
            "router_posted_trajectories",
            "trajectories for RL that were recorded elsewhere",
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "router_turns_in_flight", "turns being answered now", registry=self.registry
        )

    def count(self, turn: Turn, *, is_break: bool, is_replayed: bool = False) -> None:
        """One more turn was recorded; one that a lost attempt had recorded was not generated."""
        if is_replayed:
            self.resumed.inc()
            return
        self.turns.labels(turn.finish_reason).inc()
        self.tokens.labels("prompt").inc(len(turn.prompt_ids))
        self.tokens.labels("output").inc(len(turn.output_ids))
        if is_break:
            self.breaks.labels(turn.branch_cause).inc()

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)
