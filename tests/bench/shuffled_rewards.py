"""The calculator played as ever, but scored with the reward of some other episode.

Owns: the exchange. Does not own: playing, verifying (examples/calculator). Invariant: what is
given is independent of the episode it is given to, up to one part in the pool's size, and its mean
is that of the true rewards, so that the reported reward still says how well the policy plays.
"""

import random
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from rollout import play as play_calculator  # examples/calculator, the run's env.import_dir

POOL_SIZE = 128
Play = Callable[[Any, Any], Awaitable[float]]


def exchanging(play: Play, *, size: int, seed: int) -> Play:
    """`play` with every reward put into a pool of the last `size`, and one drawn from it given."""
    pool: deque[float] = deque(maxlen=size)
    draw = random.Random(seed)

    async def play_and_exchange(task: Any, episode: Any) -> float:
        pool.append(await play(task, episode))
        return draw.choice(pool)

    return play_and_exchange


_exchanged = exchanging(play_calculator, size=POOL_SIZE, seed=0)


async def play(task: Any, episode: Any) -> float:
    """A rollout function."""
    return await _exchanged(task, episode)
