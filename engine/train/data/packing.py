"""Which samples share a microbatch, and which data-parallel rank computes it.

Every sample is in exactly one microbatch, and no microbatch exceeds the token budget. The split
depends on lengths and order only, so that every rank finds the same one on its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from outloop.buffer.errors import RecordError


def pack(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Indices of `lengths` as microbatches of at most `max_tokens` tokens.

    First fit over lengths in descending order (ties in order of index): at most 11/9 of the fewest
    possible, and neighbours in a microbatch have similar lengths.

    Raises:
        RecordError: a sample is longer than the budget.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    rooms: list[int] = []
    bins: list[list[int]] = []
    for index in order:
        length = lengths[index]
        if length > max_tokens:
            raise RecordError(
                f"a sample has {length} tokens; at most trainer.max_microbatch_tokens={max_tokens} "
                "are allowed. Raise that setting or lower model.max_context_tokens."
            )
        for place, room in enumerate(rooms):
            if length <= room:
                bins[place].append(index)
                rooms[place] -= length
                break
        else:
            bins.append([index])
            rooms.append(max_tokens - length)
    return bins


def cost(length: int, hidden_size: int) -> float:
    """Estimated work of a sample, in units of one token without attention.

    A layer's matrices cost about 24 * hidden_size ** 2 operations per token, its attention about
    2 * length * hidden_size (causal), so attention adds length / (12 * hidden_size).
    """
    return length * (1.0 + length / (12.0 * hidden_size))


def deal(
    lengths: Sequence[int], *, max_tokens: int, num_ranks: int, hidden_size: int
) -> list[list[list[int]]]:
    """Indices of `lengths` by rank and microbatch, with equal estimated cost where possible.

    Every rank has the same number of microbatches, since ranks wait for each other in each; one
    may be empty when there are fewer samples than ranks. On one rank this is `pack`. On several,
    samples go by descending cost to the microbatch that has least and room (longest processing
    time first: at most 4/3 of the best balance, Graham 1969, when the room does not bind).

    Raises:
        RecordError: a sample is longer than the budget.
    """
    packed = pack(lengths, max_tokens=max_tokens)
    if num_ranks == 1:
        return [packed]
    costs = [cost(length, hidden_size) for length in lengths]
    order = sorted(range(len(lengths)), key=lambda index: (-costs[index], index))
    num_each = max(1, -(-len(packed) // num_ranks))
    bins = _spread(order, lengths, costs, max_tokens=max_tokens, count=num_each * num_ranks)
    if bins is None:
        # Dealing by cost alone left no room for some sample; whole microbatches always fit.
        bins = packed + [[] for _ in range(num_each * num_ranks - len(packed))]
    loads = [sum(costs[index] for index in members) for members in bins]
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    for place in sorted(range(len(bins)), key=lambda place: (-loads[place], place)):
        rank = min(
            (r for r in range(num_ranks) if len(ranks[r]) < num_each), key=lambda r: (totals[r], r)
        )
        ranks[rank].append(bins[place])
        totals[rank] += loads[place]
    return ranks


def _spread(
    order: Sequence[int],
    lengths: Sequence[int],
    costs: Sequence[float],
    *,
    max_tokens: int,
    count: int,
) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(count)]
    rooms = [max_tokens] * count
    loads = [0.0] * count
    for index in order:
        fitting = [place for place in range(count) if rooms[place] >= lengths[index]]
        if not fitting:
            return None
        place = min(fitting, key=lambda place: (loads[place], place))
        bins[place].append(index)
        rooms[place] -= lengths[index]
        loads[place] += costs[index]
    return bins


def imbalance(
    dealt: Sequence[Sequence[Sequence[int]]], lengths: Sequence[int], hidden_size: int
) -> float:
    """Estimated cost of the busiest rank over the mean, less one; 0 is perfect balance."""
    totals = [
        sum(cost(lengths[index], hidden_size) for members in rank for index in members)
        for rank in dealt
    ]
    mean = sum(totals) / len(totals)
    return max(totals) / mean - 1.0 if mean else 0.0
