"""How a training run plays a game: the policy in one seat, an earlier version in the other."""

from agent import choose
from verifier import Heap

OPPONENT = "policy@frozen"
"""One of the versions that the run keeps; what it says is recorded and never trained."""


async def play(task, episode):
    heap, seat = Heap(task.payload["stones"]), task.payload["seat"]
    while heap.winner is None:
        model = "policy" if heap.mover == seat else OPPONENT
        heap.take(await choose(heap.shown, episode.client, model))
    return float(heap.winner == seat)
