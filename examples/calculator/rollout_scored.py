"""How a run plays that is rewarded by a served reward model; REWARD_MODEL_URL is its /score."""

import dataclasses
import os
from types import SimpleNamespace

from agent import solve
from verifier import verify

from outloop.envs.verifiers.judge import RewardModel
from outloop.envs.verifiers.result import Result

reward_model = RewardModel(os.environ.get("REWARD_MODEL_URL", "http://127.0.0.1:8600/score"))


class Noted:
    """The agent's client, with the last messages that it sent."""

    def __init__(self, client):
        self._client = client
        self.messages = []
        self.chat = SimpleNamespace(completions=self)

    async def create(self, **options):
        self.messages = list(options["messages"])
        return await self._client.chat.completions.create(**options)


async def play(task, episode):
    client = Noted(episode.client)
    answer = await solve(task.payload["question"], client)
    conversation = [*client.messages, {"role": "assistant", "content": answer}]
    seen = dataclasses.replace(task, payload={"messages": conversation})
    score = await reward_model(seen, Result(answer=answer))
    # The verifier's own word is only measured: reward/right.
    episode.score(score, right=verify(task, Result(answer=answer)))
