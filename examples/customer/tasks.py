"""Customers' wishes, the orders before, and the orders that a good agent leaves.

    python tasks.py     # rewards of scripted agents on held-out wishes; no model takes part

A hash of an order's number decides its split, so no number that training sees is asked for in an
evaluation: 4/5 for training (warm start and RL), 1/10 validation, 1/10 test.
"""

import json
import random
from functools import cache

from agent import SYSTEM_PROMPT, TOOLS, Shop
from simulated_customer import GOODBYE, HELLO, ScriptedCustomer, prompt

from outloop.envs.tasks.splits import split_of

ITEMS = ("lamp", "kettle", "chair", "radio", "blanket", "clock")
STREETS = ("Elm Road", "Mill Lane", "High Street", "Park Row")
SHARES = {"train": 8, "validation": 1, "test": 1}
NUM_TASKS = {"train": 2000, "validation": 200, "test": 200}

NUM_CONVERSATIONS = 8000
"""Of the agent, and as many of the customer."""
ASK_SHARE = 0.35
"""How often the scripted agent asks for what it must know; otherwise it makes it up."""
RIGHT_TOOL_SHARE = 0.7
"""How often it takes the tool that was wished for."""


@cache
def numbers(split: str) -> list[int]:
    """The numbers that orders of a split have."""
    return [number for number in range(100, 1000) if split_of(number, SHARES) == split]


def address(rng: random.Random) -> str:
    """Any of 396."""
    return f"{rng.randint(1, 99)} {rng.choice(STREETS)}"


def row(split: str, seed: int) -> dict:
    """A wish for one of three orders, of which some were sent."""
    rng = random.Random(f"{split} {seed}")
    chosen = [str(number) for number in rng.sample(numbers(split), 3)]
    orders = {
        number: {
            "item": item,
            "state": rng.choice(["open", "open", "open", "sent"]),
            "address": address(rng),
        }
        for number, item in zip(chosen, rng.sample(ITEMS, 3), strict=True)
    }
    number = rng.choice(chosen)
    wish = {"number": number, "item": orders[number]["item"]}
    if rng.random() < 0.5:
        wish["address"] = address(rng)
    wanted = {key: dict(order) for key, order in orders.items()}
    if orders[number]["state"] == "open":
        moved = {"address": wish["address"]} if "address" in wish else {"state": "cancelled"}
        wanted[number] |= moved
    return {"wish": wish, "orders": orders, "wanted": wanted}


def tasks(split: str) -> list[dict]:
    """Every task of a split."""
    return [row(split, seed) for seed in range(NUM_TASKS[split])]


def train_tasks() -> list[dict]:
    """What RL practises on."""
    return tasks("train")


def eval_tasks() -> list[dict]:
    """What the curve is measured on; no choice is made by it, so it may be the test split."""
    return tasks("test")


def careful_player(task: dict, rng: random.Random) -> list:
    """Asks, and does what was wished for: what the agent says, or a tool and its arguments."""
    wish = task["wish"]
    order = {"order": wish["number"]}
    if "address" in wish:
        return ["Which number and address?", ("move", {**order, "address": wish["address"]})]
    return ["Which number?", ("cancel", order)]


def scripted_player(task: dict, rng: random.Random) -> list:
    """A careless agent: often does not ask, and takes the wrong tool now and then."""
    question, (tool, known) = careful_player(task, rng)
    asks = rng.random() < ASK_SHARE
    order = known["order"] if asks else str(rng.choice(numbers("train")))
    if rng.random() >= RIGHT_TOOL_SHARE:
        tool = "cancel" if tool == "move" else "move"
    arguments = {"order": order}
    if tool == "move":
        arguments["address"] = known["address"] if asks and "address" in known else address(rng)
    return [*([question] if asks else []), (tool, arguments)]


def idle_player(task: dict, rng: random.Random) -> list:
    """Does nothing, which is right where the order was sent."""
    return []


def played(task: dict, acts: list) -> tuple[list[dict], Shop]:
    """The conversation in which the agent does so, and the shop after it."""
    shop, customer = Shop(task["orders"]), ScriptedCustomer(task["wish"])
    messages: list[dict] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": customer.wishes()},
    ]
    result = ""
    for act in acts:
        if isinstance(act, str):
            messages.append({"role": "assistant", "content": act})
            messages.append({"role": "user", "content": customer.replies(act) or ""})
        else:
            function = {"name": act[0], "arguments": json.dumps(act[1])}
            call = {"id": "call_0", "type": "function", "function": function}
            result = shop.call(**function)
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_0", "content": result},
            ]
    farewell = "It was sent." if "sent" in result else "Done."
    return [*messages, {"role": "assistant", "content": farewell}], shop


def conversations() -> list[dict]:
    """What the warm start learns from: the careless agent, its customer, and training wishes."""
    rng = random.Random(1)
    found = []
    for seed in range(NUM_CONVERSATIONS):
        task = row("train", seed)
        messages, _ = played(task, scripted_player(task, rng))
        found.append({"messages": messages, "tools": TOOLS})
        asked = rng.sample(["Which number?", "Which address?", "Which number and address?"], 2)
        found.append(
            {"messages": heard(task, [*asked[: rng.randint(0, 2)], messages[-1]["content"]])}
        )
    return found


def heard(task: dict, said: list[str]) -> list[dict]:
    """The customer's conversation with an agent who says so: what a model needs to play it."""
    customer = ScriptedCustomer(task["wish"])
    messages: list[dict] = [
        {"role": "system", "content": prompt(task["wish"])},
        {"role": "user", "content": HELLO},
        {"role": "assistant", "content": customer.wishes()},
    ]
    for text in said:
        messages.append({"role": "user", "content": text})
        messages.append({"role": "assistant", "content": customer.replies(text) or GOODBYE})
        if messages[-1]["content"] == GOODBYE:
            break
    return messages


def reward_of(player) -> float:
    """Mean reward of a scripted agent on held-out wishes."""
    rng = random.Random(2)
    rewards = [played(task, player(task, rng))[1].orders == task["wanted"] for task in eval_tasks()]
    return sum(rewards) / len(rewards)


if __name__ == "__main__":
    for player in (idle_player, scripted_player, careful_player):
        print(f"{player.__name__} {reward_of(player):.3f}")
    print({split: len(numbers(split)) for split in SHARES})
