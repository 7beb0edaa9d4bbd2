"""How a training run plays an episode: a session over the revision, the agent, the tests."""

from agent import fix

from outloop.envs.adapters.software import Software

_software = Software()
tear_down = _software.tear_down


async def play(task, episode):
    async with _software.attempt(task) as attempt:
        await fix(task.payload["issue"], episode.client, attempt.bash)
        return await attempt.score()
