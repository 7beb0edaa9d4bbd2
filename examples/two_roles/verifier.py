"""What each role earned."""


def guessed(number: str, guess: str) -> float:
    """1 for the number, of both roles: the description came before the guess."""
    return float(guess == number)


def leaked(number: str, description: str) -> float:
    """-1 for a description that holds the number: the describer's own affair."""
    return -float(number in description)
