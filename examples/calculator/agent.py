"""A calculator agent, as its author wrote it for production.

    export OPENAI_BASE_URL=... OPENAI_API_KEY=...
    python agent.py "12*7"

It knows an OpenAI-compatible endpoint and its own tool, nothing else.
"""

import argparse
import ast
import asyncio
import json
import operator

from openai import AsyncOpenAI

MAX_TURNS = 3
SYSTEM_PROMPT = "Answer with a number."
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate arithmetic",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
MAX_EXPRESSION_CHARS = 64


def evaluate(expression: str) -> int:
    """Integer arithmetic with +, - and *; anything else is a ValueError."""
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ValueError("expression too long")

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](value(node.left), value(node.right))
        raise ValueError("only integers, +, - and * are allowed")

    try:
        return value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("not an expression") from error


def call_calculator(name: str, arguments: str) -> str:
    """The tool's answer; a malformed call is answered with what was wrong."""
    if name != CALCULATOR["function"]["name"]:
        return f"error: no tool {name!r}"
    try:
        expression = json.loads(arguments)["expression"]
        return str(evaluate(str(expression)))
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error}"


async def solve(question: str, client: AsyncOpenAI, model: str = "policy") -> str:
    """Ask the model, run the tools it calls, and return its answer; empty when it gave none."""
    messages: list = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": question},
    ]
    for _ in range(MAX_TURNS):
        completion = await client.chat.completions.create(
            model=model, messages=messages, tools=[CALCULATOR]
        )
        message = completion.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = call_calculator(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


async def main() -> None:
    parser = argparse.ArgumentParser(description="Answer an arithmetic question.")
    parser.add_argument("question", help='for example "12*7"')
    parser.add_argument("--model", default="policy")
    options = parser.parse_args()
    async with AsyncOpenAI() as client:
        print(await solve(options.question, client, options.model))


if __name__ == "__main__":
    asyncio.run(main())
