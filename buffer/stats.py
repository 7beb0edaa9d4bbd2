"""Counters and sizes of the buffer, by name.

Scripts count together with the transition that they make. STATS declares every name, and every
declared name is always present.
"""

from __future__ import annotations

from typing import get_args

import redis

from outloop.buffer.limits import Limits
from outloop.buffer.records import DropReason
from outloop.buffer.redis.client import translated
from outloop.buffer.store.ledger import Ledger
from outloop.buffer.telemetry import ADMISSION_METRICS, DEPTH_CAUSES, LEDGER_COLUMNS, LEDGER_METRICS

_COUNTERS: dict[str, tuple[str, str]] = {
    "buffer/groups": ("groups", "groups started since the run began"),
    "buffer/attempts": ("attempts", "attempts given out, evaluations included"),
    "buffer/episodes": ("episodes", "episodes opened"),
    "buffer/superseded_episodes": (
        "superseded_episodes",
        "episodes taken over by another one of the same attempt",
    ),
    "buffer/scored_episodes": ("scored", "training episodes that count in their group"),
    "buffer/turns": ("turns", "turns recorded"),
    "buffer/branches": ("branches", "branches started"),
    "buffer/output_tokens": ("output_tokens", "tokens that servers sampled"),
    "buffer/replaced/environment": ("replaced:environment", "attempts replaced, by cause"),
    "buffer/replaced/infrastructure": ("replaced:infrastructure", "attempts replaced, by cause"),
    "buffer/replaced/stale": ("replaced:stale", "attempts replaced, by cause"),
    "buffer/failed_before_turns": (
        "failed_before_turns",
        "attempts without a reward that failed before their first turn: of the environment, or of "
        "the agent before its first model call",
    ),
    "buffer/train_attempts": ("train_attempts", "attempts given out for training"),
    "buffer/resultless_attempts": (
        "resultless_attempts",
        "of those, attempts that ended without a result that is trained: replaced, given up, cut "
        "off, or in groups dropped as stale or failed",
    ),
    "buffer/resumed_attempts": (
        "resumed_attempts",
        "times that a lost attempt was kept to be resumed",
    ),
    "buffer/turns_of_resumed_attempts": (
        "turns_of_resumed_attempts",
        "turns that those had recorded",
    ),
    "buffer/tokens_of_resumed_attempts": (
        "tokens_of_resumed_attempts",
        "tokens sampled in those turns",
    ),
    "buffer/replayed_turns": ("replayed_turns", "recorded turns that answered a resumed attempt"),
    "buffer/replayed_tokens": ("replayed_tokens", "tokens that were not sampled again"),
    "buffer/turns_not_replayed": (
        "turns_not_replayed",
        "recorded turns of scored attempts that were not replayed, and are not trained",
    ),
    "buffer/archive_overflow": (
        "archive_overflow",
        "ended episodes that waited for the archiver in vain: more than "
        "trajectories.max_waiting_tokens did",
    ),
    "buffer/reopened_groups": (
        "reopened",
        "complete groups that were too old and play some of their attempts again",
    ),
    "buffer/silent_attempts": (
        "silent_attempts",
        "attempts lost because their runner fell silent",
    ),
    "buffer/lost_attempts": ("lost_attempts", "attempts given up: no replacement was left"),
    "buffer/turns_of_lost_attempts": (
        "turns_of_lost_attempts",
        "turns that replaced and lost attempts had recorded",
    ),
    "buffer/tokens_of_lost_attempts": (
        "tokens_of_lost_attempts",
        "tokens sampled in those turns",
    ),
    "buffer/requeued_eval_attempts": ("requeued_eval_attempts", "evaluation attempts repeated"),
    "buffer/late_rewards": ("late_rewards", "rewards that came after their group was sealed"),
    "buffer/sealed_groups": ("sealed", "groups sealed"),
    "buffer/leased_groups_total": ("leased", "groups leased since the run began"),
    "buffer/expired_leases": ("expired_leases", "times that a trainer lost its leases"),
    "buffer/trained_groups": ("trained", "groups trained, those of abandoned versions included"),
    "buffer/acknowledged_groups": ("acknowledged", "groups contained in a checkpoint"),
    "buffer/requeued_dead_letters": (
        "requeued_dead_letters",
        "dead letters whose slot is played again",
    ),
    "buffer/discarded_dead_letters": ("discarded_dead_letters", "dead letters dropped for good"),
    **{f"buffer/depth/{cause}": (f"depth:{cause}", text) for cause, text in DEPTH_CAUSES.items()},
    **{
        f"buffer/dropped/{reason}": (f"dropped:{reason}", f"groups dropped as {reason}")
        for reason in get_args(DropReason)
    },
}
_SIZES: dict[str, tuple[str, str, str]] = {
    "buffer/ready_groups": ("zcard", "ready", "groups ready to be taken"),
    "buffer/open_groups": ("zcard", "open", "groups that are not complete"),
    "buffer/leased_groups": ("zcard", "leases", "groups leased and not in a checkpoint"),
    "buffer/attempts_in_flight": ("hlen", "attempts", "attempts neither scored nor lost"),
    "buffer/dead_letters": ("llen", "dead", "dead letters that nobody has resolved"),
    "buffer/waiting_for_archive": ("llen", "archive", "ended episodes that are not archived yet"),
    "buffer/slots_to_replay": ("zcard", "replay", "slots to be played again"),
}
_SHARES: dict[str, tuple[str, str, str]] = {
    "buffer/resumed_share": (
        "buffer/resumed_attempts",
        "buffer/train_attempts",
        "times that an attempt was resumed, for each attempt given out",
    ),
    "buffer/replaced_share": (
        "buffer/resultless_attempts",
        "buffer/train_attempts",
        "share of attempts without a result; `take` refuses above env.max_replaced_share",
    ),
}
_SUMS: dict[str, tuple[str, str]] = {
    "buffer/dropped_groups": ("buffer/dropped/", "groups dropped, all reasons"),
    "buffer/replaced_attempts": ("buffer/replaced/", "attempts replaced, all causes"),
}

