"""Ratings of players from the results of their games: Bradley and Terry's model, as Elo.

R. A. Bradley, M. E. Terry, "Rank analysis of incomplete block designs", Biometrika 39 (1952): one
player beats another with the probability 1 / (1 + exp(b - a)). A draw is half a win. 400 points of
Elo are odds of ten to one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_POINTS = 400.0 / math.log(10.0)
"""Elo of a natural unit of log-odds."""
_NUM_NEWTON_STEPS = 100
_TOLERANCE = 1e-10
_MAX_STEP = 2.0
"""In log-odds: a full Newton step from far away would overshoot."""
_Z95 = 1.959963984540054


@dataclass(frozen=True, kw_only=True, slots=True)
class Game:
    """One game of two players."""

    player: int
    opponent: int
    score: float
    """Of `player`: 1 won, 0.5 drawn, 0 lost."""
    cluster: str
    """Games of one cluster, such as attempts at one task, are not independent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rating:
    """How strong a player is, in Elo above the first player."""

    player: int
    elo: float
    standard_error: float
    """Of the difference to the first player; NaN with fewer than two clusters."""
    num_games: int

    @property
    def interval(self) -> tuple[float, float]:
        """95%, by the normal distribution."""
        width = _Z95 * self.standard_error
        return self.elo - width, self.elo + width


def rate(games: Sequence[Game]) -> list[Rating]:
    """Ratings of all players, lowest number first, which has 0.

    The likelihood holds one drawn game more for every pair that met, so that a player who won
    every game has a finite rating; this draws ratings together, by less the more games there are.
    Standard errors are the sandwich estimate with games clustered.

    Raises:
        ValueError: no games, a score beyond 0 to 1, or players between whom no chain of games
            leads.
    """
    games = [game for game in games if game.player != game.opponent]
    if not games:
        raise ValueError("no games of different players")
    wrong = [game.score for game in games if not 0.0 <= game.score <= 1.0]
    if wrong:
        raise ValueError(f"score={wrong[0]}; 0 (lost) to 1 (won) is allowed")
    players = sorted({game.player for game in games} | {game.opponent for game in games})
    index = {player: number for number, player in enumerate(players)}
    first = np.array([index[game.player] for game in games])
    second = np.array([index[game.opponent] for game in games])
    scores = np.array([game.score for game in games])
    pairs = sorted({(min(a, b), max(a, b)) for a, b in zip(first, second, strict=True)})
    _check_connected(players, pairs)
    lower, upper = np.array(pairs).T
    all_first, all_second = np.concatenate([first, lower]), np.concatenate([second, upper])
    all_scores = np.concatenate([scores, np.full(len(pairs), 0.5)])
    strengths = _fit(all_first, all_second, all_scores, len(players))
    errors = _errors(
        strengths,
        (first, second, scores),
        _information(strengths, all_first, all_second),
        [game.cluster for game in games],
    )
    counts = np.bincount(np.concatenate([first, second]), minlength=len(players))
    return [
        Rating(
            player=player,
            elo=float(strengths[number]) * _POINTS,
            standard_error=float(errors[number]) * _POINTS,
            num_games=int(counts[number]),
        )
        for number, player in enumerate(players)
    ]


def _check_connected(players: Sequence[int], pairs: Sequence[tuple[int, int]]) -> None:
    """Refuse players of whom no chain of games leads to the first."""
    reached, left = {0}, list(pairs)
    while True:
        found = {b if a in reached else a for a, b in left if (a in reached) != (b in reached)}
        if not found:
            break
        reached |= found
    apart = [player for number, player in enumerate(players) if number not in reached]
    if apart:
        raise ValueError(
            f"no chain of games leads from player {players[0]} to {len(apart)} others, the first "
            f"is {apart[0]}"
        )


def _chances(strengths: Any, first: Any, second: Any) -> Any:
    return 1.0 / (1.0 + np.exp(strengths[second] - strengths[first]))


def _fit(first: Any, second: Any, scores: Any, num_players: int) -> Any:
    """Log-odds of every player, the first's 0, by Newton's method on the concave likelihood."""
    strengths = np.zeros(num_players)
    for _ in range(_NUM_NEWTON_STEPS):
        rest = scores - _chances(strengths, first, second)
        gradient = np.bincount(first, rest, num_players) - np.bincount(second, rest, num_players)
        step = np.zeros(num_players)
        step[1:] = np.linalg.solve(_information(strengths, first, second), gradient[1:])
        largest = float(np.abs(step).max())
        strengths += step * min(1.0, _MAX_STEP / largest if largest else 1.0)
        if largest < _TOLERANCE:
            break
    return strengths


def _information(strengths: Any, first: Any, second: Any) -> Any:
    """Minus the second derivatives, without the first player's row and column."""
    chances = _chances(strengths, first, second)
    weights = chances * (1.0 - chances)
    matrix = np.zeros((len(strengths), len(strengths)))
    for a, b, sign in ((first, first, 1), (second, second, 1), (first, second, -1)):
        np.add.at(matrix, (a, b), sign * weights)
        if sign < 0:
            np.add.at(matrix, (b, a), sign * weights)
    return matrix[1:, 1:]


def _errors(
    strengths: Any, games: tuple[Any, Any, Any], information: Any, clusters: Sequence[str]
) -> Any:
    """Standard errors of the log-odds; the first player's is 0."""
    first, second, scores = games
    names = {name: number for number, name in enumerate(dict.fromkeys(clusters))}
    if len(names) < 2:
        return np.full(len(strengths), np.nan)
    rest = scores - _chances(strengths, first, second)
    own = np.array([names[name] for name in clusters])
    sums = np.zeros((len(names), len(strengths)))
    np.add.at(sums, (own, first), rest)
    np.add.at(sums, (own, second), -rest)
    inverse = np.linalg.inv(information)
    scaled = sums[:, 1:] @ inverse
    variance = (scaled**2).sum(axis=0) * len(names) / (len(names) - 1)
    return np.concatenate([[0.0], np.sqrt(variance)])
