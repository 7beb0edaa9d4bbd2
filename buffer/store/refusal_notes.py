"""Usage of episodes, and notes of their refused model calls.

The router that refuses a call leaves a note in the episode's hash, so that any process can close
the episode with the right outcome and say what it was refused. The first spent budget stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import redis.asyncio

from outloop.buffer.redis.client import translated
from outloop.buffer.redis.scripts import AsyncScripts

MAX_SENTENCE_CHARS = 500


@dataclass(frozen=True, slots=True)
class EpisodeUsage:
    """What an episode has used, in all router processes together."""

    num_turns: int
    num_tokens: int
    """Ids of its turns: prompts after their parents', and outputs."""


class RefusalNotes:
    """Notes of one run's episodes."""

    def __init__(self, client: redis.asyncio.Redis, scripts: AsyncScripts, prefix: str) -> None:
        self._client = client
        self._scripts = scripts
        self._prefix = prefix

    async def put(self, episode_id: str, code: str, sentence: str, *, is_budget: bool) -> None:
        """Count a refused call of an open episode.

        Args:
            sentence: kept up to MAX_SENTENCE_CHARS, in place of that of the refusal before.
            is_budget: the episode has spent the budget `code`.

        Raises:
            NotFound: no such episode.
        """
        what = f"noting a refusal of episode_id={episode_id}"
        last = sentence[:MAX_SENTENCE_CHARS].encode("utf-8", "replace")
        await self._scripts.call("note_refusal", episode_id, code, last, int(is_budget), what=what)

    async def read_budget(self, episode_id: str) -> str:
        """The budget in the note; empty without one."""
        with translated(f"reading the budget of episode_id={episode_id}"):
            found: Any = await self._client.hget(f"{self._prefix}episode:{episode_id}", "budget")
        return "" if found is None else found.decode()
