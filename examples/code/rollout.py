"""How a training run plays an episode: the agent as it is, and its verifier."""

import verifier
from agent import write_function

from outloop.envs.verifiers.result import Result

tear_down = verifier.tear_down


async def play(task, episode):
    answer = await write_function(task.payload["prompt"], episode.client)
    return await verifier.verify(task, Result(answer=answer))
