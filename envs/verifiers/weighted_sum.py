"""Several verifiers as one, with a weight for each.

The reward is the weighted sum of the parts, which are reported with it. If one part fails, all do.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from outloop.buffer.errors import SettingsError
from outloop.buffer.records import Reward, Task
from outloop.envs.verifiers.result import Result


class Weighted:
    """`Weighted({"right": (Math(), 1.0), "form": (Regex("Answer:"), 0.1)})`."""

    def __init__(self, parts: Mapping[str, tuple[Callable[[Task, Result], Any], float]]) -> None:
        if not parts:
            raise SettingsError("Weighted has no part; give at least one verifier with its weight")
        self._parts = dict(parts)

    async def __call__(self, task: Task, result: Result) -> Reward:
        """The sum, with every part as a component, unweighted.

        A part that gives components of its own counts with their sum; they are named PART/NAME.
        """
        names = [*self._parts]
        values = await asyncio.gather(
            *(_value(verifier, task, result) for verifier, _ in self._parts.values())
        )
        components: dict[str, float] = {}
        total = 0.0
        for name, value in zip(names, values, strict=True):
            weight = self._parts[name][1]
            if isinstance(value, Mapping):
                components |= {f"{name}/{key}": number for key, number in value.items()}
                value = sum(value.values())
            elif isinstance(value, Reward):
                components |= {f"{name}/{key}": part for key, part in value.components.items()}
                value = value.value
            components[name] = value
            total += weight * value
        return Reward(value=total, components=components)

    async def tear_down(self) -> None:
        """Tear down the parts that have something to."""
        for verifier, _ in self._parts.values():
            if hasattr(verifier, "tear_down"):
                await verifier.tear_down()


async def _value(verifier: Callable[[Task, Result], Any], task: Task, result: Result) -> Any:
    call = verifier if inspect.isroutine(verifier) else type(verifier).__call__
    if inspect.iscoroutinefunction(inspect.unwrap(call)):
        return await verifier(task, result)
    return await asyncio.to_thread(verifier, task, result)
