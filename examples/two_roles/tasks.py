"""Numbers to describe, and a convention that the warm start learns badly."""

import random

from agent import DESCRIBE, GUESS

WORDS = ("nought", "single", "pair", "trio", "square", "hand", "dice", "week", "spider", "cat")
NUM_ROUNDS = 200


def train_tasks() -> list[dict]:
    """All ten of them."""
    return [{"number": str(number)} for number in range(10)]


def conversations() -> list[dict]:
    """The convention, with every second word and every second guess at random."""
    rng = random.Random(0)
    rows = []
    for _ in range(NUM_ROUNDS):
        for number, word in enumerate(WORDS):
            said = rng.choice([word, rng.choice(WORDS)])
            guess = rng.choice([number, rng.randrange(len(WORDS))])
            for role, text, answer in ((DESCRIBE, str(number), said), (GUESS, word, str(guess))):
                messages = [("system", role), ("user", text), ("assistant", answer)]
                rows.append({"messages": [{"role": r, "content": c} for r, c in messages]})
    return rows
