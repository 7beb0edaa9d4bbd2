"""How a training run plays an episode: the agent as it is, scored by math-verify."""

from agent import solve

from outloop.envs.verifiers.math_equivalence import Math
from outloop.envs.verifiers.result import Result


class Play:
    """One per worker process; the verifier's own processes end with it."""

    def __init__(self):
        self.verifier = Math()

    async def play(self, task, episode):
        answer = await solve(task.payload["question"], episode.client)
        return await self.verifier(task, Result(answer=answer))

    async def tear_down(self):
        await self.verifier.tear_down()
