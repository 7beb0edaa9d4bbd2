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
        assert all(number in row["wish"] for number in numbers)


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
        for row in map(tasks.row, range(100))
        if "cancelled" in row["wish"] and row["orders"] != row["wanted"]
    )
    number = row["wish"].split()[-1].rstrip(".")
    replies = iter(["Cancel it.", f"It is {number}.", "BYE"])
    acted = iter([{"role": "assistant", "content": "Which number?"}, *actions(number)])
    done = {"role": "assistant", "content": "It is done."}

    def answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
        if "You are a customer" in messages[0]["content"]:
            assert row["wish"] in messages[0]["content"]
            return {"role": "assistant", "content": next(replies)}
        assert row["wish"] not in json.dumps(messages)
        return next(acted, done)

    router.answer = answer
    task, episode = open_episode(row)
    assert await rollout.play(task, episode) == reward
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


@pytest.mark.e2e
@pytest.mark.timeout(240)
def test_it_trains(
    train_example: Callable[..., list[dict[str, Any]]], scripted_customer: str
) -> None:
    """Two steps; what the customer says is context, and only the agent's answers are trained."""
    rows = train_example(
        "customer",
        router__upstreams__customer__base_url=scripted_customer,
        buffer__drop_zero_signal=False,  # a random policy grants no wish
    )
    steps = [row for row in rows if "train/loss" in row]
    assert [row["train/episodes"] for row in steps] == [12, 12]
    assert all(row["train/failed_share"] == 0 for row in steps)
    # The agent says one thing of at most eight ids before the goodbye.
    assert all(0 < row["train/trained_tokens"] <= 12 * 8 for row in steps)
