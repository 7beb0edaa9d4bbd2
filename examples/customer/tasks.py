"""Customers' wishes, the orders before, and the orders that a good agent leaves."""

import random

ITEMS = ("lamp", "kettle", "chair", "radio", "blanket", "clock")
STREETS = ("Elm Road", "Mill Lane", "High Street", "Park Row")


def row(seed: int) -> dict:
    """A wish for one of three orders, of which each may have been sent."""
    rng = random.Random(seed)
    numbers = rng.sample(range(1000, 10_000), 3)
    orders = {
        str(number): {
            "item": item,
            "state": rng.choice(["open", "open", "sent"]),
            "address": f"{rng.randint(1, 99)} {rng.choice(STREETS)}",
        }
        for number, item in zip(numbers, rng.sample(ITEMS, 3), strict=True)
    }
    number = str(rng.choice(numbers))
    wanted = {key: dict(order) for key, order in orders.items()}
    address = f"{rng.randint(1, 99)} {rng.choice(STREETS)}"
    moves = rng.random() < 0.5
    if orders[number]["state"] == "open":
        wanted[number] |= {"address": address} if moves else {"state": "cancelled"}
    aim = f"sent to {address}" if moves else "cancelled"
    wish = f"You want your order of a {orders[number]['item']} {aim}. Its number is {number}."
    return {"wish": wish, "orders": orders, "wanted": wanted}


def train_tasks() -> list[dict]:
    """What RL practises on."""
    return [row(seed) for seed in range(2000)]


def eval_tasks() -> list[dict]:
    """Other wishes."""
    return [row(seed) for seed in range(10_000, 10_200)]


def conversations() -> list[dict]:
    """What a tokenizer is made from."""
    messages = [
        {"role": "system", "content": "You work for a shop. Help the customer with tools."},
        {"role": "user", "content": "Please cancel my order."},
    ]
    call = '{"name": "cancel", "arguments": {"order": "%s"}}'
    return [
        {
            "messages": [
                *messages,
                {"role": "assistant", "content": call % next(iter(one["orders"]))},
                {"role": "user", "content": one["wish"]},
                {"role": "assistant", "content": "done"},
            ]
        }
        for one in train_tasks()[:200]
    ]
