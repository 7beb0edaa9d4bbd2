"""How a training run plays an episode: the agent as it is, the corpus, the verifier."""

from functools import cache

from agent import answer
from tasks import Corpus
from verifier import verify

from outloop.envs.verifiers.result import Result

corpus = cache(Corpus)


async def play(task, episode):
    found = await answer(task.payload["question"], episode.client, corpus().search)
    return verify(task, Result(answer=found))
