"""How a training run plays an episode: both roles in one episode, each scored where it acted."""

from agent import DESCRIBE, GUESS, ask, text_of
from verifier import guessed, leaked


async def play(task, episode):
    number = task.payload["number"]
    description = await ask(DESCRIBE, number, episode.client)
    guess = await ask(GUESS, text_of(description) or "?", episode.client)
    leak = leaked(number, text_of(description))
    right = guessed(number, text_of(guess))
    episode.score(leak, turn=description)
    episode.score(right, turn=guess)
    # Metrics by name; what trains is at the turns.
    episode.score(0.0, leaked=leak, guessed=right)
