"""Scores an answer: 1 if its last number is the right one, else 0."""

import re

from agent import evaluate

_NUMBER = re.compile(r"-?\d+")


def verify(task, result) -> float:
    """For a run: the task has the question, the result the answer."""
    return score(task.payload["question"], result.answer)


def score(question: str, answer: str) -> float:
    """A pure function of the problem and the agent's last words."""
    numbers = _NUMBER.findall(answer)
    if not numbers or len(numbers[-1]) > 12:
        return 0.0
    return 1.0 if int(numbers[-1]) == evaluate(question) else 0.0