STATS: dict[str, str] = (
    {name: text for name, (_, text) in _COUNTERS.items()}
    | {name: text for name, (_, _, text) in _SIZES.items()}
    | {name: text for name, (_, text) in _SUMS.items()}
    | {name: text for name, (_, _, text) in _SHARES.items()}
    | LEDGER_METRICS
    | ADMISSION_METRICS
)
"""Every name in the answer of stats(), with its meaning."""


def stats_from(
    client: redis.Redis, prefix: str, ledger: Ledger, limits: Limits
) -> dict[str, float]:
    """Read all of STATS that is not in `ledger` or `limits` in one round trip."""
    with translated("reading stats"), client.pipeline(transaction=False) as pipeline:
        pipeline.hgetall(f"{prefix}counters")
        for command, name, _ in _SIZES.values():
            getattr(pipeline, command)(f"{prefix}{name}")
        counters, *sizes = pipeline.execute()
    stats = {name: float(counters.get(field.encode(), 0)) for name, (field, _) in _COUNTERS.items()}
    stats |= {name: float(size) for name, size in zip(_SIZES, sizes, strict=True)}
    for name, (beginning, _) in _SUMS.items():
        stats[name] = sum(value for part, value in stats.items() if part.startswith(beginning))
    stats["buffer/wait/short_s"] = float(counters.get(b"wait_ms:short", 0)) / 1000
    stats["buffer/wait/slow_groups_s"] = float(counters.get(b"wait_ms:slow", 0)) / 1000
    stats["buffer/pipeline_depth"] = limits.num_beyond / limits.groups_per_step
    stats["buffer/live_groups"] = float(limits.num_live)
    for name, (part, whole, _) in _SHARES.items():
        stats[name] = stats[part] / max(1.0, stats[whole])
    stats["buffer/ledger/started"] = float(ledger.num_started)
    for name in LEDGER_COLUMNS:
        column = ledger.columns.get(name)
        stats[f"buffer/ledger/{name}"] = float(column.num_attempts if column else 0)
    trained, ended = ledger.length_of_trained(), ledger.length_of_ended()
    stats["buffer/length/trained_s"] = trained.duration_s
    stats["buffer/length/ended_s"] = ended.duration_s
    stats["buffer/length/trained_tokens"] = trained.num_tokens
    stats["buffer/length/ended_tokens"] = ended.num_tokens
    slow = ledger.slow_attempts()
    stats["buffer/length/slow_share_ratio"] = slow.share_ratio
    stats["buffer/length/slow_lost_share"] = slow.lost_share
    stats["buffer/length/slow_lost_z"] = slow.z
    stats["buffer/discarded_time_share"] = ledger.discarded_time_share()
    return stats
