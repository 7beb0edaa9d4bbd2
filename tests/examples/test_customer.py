"""A simulated customer: another model, never trained; scripted conversations and two steps."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def tasks(load_example: Callable[..., ModuleType]) -> ModuleType:
    """The example's wishes."""
    return load_example("customer", "tasks")


def calls(name: str, **arguments: str) -> dict[str, Any]:
    """An answer that calls a tool of the shop."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": "c", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.medium
def test_a_wish_changes_one_order_that_was_not_sent(tasks: ModuleType) -> None:
    """And some wishes cannot be granted: the right orders are then those before."""
    rows = tasks.train_tasks()[:300]
    changes = [
        [number for number, order in row["orders"].items() if order != row["wanted"][number]]
        for row in rows
    ]
    assert {len(numbers) for numbers in changes} == {0, 1}
    for row, numbers in zip(rows, changes, strict=True):
        assert all(row["orders"][number]["state"] == "open" for number in numbers)
        assert all(number == row["wish"]["number"] for number in numbers)


@pytest.mark.medium
def test_held_out_numbers_are_in_no_training_wish(tasks: ModuleType) -> None:
    """Of 900 numbers, each is in one split."""
    trained = {number for row in tasks.train_tasks() for number in row["orders"]}
    held_out = {number for row in tasks.eval_tasks() for number in row["orders"]}
    assert not trained & held_out
    assert len(held_out) > 50


@pytest.mark.medium
def test_a_careful_agent_is_right_and_an_idle_one_seldom(tasks: ModuleType) -> None:
    """The scripted customer tells what it is asked for, so that every wish can be granted."""
    assert tasks.reward_of(tasks.careful_player) == 1
    assert tasks.reward_of(tasks.idle_player) < 0.3
    assert 0.3 < tasks.reward_of(tasks.scripted_player) < 0.6


@pytest.mark.medium
def test_the_warm_start_shows_both_sides_of_a_talk(tasks: ModuleType) -> None:
    """A customer begins, says what it is asked for and ends; half of the conversations are its."""
    sides: list[list[str]] = [[], []]
    for row in tasks.conversations()[:400]:
        system, first, *rest = [message["content"] for message in row["messages"]]
        is_customer = system.startswith("You are a customer")
        sides[is_customer].append(first)
        if is_customer:
            answers = rest[::2]
            assert answers[0].startswith(("Send my", "Cancel my"))
            assert "BYE" not in answers[:-1]
            assert answers[-1] == "BYE"
            assert all(word in system for text in answers[1:-1] for word in text.split(", "))
    assert len(sides[0]) == len(sides[1])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("Which number?", "123"),
        ("Which address?", "7 Elm Road"),
        ("Which number and address?", "123, 7 Elm Road"),
        ("Done.", None),
        ("", None),
    ],
)
async def test_the_scripted_customer_says_what_it_is_asked_for(
    load_example: Callable[..., ModuleType], asked: str, said: str | None
) -> None:
    """And leaves when it is asked for nothing that it knows."""
    customers = load_example("customer", "simulated_customer")
    customer = customers.ScriptedCustomer(
        {"number": "123", "item": "lamp", "address": "7 Elm Road"}
    )
    assert await customer.opening() == "Send my lamp elsewhere."
    assert await customer.answer(asked) == said


@pytest.mark.parametrize(
    ("actions", "reward"),
    [
        (lambda number: [calls("show", order=number), calls("cancel", order=number)], 1.0),
        (lambda number: [calls("cancel", order="7")], 0.0),
        (lambda number: [calls("move", order=number, address="x")], 0.0),
        (lambda number: [], 0.0),
    ],
    ids=["as wished", "another order", "something else", "nothing"],
)
async def test_orders_decide_and_the_customer_is_another_model(
    tasks: ModuleType,
    load_example: Callable[..., ModuleType],
    open_episode: Callable[..., Any],
    router: Any,
    actions: Callable[[str], list[dict[str, Any]]],
    reward: float,
) -> None:
    """The agent asks for the number, the customer gives it, and says goodbye at the end."""
    rollout = load_example("customer", "rollout")
    row = next(
        row
        for row in tasks.train_tasks()
        if "address" not in row["wish"] and row["orders"] != row["wanted"]
    )
    wish = row["wish"]
    number = wish["number"]
    replies = iter(["Cancel it.", f"It is {number}.", "BYE"])
    acted = iter([{"role": "assistant", "content": "Which number?"}, *actions(number)])
    done = {"role": "assistant", "content": "It is done."}

    def answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
        if "You are a customer" in messages[0]["content"]:
            assert f"a {wish['item']} cancelled. Its number is {number}" in messages[0]["content"]
            return {"role": "assistant", "content": next(replies)}
        assert "cancelled" not in json.dumps(messages[:2])
        return next(acted, done)

    router.answer = answer
    task, episode = open_episode(row)
    assert await rollout.play_with_model(task, episode) == reward
    assert [*replies] == []


@pytest.fixture
def scripted_customer() -> Iterator[str]:
    """An endpoint that always says the same two things, in turn; its base URL."""

    class Customer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            text = "Please help." if len(body["messages"]) < 4 else "BYE"
            message = {"role": "assistant", "content": text}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            answer = {"id": "a", "object": "chat.completion", "created": 0, "model": "customer"}
            data = json.dumps({**answer, "choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Customer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(240)
def test_it_trains(train_example: Callable[..., list[dict[str, Any]]]) -> None:
    """Two steps with the scripted customer."""
    rows = train_example("customer", buffer__drop_zero_signal=False)
    steps = [row for row in rows if "train/loss" in row]
    assert [row["train/episodes"] for row in steps] == [12, 12]
    assert all(row["train/failed_share"] == 0 for row in steps)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(240)
def test_it_trains_with_a_model_as_customer(
    train_example: Callable[..., list[dict[str, Any]]], scripted_customer: str
) -> None:
    """Two steps; what the customer says is context, and only the agent's answers are trained."""
    rows = train_example(
        "customer",
        "model_customer.toml",
        router__upstreams__customer__base_url=scripted_customer,
        buffer__drop_zero_signal=False,  # a random policy grants no wish
    )
    steps = [row for row in rows if "train/loss" in row]
    assert [row["train/episodes"] for row in steps] == [12, 12]
    assert all(row["train/failed_share"] == 0 for row in steps)
    # The agent says one thing of at most eight ids before the goodbye.
    assert all(0 < row["train/trained_tokens"] <= 12 * 8 for row in steps)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(240)
def test_it_trains_with_an_earlier_version_as_customer(
    train_example: Callable[..., list[dict[str, Any]]],
) -> None:
    """Two steps with the policy of the start as the customer."""
    rows = train_example("customer", "frozen_customer.toml", buffer__drop_zero_signal=False)
    steps = [row for row in rows if "train/loss" in row]
    assert [row["train/episodes"] for row in steps] == [12, 12]
    assert all(row["train/failed_share"] == 0 for row in steps)
