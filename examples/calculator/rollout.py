"""How a training run plays one episode: the agent as it is, and its verifier."""

from agent import solve
from verifier import score


async def play(task, episode):
    question = task.payload["question"]
    answer = await solve(question, episode.client)
    return score(question, answer)
