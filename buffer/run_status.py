"""How a run stands: state, versions, parts, servers and queue, read together.

`ask` puts the commands into a pipeline, of whichever client; `read` makes of its answers what
`outloop status` shows and the router's `GET /status` sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outloop.buffer.registry import decode_facts, decode_frozen, decode_servers

_QUEUE = {
    "ready to be trained": ("zcard", "ready"),
    "not complete": ("zcard", "open"),
    "leased to the trainer": ("zcard", "leases"),
    "attempts in flight": ("hlen", "attempts"),
    "slots to be played again": ("zcard", "replay"),
    "dead letters": ("llen", "dead"),
    "episodes to be archived": ("llen", "archive"),
}


def ask(pipeline: Any, prefix: str) -> None:
    """Queue the commands whose answers `read` understands."""
    pipeline.hmget(f"{prefix}state", ["run_state", "highest", "paused"])
    for name in ("parts", "statuses", "servers", "server_versions", "frozen_servers"):
        pipeline.hgetall(prefix + name)
    for command, name in _QUEUE.values():
        getattr(pipeline, command)(prefix + name)


def read(answers: Sequence[Any], obstacle: str | None) -> dict[str, Any]:
    """JSON's types only. `obstacle`: why Redis cannot write; None: it can."""
    (run_state, highest, paused), parts, statuses, servers, versions, frozen, *sizes = answers
    return {
        "state": "running" if run_state is None else run_state.decode(),
        "is_paused": paused == b"1",
        "highest_version": -1 if highest is None else int(highest),
        "parts": {name: facts.get("url", "") for name, facts in decode_facts(parts).items()},
        "servers": [
            {
                "id": entry.server_id,
                "url": entry.url,
                "version": entry.policy_version,
                "is_quarantined": entry.is_quarantined,
            }
            for entry in decode_servers(servers, versions) + decode_frozen(frozen)
        ],
        "statuses": decode_facts(statuses),
        "queue": dict(zip(_QUEUE, map(int, sizes), strict=True)),
        **({} if obstacle is None else {"redis": obstacle}),
    }
