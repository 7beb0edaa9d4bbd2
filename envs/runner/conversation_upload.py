"""Sends conversations for SFT to the router, which renders them.

The same rows are sent with the same keys, so a runner that starts again, or a second runner, adds
nothing.
"""

from __future__ import annotations

import itertools

import structlog

from outloop.buffer.settings import Settings
from outloop.envs.runner.router_client import RouterClient
from outloop.envs.tasks.sft_conversations import load_conversations
from outloop.envs.tasks.splits import content_hash

_BATCH_ROWS = 128
_log = structlog.get_logger()


async def submit_conversations(settings: Settings, router: RouterClient) -> int:
    """Post every conversation, the last batch marked as final; returns how many were accepted."""
    rows = load_conversations(settings)
    batch = list(itertools.islice(rows, _BATCH_ROWS))
    num_accepted = index = 0
    while batch:
        following = list(itertools.islice(rows, _BATCH_ROWS))
        num_accepted += await router.put_trajectories(
            batch, key=f"sft-{index}-{content_hash(batch)[:16]}", final=not following
        )
        batch, index = following, index + 1
    _log.info("conversations_sent", num_accepted=num_accepted)
    return num_accepted
