"""Scores as they come in, checked against the episode they are for.

Owns: which turn an answer's id means, and whether this run takes scores of parts of an episode.
Does not own: what a score is worth (trainer), storing it (buffer). Invariant: every recorded score
names a turn that the episode has.
"""

from __future__ import annotations

from collections.abc import Sequence

from outloop.buffer.errors import NotFound
from outloop.buffer.records import Reward, TokenReward, Turn
from outloop.buffer.settings import Settings
from outloop.buffer.writer import BufferWriter
from outloop.router.errors import Refusal
from outloop.router.routes.schemas import RewardValue, TokenRewardBody

_ANSWER_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")


class Scores:
    """Turns bodies into rewards."""

    def __init__(self, settings: Settings, buffer: BufferWriter) -> None:
        self._settings = settings
        self._buffer = buffer

    async def reward(self, episode_id: str, body: RewardValue) -> Reward:
        """The reward that `body` gives `episode_id`, of which some turns are recorded.

        Raises:
            NotFound: parts of an episode are scored that nobody knows.
            Refusal, RecordError: as `reward_of`.
        """
        if not any(getattr(body, name) for name in _PARTS):
            return self.reward_of(episode_id, body, ())
        loaded = await self._buffer.load_episode(episode_id)
        if loaded is None:
            raise NotFound(f"episode_id={episode_id} is unknown")
        return self.reward_of(episode_id, body, loaded.turns)

    def reward_of(self, episode_id: str, body: RewardValue, turns: Sequence[Turn]) -> Reward:
        """The reward that `body` gives an episode of these turns.

        Raises:
            Refusal: 422, scores of parts that this run does not take, or the episode does not have.
            RecordError: a number is not finite, or spans of tokens overlap.
        """
        if not any(getattr(body, name) for name in _PARTS):
            return Reward(value=body.value, components=body.components, answer=body.answer)
        if self._settings.env.turn_scores == "refuse":
            raise Refusal(
                422,
                "turn_scores_refused",
                f"{len(body.turns)} turns, {len(body.branches)} branches and {len(body.tokens)} "
                f"spans of tokens of episode_id={episode_id!r} are scored, but this run trains by "
                'the score of an episode alone; set env.turn_scores="train" and for example '
                'trainer.advantage="reward_to_go", or env.turn_scores="record" to keep such scores '
                "for reading",
                param=next(name for name in _PARTS if getattr(body, name)),
            )
        known = {turn.turn_id: len(turn.output_ids) for turn in turns}
        leaves = known.keys() - {turn.parent_turn_id for turn in turns}
        branches = _by_turn(body.branches, known, episode_id, "branches")
        if inner := sorted(branches.keys() - leaves):
            raise Refusal(
                422,
                "not_the_end_of_a_branch",
                f"branches: turn {inner[0]!r} of episode_id={episode_id!r} was continued; name the "
                "last turn of a branch, or score the turn under `turns`",
                param="branches",
            )
        return Reward(
            value=body.value,
            components=body.components,
            turns=_by_turn(body.turns, known, episode_id, "turns"),
            branches=branches,
            tokens=tuple(_span(one, known, episode_id) for one in body.tokens),
            answer=body.answer,
        )


_PARTS = ("turns", "branches", "tokens")


def _by_turn(
    scores: dict[str, float], known: dict[str, int], episode_id: str, field: str
) -> dict[str, float]:
    named: dict[str, float] = {}
    for name, score in scores.items():
        turn_id = _turn_id(name, known, episode_id, field)
        if turn_id in named:
            raise Refusal(
                422,
                "scored_twice",
                f"{field}: {name!r} names turn {turn_id!r} of episode_id={episode_id!r}, which is "
                "scored under another of its names too; give one score",
                param=field,
            )
        named[turn_id] = score
    return named


def _span(body: TokenRewardBody, known: dict[str, int], episode_id: str) -> TokenReward:
    turn_id = _turn_id(body.turn, known, episode_id, "tokens")
    if body.end > known[turn_id]:
        raise Refusal(
            422,
            "span_not_found",
            f"tokens: {body.start}..{body.end} of {body.turn!r} end behind its {known[turn_id]} "
            "output tokens; count in the tokens of the answer",
            param="tokens",
        )
    return TokenReward(turn_id, body.start, body.end, body.value)


def _turn_id(name: str, known: dict[str, int], episode_id: str, field: str) -> str:
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
    return turn_id
