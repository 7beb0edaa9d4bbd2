"""Several verifiers as one, each with a weight.

The reward is their weighted sum; each score is reported as a component. A part that raises on an
answer, and not on a control answer, gives its lowest score. If a part is unavailable, the whole
verification fails.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from outloop.buffer.errors import SettingsError
from outloop.buffer.records import Reward, Task
from outloop.envs.verifiers.blame import lowest_if_it_raises
from outloop.envs.verifiers.result import Result


class Weighted:
    """`Weighted({"right": (Math(), 1.0), "form": (Regex("Answer:"), 0.1)})`."""

    def __init__(self, parts: Mapping[str, tuple[Callable[[Task, Result], Any], float]]) -> None:
        if not parts:
            raise SettingsError("Weighted has no part; give at least one verifier with its weight")
        self._parts = dict(parts)

    async def __call__(self, task: Task, result: Result) -> Reward:
        """The weighted sum, with the unweighted score of every part as a component.

        A part with components of its own counts with their sum; these are named PART/NAME.
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

    def check_task(self, task: Task) -> None:
        """Let each part look at a task, if it has `check_task`.

        Raises:
            EnvironmentFailure: a part cannot judge it.
        """
        for verifier, _ in self._parts.values():
            if hasattr(type(verifier), "check_task"):
                verifier.check_task(task)  # type: ignore[attr-defined]

    async def check_sandbox(self) -> None:
        """Open the sandbox of each part that has one, as the first verification does.

        Raises:
            SettingsError: this machine does not support it.
            EnvironmentFailure: it supports it and cannot open a session.
        """
        for verifier, _ in self._parts.values():
            if hasattr(type(verifier), "check_sandbox"):
                await verifier.check_sandbox()  # type: ignore[attr-defined]

    async def tear_down(self) -> None:
        """Call `tear_down` of the parts that have one."""
        for verifier, _ in self._parts.values():
            if hasattr(verifier, "tear_down"):
                await verifier.tear_down()


async def _value(verifier: Callable[[Task, Result], Any], task: Task, result: Result) -> Any:
    """The score of one part; 0 or its `lowest` if only this answer makes it raise."""
    call = verifier if inspect.isroutine(verifier) else type(verifier).__call__
    is_async = inspect.iscoroutinefunction(inspect.unwrap(call))

    async def score(part: object, task: Task, result: Result) -> Any:
        if is_async:
            return await verifier(task, result)
        return await asyncio.to_thread(verifier, task, result)

    return await lowest_if_it_raises(score)(verifier, task, result)
