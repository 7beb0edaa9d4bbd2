"""What an answer is worth: the share of its characters that are digits."""


def verify(task, result):
    answer = result.answer
    return sum(character.isdigit() for character in answer) / max(1, len(answer))
