"""What an answer is worth. Here: the share of its characters that are digits. Write your own."""


def score(answer):
    return sum(character.isdigit() for character in answer) / max(1, len(answer))


def verify(task, result):
    return score(result.answer)
