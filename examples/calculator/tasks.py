"""The problems, their split, and the scripted players that the learned policy is compared with.

    python tasks.py     # rewards of the scripted player and of the oracle on held-out problems

A problem is `a+b`, `a-b` or `a*b` with two-digit a and b: 24,300 of them. A hash of the problem
decides its split, so no order or seed can move one: 4/5 for training (warm start and RL),
1/10 validation, 1/10 test. The last fifth is held out: no warm start and no RL sees it.
"""

import json
import random

from agent import CALCULATOR, SYSTEM_PROMPT, call_calculator, evaluate
from verifier import score

from outloop.envs.tasks.splits import split_of

TITLE = "A calculator agent learns to use its tool"

OPERATORS = "+-*"
OPERANDS = range(10, 100)
SHARES = {"train": 8, "validation": 1, "test": 1}

NUM_CONVERSATIONS = 8000
CALL_SHARE = 0.35
"""How often the scripted player uses its tool; otherwise it guesses."""
RIGHT_CALL_SHARE = 0.95
"""How often it types the problem into the tool without a slip."""


def problems(split: str) -> list[str]:
    """Every problem of a split, in an order that mixes the operators."""
    every = [f"{a}{op}{b}" for a in OPERANDS for op in OPERATORS for b in OPERANDS]
    chosen = [question for question in every if split_of(question, SHARES) == split]
    random.Random(0).shuffle(chosen)
    return chosen


def train_tasks() -> list[dict[str, str]]:
    """What RL practises on."""
    return [{"question": question} for question in problems("train")]


def eval_tasks() -> list[dict[str, str]]:
    """What the curve is measured on; no choice is made by it, so it may be the test split."""
    return [{"question": question} for question in problems("test")]


def guess(question: str, rng: random.Random) -> str:
    """A number of plausible length, seldom the right one."""
    low, high = {"+": (20, 198), "-": (-89, 89), "*": (100, 9801)}[question[2]]
    return str(rng.randint(low, high))


def slip(question: str, rng: random.Random) -> str:
    """The problem with one digit mistyped."""
    place = rng.choice([0, 1, 3, 4])
    digit = rng.choice([d for d in "123456789" if d != question[place]])
    return question[:place] + digit + question[place + 1 :]


def scripted_player(question: str, rng: random.Random) -> list[dict]:
    """A mediocre player: mostly guesses, sometimes asks the tool, now and then mistypes."""
    if rng.random() >= CALL_SHARE:
        return [{"role": "assistant", "content": guess(question, rng)}]
    expression = question if rng.random() < RIGHT_CALL_SHARE else slip(question, rng)
    return ask_tool(expression)


def oracle_player(question: str, rng: random.Random) -> list[dict]:
    """The best player there is; no policy ever learns from it."""
    return ask_tool(question)


def ask_tool(expression: str) -> list[dict]:
    """The assistant's call, the tool's answer, and the assistant repeating it."""
    function = {
        "name": CALCULATOR["function"]["name"],
        "arguments": json.dumps({"expression": expression}),
    }
    result = call_calculator(function["name"], function["arguments"])
    call = {"id": "call_0", "type": "function", "function": function}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": result},
        {"role": "assistant", "content": result},
    ]


def conversation(question: str, played: list[dict]) -> dict:
    """A row of SFT data: messages and tools as the agent sends them."""
    opening = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": question},
    ]
    return {"messages": opening + played, "tools": [CALCULATOR]}


def conversations() -> list[dict]:
    """What the warm start learns from: the scripted player on training problems."""
    rng = random.Random(1)
    chosen = problems("train")[:NUM_CONVERSATIONS]
    return [conversation(question, scripted_player(question, rng)) for question in chosen]


def reward_of(player, num_problems: int = 2000) -> float:
    """Mean reward of a scripted player on held-out problems; no model takes part."""
    rng = random.Random(2)
    held_out = problems("test")[:num_problems]
    rewards = [score(q, player(q, rng)[-1]["content"]) for q in held_out]
    return sum(rewards) / len(rewards)


if __name__ == "__main__":
    print(f"scripted player {reward_of(scripted_player):.3f}")
    print(f"oracle {reward_of(oracle_player):.3f}")
    counts = {split: len(problems(split)) for split in ("train", "validation", "test")}
    print(f"problems {counts}; right answers computed, e.g. 12*7={evaluate('12*7')}")
