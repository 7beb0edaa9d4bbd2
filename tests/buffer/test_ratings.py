"""Elo of players from the results of their games."""

import math

import numpy as np
import pytest

from outloop.buffer.evaluations.ratings import Game, Rating, rate

STRENGTHS = {0: 0.0, 10: 90.0, 20: 150.0, 30: 400.0}
"""Elo of players, as the games are made."""


def games(seed: int, num_games: int, *, copies: int = 1) -> list[Game]:
    """Games of each player with the two before it; a tenth of them drawn, of no effect on the
    mean. Each game `copies` times, as one cluster."""
    rng, players, found = np.random.default_rng(seed), sorted(STRENGTHS), []
    for number in range(num_games):
        second = players[rng.integers(1, len(players))]
        place = players.index(second)
        first = players[rng.integers(max(0, place - 2), place)]
        chance = 1 / (1 + 10 ** ((STRENGTHS[first] - STRENGTHS[second]) / 400))
        won = float(rng.random() < chance)
        found += [Game(player=second, opponent=first, score=won, cluster=str(number))] * copies
    return found


@pytest.mark.medium
def test_known_strengths_are_found() -> None:
    """To a few points of Elo; the first player has 0, whoever it played."""
    found = {one.player: one for one in rate(games(0, 60_000))}
    assert (found[0].elo, found[0].standard_error) == (0.0, 0.0)
    for player, elo in STRENGTHS.items():
        assert found[player].elo == pytest.approx(elo, abs=12), player
    assert sum(one.num_games for one in found.values()) == 120_000


@pytest.mark.medium
def test_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    """Of the players of 150 made runs 95% to two or three percent; games that are repeated in a
    cluster tell nothing more."""
    hits = []
    for seed in range(150):
        once = rate(games(seed, 300))
        thrice = rate(games(seed, 300, copies=3))
        for single, repeated in zip(once[1:], thrice[1:], strict=True):
            low, high = single.interval
            hits.append(low <= STRENGTHS[single.player] <= high)
            assert repeated.standard_error == pytest.approx(single.standard_error, rel=0.1)
    assert 0.92 < np.mean(hits) < 0.98


def test_two_players_in_closed_form() -> None:
    """Odds of wins, with the one drawn game that the prior adds; a draw counts as half a win."""
    won = [Game(player=1, opponent=0, score=1.0, cluster=str(i)) for i in range(29)]
    lost = [Game(player=0, opponent=1, score=1.0, cluster=str(i)) for i in range(29, 38)]
    drawn = [Game(player=1, opponent=0, score=0.5, cluster="d")] * 2
    expected = 400 * math.log10((29 + 1 + 0.5) / (9 + 1 + 0.5))
    assert rate([*won, *lost, *drawn])[1].elo == pytest.approx(expected, abs=1e-6)


def test_who_won_every_game_has_a_rating() -> None:
    """A finite one."""
    won = [Game(player=1, opponent=0, score=1.0, cluster=str(i)) for i in range(100)]
    best = rate(won)[1]
    assert best.elo == pytest.approx(400 * math.log10(201), abs=1e-6)
    assert math.isfinite(best.standard_error)
    assert rate(won[:1])[1].standard_error != rate(won[:1])[1].standard_error, "NaN: one cluster"


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ([], "no games"),
        ([Game(player=1, opponent=1, score=1.0, cluster="")], "no games of different players"),
        ([Game(player=1, opponent=0, score=1.5, cluster="")], r"score=1.5; 0 \(lost\) to 1"),
        (
            [
                Game(player=1, opponent=0, score=1.0, cluster=""),
                Game(player=12, opponent=11, score=1.0, cluster=""),
            ],
            "from player 0 to 2 others, the first is 11",
        ),
    ],
)
def test_what_cannot_be_rated_is_refused(wrong: list[Game], sentence: str) -> None:
    """With a sentence; players apart have no common scale."""
    with pytest.raises(ValueError, match=sentence):
        rate(wrong)


def test_an_interval_is_95_percent() -> None:
    """Of the normal distribution."""
    rating = Rating(player=1, elo=10.0, standard_error=100.0, num_games=1)
    assert rating.interval == pytest.approx((-186.0, 206.0), abs=0.01)
