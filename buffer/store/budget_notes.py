"""What episodes have used, and which budget ended them.

The router that refuses a turn leaves a note, so that any process can close the episode with the
right outcome. The first note of an episode stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import redis.asyncio

from outloop.buffer.redis.client import translated
from outloop.buffer.redis.scripts import AsyncScripts


@dataclass(frozen=True, slots=True)
class EpisodeUsage:
    """What an episode has used, in all router processes together."""

    num_turns: int
    num_tokens: int
    """Ids of its turns: prompts after their parents', and outputs."""


class BudgetNotes:
    """Notes of one run's episodes."""

    def __init__(self, client: redis.asyncio.Redis, scripts: AsyncScripts, prefix: str) -> None:
        self._client = client
        self._scripts = scripts
        self._prefix = prefix

    async def put(self, episode_id: str, budget: str) -> None:
        """Note that an episode has spent `budget`.

        Raises:
            NotFound: no such episode.
        """
        what = f"noting a budget of episode_id={episode_id}"
        await self._scripts.call("note_budget", episode_id, budget, what=what)

    async def read(self, episode_id: str) -> str:
        """The budget in the note; empty without one."""
        with translated(f"reading the budget of episode_id={episode_id}"):
            found: Any = await self._client.hget(f"{self._prefix}episode:{episode_id}", "budget")
        return "" if found is None else found.decode()
