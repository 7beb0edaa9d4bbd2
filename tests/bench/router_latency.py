"""Latency at concurrency 1: what a client that asks, hears and asks on waits for.

Owns: timing one conversation after the other through the router and through the bare relay, each
turn right after the one before, and the same requests at the mock server itself. Does not own:
episodes, summaries (router). Invariant: every request has the same prompt as its counterpart, and a
conversation's three ways are taken within a second of each other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import msgspec
from router_load import TOOLS, Connection, Conversation
from router_mock import NUM_GENERATED
from router_stage import Stage

from outloop.router.dialects.base import Message
from outloop.router.rendering.renderer import PolicyRenderer

Ask = tuple[str, bytes]
"""Path and body of a request."""


async def seconds_added(
    stage: Stage, conversation: Conversation, num_turns: int
) -> dict[str, float]:
    """Median seconds that a turn takes beyond the server's own: `ours` and the bare `relay`'s.

    First turns, which render the whole prompt, are left out.
    """
    ours, chats = await _played(stage.router.port, conversation, num_turns)
    policy = PolicyRenderer(stage.run.settings.model)
    generations = [_generation(policy, conversation, number) for number in range(1, num_turns)]
    generated = await _posted(stage.mock.port, generations)
    relayed = await _posted(stage.relay.port, chats[1:])
    answered = await _posted(stage.mock.port, chats[1:])
    return {
        "ours": statistics.median(ours[1:]) - statistics.median(generated),
        "relay": statistics.median(relayed) - statistics.median(answered),
    }


async def _played(
    port: int, conversation: Conversation, num_turns: int
) -> tuple[list[float], list[Ask]]:
    """Seconds of each turn of `conversation`, and what was asked."""
    connection = await Connection.open(port)
    seconds, asked = [], []
    for _ in range(num_turns):
        body = conversation.body()
        asked.append(("/v1/chat/completions", body))
        before = time.perf_counter()
        status, answer = await connection.post(asked[-1][0], body, conversation.key)
        seconds.append(time.perf_counter() - before)
        conversation.hear(status, answer, is_checked=True)
    connection.close()
    assert not conversation.num_mixed
    return seconds, asked


def _generation(policy: PolicyRenderer, conversation: Conversation, number: int) -> Ask:
    """What a router asks of the server for turn `number`."""
    before = conversation.messages[: 2 * number + 2]
    said = [Message(m["role"], m["content"]) for m in before]  # type: ignore[arg-type]
    parameters = {"max_new_tokens": NUM_GENERATED, "stop_token_ids": policy.stop_ids}
    body = {"input_ids": policy.render(said, TOOLS), "sampling_params": parameters}
    return "/generate", msgspec.json.encode(body)


async def _posted(port: int, asked: Sequence[Ask]) -> list[float]:
    """Seconds of each, one after the other."""
    connection = await Connection.open(port)
    seconds = []
    for path, body in asked:
        before = time.perf_counter()
        await connection.post(path, body, "none")
        seconds.append(time.perf_counter() - before)
    connection.close()
    return seconds
