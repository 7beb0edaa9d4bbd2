"""Every key of a run in Redis; docs/buffer-keys.md shows the same table.

Every key of a run begins with the same hash tag, so all of them are in one cluster slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class KeySpec:
    """One kind of key."""

    name: str
    """After the prefix; words in capitals stand for ids."""
    type: Literal["hash", "list", "set", "zset", "string"]
    lifetime: str
    written_by: str
    holds: str


def hash_tag(run_id: str) -> str:
    """What of a key decides which primary of a cluster has it: the same for all of a run."""
    return f"{run_id}:0"


def prefix(run_id: str) -> str:
    """The beginning of every key of the run."""
    return f"{{{hash_tag(run_id)}}}:"


def key(run_id: str, name: str) -> str:
    """The full name of a key."""
    return prefix(run_id) + name


_RUN = "run"
_LETTER = "until resolved"
_EVALS = "last evaluations, plus one hour"
_HOUR_AFTER = "until its end, plus one hour"

KEYS: tuple[KeySpec, ...] = (
    KeySpec("meta", "hash", _RUN, "init_run", "run_id, digest, schema, seed, rules of the scripts"),
    KeySpec("state", "hash", _RUN, "scripts", "cursor, admission, fence, versions, run state"),
    KeySpec("counters", "hash", _RUN, "scripts", "counters behind stats()"),
    KeySpec("tasks", "hash", _RUN, "register_tasks()", "index -> training task"),
    KeySpec(
        "task_weights",
        "list",
        _RUN,
        "register_tasks, set_task_weights",
        "slot and weights of each change",
    ),
    KeySpec("task_priorities", "string", _RUN, "register_tasks", "int32 by index; none: equal"),
    KeySpec("eval_tasks", "hash", _RUN, "register_tasks()", "index -> evaluation task"),
    KeySpec("claim:KEY", "string", "10 minutes", "claim", "the claims that this key received"),
    KeySpec("group:GROUP", "hash", _HOUR_AFTER, "scripts", "slot, size, state, places, versions"),
    KeySpec("group:GROUP:episodes", "list", "until its end", "close", "scored episode ids"),
    KeySpec("group:GROUP:resumable", "list", "until it seals", "scripts", "lost, to be resumed"),
    KeySpec("groups", "zset", _RUN, "claim", "live groups by slot"),
    KeySpec("open", "zset", _RUN, "claim", "open groups by slot"),
    KeySpec(
        "open_depths", "zset", _RUN, "claim", "by depth of the version they began under, then slot"
    ),
    KeySpec("fill", "zset", _RUN, "scripts", "open groups with places to claim, by slot"),
    KeySpec("group_deadlines", "zset", _RUN, "claim", "open groups by deadline, Unix ms"),
    KeySpec("attempts", "hash", _RUN, "claim, open", "attempt in flight -> its episode or empty"),
    KeySpec("attempt_starts", "hash", _RUN, "claim, open", "the same -> first claim, Unix ms"),
    KeySpec("attempt_deadlines", "zset", _RUN, "claim, open", "the same by deadline, Unix ms"),
    KeySpec("attempt_runners", "hash", _RUN, "claim", "attempt in flight -> runner with heartbeat"),
    KeySpec("ledger", "hash", _RUN, "scripts", "attempts started, and ended by column and length"),
    KeySpec(
        "runners", "zset", _RUN, "claim, heartbeat", "runners by their last heartbeat, Unix ms"
    ),
    KeySpec("runner_keys", "hash", _RUN, "RunnerKeys.add()", "name -> SHA-256 of a key, or empty"),
    KeySpec("ready", "zset", _RUN, "close", "sealed groups by slot"),
    KeySpec("ready_depths", "zset", _RUN, "close", "by depth of their oldest version, then slot"),
    KeySpec("leases", "zset", _RUN, "take", "groups leased and not acknowledged, by slot"),
    KeySpec("last_take", "string", "until the next", "take", "answer to the last take, by token"),
    KeySpec("wake", "list", _RUN, "close", "at most one token: enough groups are ready"),
    KeySpec("replay", "zset", _RUN, "recover, resolve_dead_letter", "slots to be played again"),
    KeySpec("trained_slots", "zset", "last marks", "acknowledge", "slots by their mark's version"),
    KeySpec("marks", "zset", "last marks", "acknowledge", "versions of the last checkpoint marks"),
    KeySpec(
        "episode:EPISODE",
        "hash",
        _HOUR_AFTER,
        "open",
        "opening, closure, reward, refusals, turn index",
    ),
    KeySpec("episode:EPISODE:turns", "list", "until its end", "append_turn", "turns"),
    KeySpec("replaced_tasks", "zset", _RUN, "scripts", "tasks by number of lost attempts"),
    KeySpec("failed", "list", _RUN, "close", "the last 64 episodes that failed, kept with turns"),
    KeySpec("archive", "list", _RUN, "scripts", "ended episodes that wait for the archiver"),
    KeySpec("dead", "list", _RUN, "scripts", "groups dropped as failed or malformed, the last 256"),
    KeySpec("dead:GROUP", "hash", _LETTER, "scripts", "why it was dropped, slot, task, tallies"),
    KeySpec("dead:GROUP:episodes", "list", "16 dead letters", "scripts", "its scored episode ids"),
    KeySpec(
        "versions", "hash", "last 10,000", "announce_version", "version -> depth, or abandoned"
    ),
    KeySpec(
        "version_parents", "hash", "last 10,000", "announce_version", "version -> parent or empty"
    ),
    KeySpec("evals", "list", _RUN, "request_eval", "names of evaluations whose episodes are kept"),
    KeySpec("eval_queue", "list", _RUN, "request_eval", "evaluation attempts to claim"),
    KeySpec("eval:NAME", "hash", _EVALS, "request_eval", "total, done, sampling, version, suite"),
    KeySpec("eval:NAME:rewards", "hash", _EVALS, "close", "attempt -> reward"),
    KeySpec("eval:NAME:episodes", "list", "last evaluations", "close", "closed episode ids"),
    KeySpec(
        "staged:TOKEN:NUMBER", "string", "10 minutes", "staging()", "a record about to be stored"
    ),
    KeySpec("sft:NUMBER", "string", _RUN, "put_trajectories", "a trajectory for SFT, by arrival"),
    KeySpec("sft_keys", "set", _RUN, "put_trajectories", "idempotency keys used"),
    KeySpec("servers", "hash", "launch", "put_fields", "server -> address and kind"),
    KeySpec("server_versions", "hash", "launch", "put_fields", "server -> version held"),
    KeySpec("server_memory", "hash", "launch", "put_fields", "server -> memory it gave away"),
    KeySpec("frozen_servers", "hash", "launch", "put_fields", "server -> address, kind, version"),
    KeySpec("devices", "hash", "launch", "claim_devices()", "who holds shared GPUs"),
    KeySpec("parts", "hash", "launch", "put_fields", "part -> facts, such as its URL"),
    KeySpec("statuses", "hash", "launch", "put_fields", "part -> what it does now"),
)
"""`run`: as long as the run is kept. `launch`: emptied whenever the launcher starts the run."""


def markdown_table() -> str:
    """The table of docs/buffer-keys.md."""
    rows = ["| key | type | lifetime | written by | holds |", "|---|---|---|---|---|"]
    rows += [
        f"| `{spec.name}` | {spec.type} | {spec.lifetime} | {spec.written_by} | {spec.holds} |"
        for spec in KEYS
    ]
    return "\n".join(rows)
