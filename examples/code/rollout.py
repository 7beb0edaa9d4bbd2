"""How a training run plays an episode: the agent as it is, its code tested in a sandbox."""

import ast

from agent import write_function

from outloop.envs.verifiers.code import UnitTests
from outloop.envs.verifiers.result import Result
from outloop.envs.verifiers.task_fields import code_of


def parses(prompt: str, answer: str) -> bool:
    """Whether the prompt and what was added to it are Python."""
    try:
        ast.parse(f"{prompt}\n{code_of(answer)}")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return True


class Play:
    """One per worker process; the verifier's sessions end with it."""

    def __init__(self):
        self.verifier = UnitTests()

    async def play(self, task, episode):
        """Two components: the tests passed, and, for policies that pass none yet, it is Python."""
        answer = await write_function(task.payload["prompt"], episode.client)
        passed = await self.verifier(task, Result(answer=answer))
        episode.score(passed=passed, parses=float(parses(task.payload["prompt"], answer)))

    async def tear_down(self):
        await self.verifier.tear_down()
