"""An episode of many turns, for the rollout functions of real runs.

It is copied into a run's folder for the user's code (`install`), and imported there by its name.
"""

import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any


def install(folder: Path) -> None:
    """Let modules of `folder` write `from long_conversation import converse`."""
    shutil.copy(__file__, folder)


async def converse(
    task: Any, episode: Any, num_turns: int, after_turn: Callable[[int, Any], Awaitable[None]]
) -> float:
    """Ask the policy `num_turns` times, each time with all that was said before.

    Args:
        after_turn: awaited with the turn's number, from 0, and the answer before the next one.

    Returns the length of all answers: a random policy differs within a group.
    """
    messages: list[dict[str, str]] = []
    score = 0
    for number in range(num_turns):
        messages.append({"role": "user", "content": f"{task.payload['question']} {number}"})
        answer = await episode.client.chat.completions.create(model="policy", messages=messages)
        text = answer.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
        score += len(text)
        await after_turn(number, answer)
    return float(score)
