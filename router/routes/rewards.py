"""Scores as they come in, checked against the episode they are for.

Owns: which turn an answer's id means, and whether this run takes scores of single turns.
Does not own: what a score is worth (trainer), storing it (buffer). Invariant: every recorded score
names a turn that the episode has.
"""

from __future__ import annotations

from outloop.buffer.records import Reward
from outloop.buffer.settings import Settings
from outloop.buffer.writer import BufferWriter
from outloop.router.errors import Refusal
from outloop.router.routes.schemas import RewardValue

_ANSWER_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")


class Scores:
    """Turns bodies into rewards."""

    def __init__(self, settings: Settings, buffer: BufferWriter) -> None:
        self._settings = settings
        self._buffer = buffer

    async def reward(self, episode_id: str, body: RewardValue) -> Reward:
        """The reward that `body` gives `episode_id`.

        Raises:
            Refusal: 422, scores of turns that this run does not take or the episode does not have.
            RecordError: a number is not finite.
        """
        if not body.turns and not body.branches:
            return Reward(value=body.value, components=body.components)
        if self._settings.env.turn_scores == "refuse":
            raise Refusal(
                422,
                "turn_scores_refused",
                f"{len(body.turns)} turns and {len(body.branches)} branches of "
                f"episode_id={episode_id!r} are scored, but the trainer gives one advantage per "
                'episode; score the episode only, or set env.turn_scores="record" to keep '
                "such scores for reading",
                param="turns" if body.turns else "branches",
            )
        loaded = await self._buffer.load_episode(episode_id)
        known = {turn.turn_id for turn in loaded.turns} if loaded is not None else set()
        return Reward(
            value=body.value,
            components=body.components,
            turns=_by_turn(body.turns, known, episode_id, "turns"),
            branches=_by_turn(body.branches, known, episode_id, "branches"),
        )


def _by_turn(
    scores: dict[str, float], known: set[str], episode_id: str, field: str
) -> dict[str, float]:
    named = {}
    for name, score in scores.items():
        turn_id = name
        for prefix in _ANSWER_PREFIXES:
            turn_id = turn_id.removeprefix(prefix)
        if turn_id not in known:
            raise Refusal(
                422,
                "turn_not_found",
                f"{field}: {name!r} is none of the {len(known)} turns of "
                f"episode_id={episode_id!r}; use the id of an answer, or a turn_id of "
                "GET /episodes/{id}",
                param=field,
            )
        named[turn_id] = score
    return named
