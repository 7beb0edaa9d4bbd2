"""On how many servers the last episodes of a batch are placed.

Owns: that number. Does not own: which servers these are and which turns they get (the router), what
it is worth (`outloop plan`, which simulates by this rule). Invariant: a pure function of what was
seen; an episode that only ever loses neighbours moves at most log2(servers) times.
"""

from __future__ import annotations

import math

SPARE_SHARE = 0.25
"""Of the turns that servers may hold, so many are free where turns move to fewer servers: as many
episodes may come before turns are placed elsewhere again."""


def servers_to_keep(
    kept: int, num_episodes: float, *, num_servers: int, turns_per_server: int
) -> int:
    """How many of `num_servers` hold the turns of these episodes, where `kept` of them did before.

    More as soon as they hold more than `turns_per_server` each. Fewer only if half as many would,
    with room to spare. All where no episode is in flight: the next ones are a batch of their own.
    """
    if num_episodes <= 0:
        return num_servers
    kept = min(kept, num_servers)
    needed = math.ceil(num_episodes / turns_per_server)
    if needed > kept:
        return min(needed, num_servers)
    fewer = math.ceil(num_episodes / (turns_per_server * (1.0 - SPARE_SHARE)))
    return fewer if fewer <= kept // 2 else kept
