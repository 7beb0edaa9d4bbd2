"""Which samples share a microbatch.

Owns: the split of an update's samples into microbatches. Does not own: how a microbatch lies in
memory (layers). Invariant: every sample is in exactly one microbatch, no microbatch exceeds the
token budget, and the split depends on lengths and order only.
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
