"""How a training run plays one episode: the agent as it is, against a host."""

from agent import play_game
from verifier import Game


async def play(task, episode):
    game = Game(**task.payload)
    await play_game(game.opening, game.answer, episode.client)
    return game.reward
