"""What one episode may use: turns, tokens, turns at once.

Owns: refusing what exceeds a budget, and noting that it happened. Does not own: time (the episode's
deadline), recording. Invariant: a spent budget is a final refusal, and the episode's outcome tells
of it; turns and tokens are counted in the buffer, whichever process recorded them; turns at once
are those of this process.
"""

from __future__ import annotations

import msgspec
import structlog

from outloop.buffer.errors import BufferUnavailable
from outloop.buffer.records import Outcome
from outloop.buffer.settings import RouterSettings
from outloop.router.buffer_protocol import EpisodeBuffer
from outloop.router.dialects.base import TurnRequest
from outloop.router.episodes.episode import EpisodeSession
from outloop.router.errors import Refusal
from outloop.router.routes.schemas import CloseBody

_SPENT = frozenset(
    {"turn_budget_spent", "token_budget_spent", "concurrency_exceeded", "episode_expired"}
)
_log = structlog.get_logger()


class Budgets:
    """The budgets of every episode; traffic without an episode has none."""

    def __init__(self, settings: RouterSettings, buffer: EpisodeBuffer) -> None:
        self._settings = settings
        self._buffer = buffer

    def may_count_twice(self, session: EpisodeSession, num_choices: int) -> bool:
        """True if the turns seem spent, but the buffer counts some that are not known here: those
        may be in-flight turns, which are counted beside them."""
        limit = self._settings.max_turns_per_episode
        return (
            session.opening is not None
            and session.num_turns + num_choices > limit
            and session.num_recorded > len(session.tree.nodes)
        )

    def check(self, session: EpisodeSession, request: TurnRequest) -> None:
        """Refuse a turn for which there is no budget.

        Raises:
            Refusal: 404, turns, tokens or turns at once are spent.
        """
        if session.opening is None:
            return
        turns, tokens = self._settings.max_turns_per_episode, self._settings.max_tokens_per_episode
        at_once = self._settings.max_concurrent_turns_per_episode
        if session.num_turns + request.num_choices > turns:
            raise _spent(session, "turn_budget_spent", f"max_turns_per_episode={turns}", "turns")
        if tokens is not None and session.num_tokens >= tokens:
            raise _tokens_spent(session, tokens)
        num_at_once = session.num_running + request.num_choices
        if num_at_once > at_once:
            limit = f"max_concurrent_turns_per_episode={at_once}"
            raise _spent(session, "concurrency_exceeded", limit, "turns at once")

    def room(self, session: EpisodeSession, num_prompt_ids: int, num_choices: int) -> int | None:
        """How many ids each choice of a turn may draw; None: as many as fit.

        Turns that are drawn at once each get what was left when they began.

        Raises:
            Refusal: 404, the prompt alone spends what is left.
        """
        tokens = self._settings.max_tokens_per_episode
        if session.opening is None or tokens is None:
            return None
        room = (tokens - session.num_tokens) // num_choices - num_prompt_ids
        if room < 1:
            raise _tokens_spent(session, tokens)
        return room

    async def note(self, session: EpisodeSession, refusal: Refusal) -> None:
        """Keep that `refusal` told of a spent budget, where the episode's close finds it."""
        if refusal.code not in _SPENT or session.opening is None:
            return
        try:
            await self._buffer.budget_notes.put(session.episode_id, refusal.code)
        except BufferUnavailable as error:
            _log.warning("budget_not_noted", episode_id=session.episode_id, error=str(error))

    async def settle(self, episode_id: str, body: CloseBody) -> CloseBody:
        """A close as it is recorded: an episode that met a limit did not end by itself."""
        spent = await self._buffer.budget_notes.read(episode_id)
        if not spent:
            return body
        outcome: Outcome = "truncated" if body.outcome == "completed" else body.outcome
        error = f"{spent}: {body.error}" if body.error else spent
        return msgspec.structs.replace(body, outcome=outcome, error=error)


def _tokens_spent(session: EpisodeSession, tokens: int) -> Refusal:
    return _spent(session, "token_budget_spent", f"max_tokens_per_episode={tokens}", "tokens")


def _spent(session: EpisodeSession, code: str, limit: str, what: str) -> Refusal:
    return Refusal(
        404,
        code,
        f"episode {session.episode_id} has used its router.{limit} {what}; end the episode, or "
        "raise the limit",
    )
