"""The games, and the random player that the policy begins as.

python tasks.py     # how often the random player and the best one win
"""

import random

from agent import SYSTEM_PROMPT
from verifier import MAX_TAKEN, Heap

STONES = range(4, 13)
NUM_CONVERSATIONS = 4000


def train_tasks() -> list[dict[str, int]]:
    """Every heap, once for each seat: whoever begins wins unless four divides the heap."""
    return [{"stones": stones, "seat": seat} for stones in STONES for seat in (0, 1)]


def random_player(stones: int, rng: random.Random) -> int:
    """Any move that is allowed."""
    return rng.randint(1, min(MAX_TAKEN, stones))


def best_player(stones: int, rng: random.Random) -> int:
    """Leaves a multiple of four where it can. No policy ever learns from it."""
    return stones % (MAX_TAKEN + 1) or random_player(stones, rng)


def conversations() -> list[dict]:
    """What the warm start learns from: any allowed move at any heap."""
    rng = random.Random(0)
    found = []
    for _ in range(NUM_CONVERSATIONS):
        stones = rng.randint(1, STONES[-1])
        messages = [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": f"{stones} left"},
            {"role": "assistant", "content": str(random_player(stones, rng))},
        ]
        found.append({"messages": messages})
    return found


def wins_of(player, opponent, num_games: int = 20_000) -> float:
    """The share of the tasks' games that `player` wins; no model takes part."""
    rng, won = random.Random(1), 0
    games = train_tasks()
    for index in range(num_games):
        game = games[index % len(games)]
        heap = Heap(game["stones"])
        while heap.winner is None:
            mover = player if heap.mover == game["seat"] else opponent
            heap.take(str(mover(heap.stones, rng)))
        won += heap.winner == game["seat"]
    return won / num_games


if __name__ == "__main__":
    print(f"random against random {wins_of(random_player, random_player):.3f}")
    print(f"best against random {wins_of(best_player, random_player):.3f}")
