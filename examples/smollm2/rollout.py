"""How a training run plays an episode: the agent as it is, and its verifier."""

from agent import solve
from verifier import verify

from outloop.envs.verifiers.result import Result


async def play(task, episode):
    answer = await solve(task.payload["question"], episode.client)
    return verify(task, Result(answer=answer))
