"""A shop's support agent, as its author wrote it: talks to a customer and changes orders by tools.

    export OPENAI_BASE_URL=... OPENAI_API_KEY=...
    python agent.py        # you are the customer

It knows an OpenAI-compatible endpoint, its tools, and somebody who answers it.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable

from openai import AsyncOpenAI

MAX_TURNS = 12
SYSTEM_PROMPT = (
    "You work for a shop. Help the customer with tools. An order that was sent cannot be changed."
)


def tool(name: str, description: str, *fields: str) -> dict:
    """A function whose arguments are texts."""
    properties = {field: {"type": "string"} for field in fields}
    schema = {"type": "object", "properties": properties, "required": [*fields]}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = [
    tool("show", "Look up an order", "order"),
    tool("cancel", "Cancel an order", "order"),
    tool("move", "Change the address of an order", "order", "address"),
]


class Shop:
    """The orders; what the tools do to them."""

    def __init__(self, orders: dict[str, dict[str, str]]) -> None:
        self.orders = {number: dict(order) for number, order in orders.items()}

    def call(self, name: str, arguments: str) -> str:
        """The tool's answer; a malformed call is answered with what was wrong."""
        try:
            given = json.loads(arguments)
            order = self.orders[str(given["order"])]
            if name == "show":
                return json.dumps(order)
            if order["state"] == "sent":
                return "error: it was sent"
            if name == "cancel":
                order["state"] = "cancelled"
            elif name == "move":
                order["address"] = str(given["address"])
            else:
                return f"error: no tool {name!r}"
        except (ValueError, KeyError, TypeError) as error:
            return f"error: {error!r}"
        return "done"


async def serve(
    opening: str,
    ask_customer: Callable[[str], Awaitable[str | None]],
    client: AsyncOpenAI,
    shop: Shop,
) -> None:
    """Talk until the customer leaves, who then answers None, or MAX_TURNS model calls were made."""
    messages: list = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": opening},
    ]
    for _ in range(MAX_TURNS):
        completion = await client.chat.completions.create(
            model="policy", messages=messages, tools=TOOLS
        )
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or []:
            result = shop.call(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            said = await ask_customer(message.content or "")
            if said is None:
                return
            messages.append({"role": "user", "content": said})


async def main() -> None:
    shop = Shop({"1001": {"state": "open", "item": "lamp", "address": "1 Elm Road"}})

    async def ask(said: str) -> str | None:
        return await asyncio.to_thread(input, f"{said}\n> ") or None

    async with AsyncOpenAI() as client:
        await serve(await ask("Welcome.") or "", ask, client, shop)
    print(shop.orders)


if __name__ == "__main__":
    asyncio.run(main())
