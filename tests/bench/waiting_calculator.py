"""The calculator's agent, waiting as tools, sandboxes and verifiers would.

Owns: how long an attempt at a question waits. Invariant: a pure function of question, attempt and
tail, so that every level and the bare loop meet the same seconds; evaluation does not wait.

OUTLOOP_BENCH_TAIL chooses the tail, OUTLOOP_BENCH_SCALE multiplies it, and OUTLOOP_BENCH_LOG names
a file for the duration and the wait of each episode.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from typing import Any

from agent import CALCULATOR, MAX_TURNS, SYSTEM_PROMPT, call_calculator
from verifier import score

from outloop.engine.launch.plan.lengths import Lengths, Part

TAILS = {
    # 40% short, 50% medium, 10% long: from 20 to 200 times the median of all, which is 0.05 s.
    "heavy": (
        Part(share=0.4, low=0.005, high=0.02),
        Part(share=0.5, low=0.02, high=0.17),
        Part(share=0.1, low=1.0, high=10.0, median=3.0, sigma=0.7),
    ),
    # Nothing waits longer than twice the median; long enough that turns take little beside.
    "light": (Part(share=1.0, low=0.3, high=2.7),),
    # Next to nothing: the trainer is the limit.
    "none": (Part(share=1.0, low=0.001, high=0.002),),
}
"""Seconds of an episode outside the model."""


def rank(question: str, attempt: int) -> float:
    """How long an attempt is among all, in [0, 1)."""
    digest = hashlib.sha256(f"{question} {attempt}".encode()).digest()
    return int.from_bytes(digest[:7], "big") / 2**56


def lengths(tail: str, scale: float) -> Lengths:
    """The waits of a tail."""
    return Lengths.mixture(TAILS[tail]).scaled(scale)


_LOG = os.environ.get("OUTLOOP_BENCH_LOG", "")
_TAIL = os.environ.get("OUTLOOP_BENCH_TAIL", "heavy")
_LENGTHS = lengths(_TAIL, float(os.environ.get("OUTLOOP_BENCH_SCALE", "1")))


def wait_s(question: str, attempt: int) -> float:
    """Seconds that an attempt waits."""
    index = int(rank(question, attempt) * len(_LENGTHS.values))
    return float(_LENGTHS.values[index])


async def play(task: Any, episode: Any) -> float:
    """A rollout function: half of the wait between the turns, the rest before the verifier."""
    question, started = task.payload["question"], time.monotonic()
    whole_s = 0.0
    if episode.purpose == "train":
        whole_s = wait_s(question, int(episode.metadata["attempt"]))
    left_s = whole_s
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": question},
    ]
    answer = ""
    for turn in range(MAX_TURNS):
        completion = await episode.client.chat.completions.create(
            model="policy", messages=messages, tools=[CALCULATOR]
        )
        message = completion.choices[0].message
        if not message.tool_calls:
            answer = message.content or ""
            break
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = call_calculator(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if turn == 0:
            await asyncio.sleep(left_s / 2)
            left_s /= 2
    await asyncio.sleep(left_s)
    if _LOG and episode.purpose == "train":
        duration_s = time.monotonic() - started
        with open(_LOG, "a") as log:
            log.write(f"{duration_s:.4f} {whole_s:.4f}\n")
    return score(question, answer)
