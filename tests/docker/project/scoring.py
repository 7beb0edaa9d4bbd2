"""The tasks, and what an answer is worth: its digits, so that a random policy has signal."""


def tasks():
    return [{"question": f"say {i}"} for i in range(64)]


def digits(task, result):
    return float(sum(character.isdigit() for character in result.answer))
