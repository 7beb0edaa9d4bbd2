"""examples/guess_number with four ranges in place of twenty, and a player that seldom heeds them.

The game, its host and its agent are the example's; a policy that has learned from this player finds
a number in few games, and one that keeps to the range that it was told in most.
"""

import random

from tasks import played, random_player
from verifier import Game

LOWS = (10, 20, 30, 40)
NUM_NUMBERS = 7
CAREFUL_SHARE = 0.2
"""How often the scripted player heeds what is left; otherwise it says any number of any range."""
NUM_CONVERSATIONS = 4000


def train_tasks() -> list[dict[str, int]]:
    """Every game, shuffled."""
    games = [
        {"low": low, "high": low + NUM_NUMBERS - 1, "secret": low + offset}
        for low in LOWS
        for offset in range(NUM_NUMBERS)
    ]
    random.Random(0).shuffle(games)
    return games


def careless_player(game: Game, rng: random.Random) -> str:
    """A number of what is left now and then, else any."""
    if rng.random() < CAREFUL_SHARE:
        return random_player(game, rng)
    return str(rng.choice(LOWS) + rng.randrange(NUM_NUMBERS))


def conversations() -> list[dict]:
    """What the warm start learns from."""
    rng = random.Random(1)
    games = train_tasks()
    return [
        {"messages": played(Game(**games[index % len(games)]), careless_player, rng)}
        for index in range(NUM_CONVERSATIONS)
    ]
