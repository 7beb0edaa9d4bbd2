"""What a reward model of the calculator learns from, and what it is asked about."""

import random

from agent import CALCULATOR
from tasks import ask_tool, guess, problems, slip
from tasks import conversation as rows_of

NUM_PAIRS = 1200


def pairs() -> list[dict]:
    """The tool used rightly, before a guess or a tool call with a slip."""
    rng = random.Random(3)
    found = []
    for question in problems("train")[:NUM_PAIRS]:
        worse = [{"role": "assistant", "content": guess(question, rng)}]
        if rng.random() < 0.5:
            worse = ask_tool(slip(question, rng))
        found.append(
            {
                "chosen": rows_of(question, ask_tool(question))["messages"],
                "rejected": rows_of(question, worse)["messages"],
                "tools": [CALCULATOR],
            }
        )
    return found


def conversation(task: dict, answer: str) -> dict:
    """What the served reward model sees of an episode: the whole of it, from rollout_scored.py."""
    return {"messages": task["messages"], "tools": [CALCULATOR]}
