"""Scores an answer: 1 if it names the right one of the two kinds, and not the other one."""

import re

PLURALS = {"city": "cities"}


def names(answer: str, kind: str) -> bool:
    """True if the answer has the word, alone or as a plural."""
    forms = f"{kind}s?|{PLURALS.get(kind, kind)}"
    return re.search(rf"\b({forms})\b", answer.lower().replace("colour", "color")) is not None


def verify(task, result) -> float:
    right, wrong = (names(result.answer, task.payload[key]) for key in ("answer", "other"))
    return float(right and not wrong)
