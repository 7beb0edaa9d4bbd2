"""Numbers to describe."""

from agent import DESCRIBE, GUESS

WORDS = ("nought", "single", "pair", "trio", "square", "hand", "dice", "week", "spider", "cat")


def train_tasks() -> list[dict]:
    """All ten of them."""
    return [{"number": str(number)} for number in range(10)]


def conversations() -> list[dict]:
    """A convention for the ten numbers, which a warm start could begin with."""
    rows = []
    for number, word in enumerate(WORDS):
        for role, text, answer in ((DESCRIBE, str(number), word), (GUESS, word, str(number))):
            messages = [("system", role), ("user", text), ("assistant", answer)]
            rows.append({"messages": [{"role": r, "content": c} for r, c in messages]})
    return rows * 20
