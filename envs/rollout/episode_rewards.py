"""Collects the scores of an episode while a rollout function plays it: `episode.score(...)`.

A score that this run cannot use is refused at the call, with a sentence that says what to do.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from outloop.buffer.errors import RecordError, SettingsError
from outloop.buffer.records import Reward, TokenReward
from outloop.envs.rollout.episode_result import as_reward

_NO_REWARD = (
    "no reward: {what} returned None and episode.score(...) was not called; a finite number is "
    "allowed: return a float, or call episode.score(value)"
)


class Scores:
    """The scores of one episode so far."""

    def __init__(self, *, takes_turns: bool, weights: Mapping[str, float]) -> None:
        self._takes_turns = takes_turns
        self._weights = weights
        self._value: float | None = None
        self._components: dict[str, float] = {}
        self._turns: dict[str, float] = {}
        self._branches: dict[str, float] = {}
        self._tokens: dict[tuple[str, int, int], TokenReward] = {}
        self._answer = ""

    def add(
        self,
        value: float | None,
        turn: object | None,
        branch: object | None,
        tokens: tuple[int, int] | None,
        components: Mapping[str, float],
        answer: str | None = None,
    ) -> None:
        """Add a score, or say what was answered; a later one of the same name replaces it.

        Raises:
            RecordError: a number is not finite, the call gives no score, or spans overlap.
            SettingsError: parts of an episode are not scored in this run.
        """
        if turn is not None or branch is not None or tokens is not None:
            self._add_part(value, turn, branch, tokens)
            return
        if value is None and not components and answer is None:
            raise RecordError(
                "episode.score() without a score; give a value, components by name, or a turn"
            )
        # Checks every number before any is kept.
        checked = Reward(
            value=0.0 if value is None else value,
            components=dict(components),
            answer="" if answer is None else str(answer),
        )
        self._answer = checked.answer or self._answer
        if value is not None:
            self._value = checked.value
        self._components |= checked.components

    def _add_part(
        self,
        value: float | None,
        turn: object | None,
        branch: object | None,
        tokens: tuple[int, int] | None,
    ) -> None:
        name = turn if turn is not None else branch
        if not self._takes_turns:
            raise SettingsError(
                "episode.score(turn=..., branch=...): this run trains by the score of an episode "
                'alone; score the episode only, or set env.turn_scores="train" and for example '
                'trainer.advantage="reward_to_go", or env.turn_scores="record" to keep such scores '
                "for reading"
            )
        answer_id = name if isinstance(name, str) else getattr(name, "id", None)
        if not isinstance(answer_id, str) or value is None or (turn is None) == (branch is None):
            raise RecordError(
                f"episode.score(value={value!r}, turn={turn!r}, branch={branch!r}): a value and "
                "either a turn or a branch are allowed, by the answer of the model call or its id"
            )
        if tokens is not None:
            self._add_span(value, answer_id, tokens, is_turn=turn is not None)
            return
        scores = self._turns if turn is not None else self._branches
        scores[answer_id] = Reward(value=value).value

    def _add_span(
        self, value: float, answer_id: str, tokens: tuple[int, int], *, is_turn: bool
    ) -> None:
        try:
            start, end = map(operator.index, tokens)
        except (TypeError, ValueError):
            start, end, is_turn = 0, 0, False
        if not is_turn:
            raise RecordError(
                f"episode.score(tokens={tokens!r}): two whole numbers (start, end) beside a turn "
                "are allowed, counted in the tokens of its answer"
            )
        spans = self._tokens | {(answer_id, start, end): TokenReward(answer_id, start, end, value)}
        checked = Reward(value=0.0, tokens=tuple(spans.values()))
        self._tokens = dict(zip(spans, checked.tokens, strict=True))

    def of_failed(self, value: float) -> Reward:
        """The reward of an episode whose agent failed: `value`, and what its parts earned."""
        return Reward(
            value=value,
            turns=dict(self._turns),
            branches=dict(self._branches),
            tokens=tuple(self._tokens.values()),
            answer=self._answer,
        )

    def reward(self, returned: Any, what: str) -> Reward:
        """The episode's reward: the returned value, or else the scores.

        Raises:
            RecordError: there is neither, it is no finite number, or spans of tokens overlap.
        """
        if returned is not None:
            given = as_reward(returned, self._weights)
        elif self._value is not None:
            given = Reward(value=self._value)
        elif self._components:
            given = as_reward(self._components, self._weights)
        elif self._turns or self._branches or self._tokens:
            given = Reward(value=0.0)
        else:
            raise RecordError(_NO_REWARD.format(what=what))
        return Reward(
            value=given.value,
            components=given.components | self._components,
            turns=given.turns | self._turns,
            branches=given.branches | self._branches,
            tokens=(*given.tokens, *self._tokens.values()),
            answer=self._answer or given.answer,
        )
