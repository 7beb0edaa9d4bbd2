"""What one episode may use: turns, tokens, turns at once.

Owns: refusing what exceeds a budget, and noting refused calls. Does not own: time (the episode's
deadline), recording. Invariant: a spent budget is a final refusal, and the episode's outcome tells
of it; turns and tokens are counted in the buffer, whichever process recorded them; turns at once
are those of this process.
"""

from __future__ import annotations

import structlog

from outloop.buffer.errors import BufferUnavailable, NotFound
from outloop.buffer.records import Outcome
from outloop.buffer.settings import RouterSettings
from outloop.buffer.writer import BufferWriter
from outloop.router.episodes.episode import LiveEpisode
from outloop.router.errors import Refusal

_SPENT = frozenset(
    {"turn_budget_spent", "token_budget_spent", "concurrency_exceeded", "episode_expired"}
)
_COUNTS_PER_TURN = 4
_MAX_REFUSED = 1000
"""Of an episode, counted by this process: each is a write to Redis."""
_log = structlog.get_logger()


class Budgets:
    """The budgets of every episode; traffic without an episode has none."""

    def __init__(self, settings: RouterSettings, buffer: BufferWriter) -> None:
        self._settings = settings
        self._buffer = buffer

    def may_count_twice(self, episode: LiveEpisode, num_choices: int) -> bool:
        """True if the turns seem spent, but the buffer counts some that are not known here: those
        may be in-flight turns, which are counted beside them."""
        limit = self._settings.max_turns_per_episode
        return (
            episode.opening is not None
            and episode.num_turns + num_choices > limit
            and episode.num_recorded > len(episode.tree.nodes)
        )

    def check(self, episode: LiveEpisode, num_choices: int) -> None:
        """Refuse a turn for which there is no budget.

        Raises:
            Refusal: 404, turns, tokens or turns at once are spent.
        """
        if episode.opening is None:
            return
        turns, tokens = self._settings.max_turns_per_episode, self._settings.max_tokens_per_episode
        at_once = self._settings.max_concurrent_turns_per_episode
        if max(episode.num_turns + num_choices, episode.num_too_long + 1) > turns:
            raise _spent(episode, "turn_budget_spent", f"max_turns_per_episode={turns}", "turns")
        if tokens is not None and episode.num_tokens >= tokens:
            raise _tokens_spent(episode, tokens)
        num_at_once = episode.num_running + num_choices
        if num_at_once > at_once:
            limit = f"max_concurrent_turns_per_episode={at_once}"
            raise _spent(episode, "concurrency_exceeded", limit, "turns at once")

    def count(self, episode: LiveEpisode) -> None:
        """Take one request for the number of tokens from what this process answers an episode.

        Raises:
            Refusal: 404, it has asked too often.
        """
        limit = self._settings.max_turns_per_episode
        if episode.opening is None:
            return
        if episode.num_counted >= _COUNTS_PER_TURN * limit:
            raise _spent(
                episode,
                "turn_budget_spent",
                f"max_turns_per_episode={limit}",
                f"requests to count tokens ({_COUNTS_PER_TURN} for each turn)",
            )
        episode.num_counted += 1

    def room(self, episode: LiveEpisode, num_prompt_ids: int, num_choices: int) -> int | None:
        """How many ids each choice of a turn may have; None: as many as fit.

        Turns that are generated at once each get what was left when they began.

        Raises:
            Refusal: 404, the prompt alone spends what is left.
        """
        tokens = self._settings.max_tokens_per_episode
        if episode.opening is None or tokens is None:
            return None
        room = (tokens - episode.num_tokens) // num_choices - num_prompt_ids
        if room < 1:
            raise _tokens_spent(episode, tokens)
        return room

    async def note(self, episode: LiveEpisode, refusal: Refusal) -> None:
        """Count a refused call in the episode's record, and keep there which budget is spent; what
        a client is told to repeat is left out."""
        if refusal.status >= 500 or episode.opening is None or episode.is_closed:
            return
        if episode.num_refused >= _MAX_REFUSED:
            return
        episode.num_refused += 1
        try:
            await self._buffer.refusal_notes.put(
                episode.episode_id,
                refusal.code,
                str(refusal),
                is_budget=refusal.code in _SPENT,
            )
        except (BufferUnavailable, NotFound) as error:
            # A Redis that lost its last writes no longer knows the episode.
            _log.warning("refusal_not_noted", episode_id=episode.episode_id, error=str(error))

    async def settle(self, episode_id: str, outcome: Outcome, error: str) -> tuple[Outcome, str]:
        """Outcome and error as they are recorded: an episode that met a limit did not end by
        itself."""
        spent = await self._buffer.refusal_notes.read_budget(episode_id)
        if not spent:
            return outcome, error
        outcome = "truncated" if outcome == "completed" else outcome
        return outcome, f"{spent}: {error}" if error else spent


def _tokens_spent(episode: LiveEpisode, tokens: int) -> Refusal:
    return _spent(episode, "token_budget_spent", f"max_tokens_per_episode={tokens}", "tokens")


def _spent(episode: LiveEpisode, code: str, limit: str, what: str) -> Refusal:
    return Refusal(
        404,
        code,
        f"episode {episode.episode_id} has used its router.{limit} {what}; end the episode, or "
        "raise the limit",
    )
