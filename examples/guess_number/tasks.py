"""The games, their split, and the scripted players that the learned policy is compared with.

    python tasks.py     # how often scripted players find the number

A game is a range of seven numbers and one of them: 20 openings, 140 games. A hash of the game
decides its split: 4/5 for training (warm start and RL), 1/10 validation, 1/10 test. The last fifth
is held out; its openings are those of training games too.
"""

import random

from agent import SYSTEM_PROMPT
from verifier import MAX_GUESSES, Game

from outloop.envs.tasks.splits import split_of

TITLE = "A guessing agent learns to heed what is left"

LOWS = range(10, 30)
NUM_NUMBERS = 7
"""Three guesses find any of them, if each halves what is left."""
SHARES = {"train": 8, "validation": 1, "test": 1}

NUM_CONVERSATIONS = 8000
CAREFUL_SHARE = 0.5
"""How often the scripted player heeds what is left; otherwise it says any number."""


def games(split: str) -> list[dict[str, int]]:
    """Every game of a split, shuffled."""
    every = [
        {"low": low, "high": low + NUM_NUMBERS - 1, "secret": low + offset}
        for low in LOWS
        for offset in range(NUM_NUMBERS)
    ]
    chosen = [game for game in every if split_of(game, SHARES) == split]
    random.Random(0).shuffle(chosen)
    return chosen


def train_tasks() -> list[dict[str, int]]:
    """What RL practises on."""
    return games("train")


def eval_tasks() -> list[dict[str, int]]:
    """What the curve is measured on; no choice is made by it, so it may be the test split."""
    return games("test")


def scripted_player(game: Game, rng: random.Random) -> str:
    """A careless player: a number of what is left, or just any two digits."""
    if rng.random() < CAREFUL_SHARE:
        return random_player(game, rng)
    return str(rng.randint(LOWS[0], LOWS[-1] + NUM_NUMBERS - 1))


def random_player(game: Game, rng: random.Random) -> str:
    """Any number of what is left."""
    return str(rng.randint(game.low, game.high))


def oracle_player(game: Game, rng: random.Random) -> str:
    """The best player there is: halves what is left. No policy ever learns from it."""
    return str((game.low + game.high) // 2)


def played(game: Game, player, rng: random.Random) -> list[dict[str, str]]:
    """The conversation of a whole game."""
    messages = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": game.opening},
    ]
    while True:
        guess = player(game, rng)
        messages.append({"role": "assistant", "content": guess})
        answer = game.answer(guess)
        if answer is None:
            return messages
        messages.append({"role": "user", "content": answer})


def conversations() -> list[dict]:
    """What the warm start learns from: the scripted player on training games."""
    rng = random.Random(1)
    chosen = games("train")
    return [
        {"messages": played(Game(**chosen[index % len(chosen)]), scripted_player, rng)}
        for index in range(NUM_CONVERSATIONS)
    ]


def reward_of(player, num_games: int = 6000) -> float:
    """Mean reward of a scripted player on held-out games; no model takes part."""
    rng = random.Random(2)
    held_out = games("test")
    total = 0.0
    for index in range(num_games):
        game = Game(**held_out[index % len(held_out)])
        played(game, player, rng)
        total += game.reward
    return total / num_games


if __name__ == "__main__":
    for player in (scripted_player, random_player, oracle_player):
        print(f"{player.__name__} {reward_of(player):.3f}")
    counts = {split: len(games(split)) for split in ("train", "validation", "test")}
    print(f"games {counts}, {MAX_GUESSES} guesses each")
