"""The host of the game, who scores it too: knows the number, answers guesses, and counts them."""

import re

MAX_GUESSES = 3
_NUMBER = re.compile(r"[0-9]{1,4}")


class Game:
    """One game. What is left of the range is said with every answer, so nothing must be kept."""

    def __init__(self, low: int, high: int, secret: int) -> None:
        self.low = low
        self.high = high
        self.secret = secret
        self.num_guesses = 0
        self.is_found = False

    @property
    def opening(self) -> str:
        return f"{self.low} to {self.high}"

    def answer(self, guess: str) -> str | None:
        """What the host says to a guess; None when the game is over."""
        self.num_guesses += 1
        found = _NUMBER.fullmatch(guess.strip())
        number = int(found.group()) if found else None
        self.is_found = number == self.secret
        if self.is_found or self.num_guesses == MAX_GUESSES:
            return None
        if number is None:
            return f"a number. {self.opening}"
        if number < self.secret:
            self.low = max(self.low, number + 1)
            return f"higher. {self.opening}"
        self.high = min(self.high, number - 1)
        return f"lower. {self.opening}"

    @property
    def reward(self) -> float:
        """1 if the number was found in time."""
        return 1.0 if self.is_found else 0.0
