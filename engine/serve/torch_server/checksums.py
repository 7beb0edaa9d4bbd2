"""Checksums of the weights that a server stores.

Owns: how they are made, which are remembered from when a tensor was stored, which are made anew.
Does not own: the tensors (weights), what they are compared with (engine.publish). Invariant: a
remembered checksum is of bytes read back from the weights' own memory after they were stored there;
it is given only for the transaction that stored them, and only while torch knows of no other write
to that memory.

Not found by a remembered checksum: a write that torch does not count (a bad pointer, bad memory)
between the moment a tensor is stored and the moment it is asked for. Two things look for those: a
sixteenth of the bytes is read again each time, other tensors in each transaction; and the first
transaction of this memory is read again in full, which finds what would be wrong every time, such
as two names that share memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import xxhash
from torch import Tensor

from outloop.engine.publish.verification.checksum import Algorithm, bytes_checksum, tensor_bytes
from outloop.engine.publish.verification.hashed_copy import copy_hashed, copy_tensor

_ALGORITHM: Algorithm = "xxh3_128"
"""Of what is remembered."""
_MAX_HASHING = 4
"""Threads."""
_MIN_HASHED_BYTES = 1 << 24
"""Of a thread; for less, another one costs more than it saves."""
_READ_AGAIN = 16
"""One byte in so many is read again although its checksum is remembered, at least."""


class Sums:
    """Writes tensors under their names and knows their checksums."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """`tensors` stay where they are."""
        self._tensors = tensors
        self._bytes: dict[str, memoryview] = {}
        """Of tensors on the CPU, made when first asked for."""
        self._transaction: str | None = None
        self._stored: dict[str, tuple[str, int]] = {}
        """Checksum, and torch's count of writes to the memory that the tensor lies in."""
        self._was_read_in_full = False

    def begin(self, transaction: str | None) -> None:
        """Forget what is remembered; remember what is written from now on if there is a name."""
        self._transaction = transaction
        self._stored.clear()

    def write(self, name: str, tensor: Tensor) -> None:
        """Store a tensor of the same shape."""
        target = self._tensors[name]
        self._stored.pop(name, None)
        if self._transaction is None:
            copy_tensor(target, tensor)
        else:
            checksum = copy_hashed(target, tensor)
            self._stored[name] = (checksum, target._version)

    def of(self, algorithm: Algorithm, transaction: str | None) -> dict[str, str]:
        """Checksum of every tensor, by name; remembered ones only for the `transaction` that stored
        the tensors.
        """
        known = self._remembered() if transaction and transaction == self._transaction else {}
        if algorithm != _ALGORITHM or not (known and self._was_read_in_full):
            found = self._read(self._tensors, algorithm)
            self._was_read_in_full |= bool(known) and found == known
            return found
        unknown = self._tensors.keys() - known.keys()
        return known | self._read([*unknown, *self._some(known, transaction or "")], algorithm)

    def _remembered(self) -> dict[str, str]:
        return {
            name: checksum
            for name, (checksum, count) in self._stored.items()
            if self._tensors[name]._version == count
        }

    def _some(self, names: Iterable[str], seed: str) -> Sequence[str]:
        """Names drawn by `seed` that hold at least one byte in `_READ_AGAIN` of all."""
        wanted = sum(tensor.nbytes for tensor in self._tensors.values()) / _READ_AGAIN
        some: list[str] = []
        for name in sorted(
            names, key=lambda name: xxhash.xxh3_64_intdigest(f"{seed} {name}".encode())
        ):
            if wanted <= 0:
                break
            some.append(name)
            wanted -= self._tensors[name].nbytes
        return some

    def _read(self, names: Iterable[str], algorithm: Algorithm) -> dict[str, str]:
        """Checksums of the bytes as they lie there now."""
        sizes = {name: self._tensors[name].nbytes for name in names}
        parts = _equal_parts(sizes, min(_MAX_HASHING, os.cpu_count() or 1))

        def hash_part(part: Sequence[str]) -> list[tuple[str, str]]:
            return [(name, bytes_checksum(self._content(name), algorithm)) for name in part]

        # Hashing leaves the interpreter to others; who waits for it needs no core meanwhile.
        with ThreadPoolExecutor(len(parts)) as pool:
            return dict(chain.from_iterable(pool.map(hash_part, parts)))

    def _content(self, name: str) -> memoryview:
        tensor = self._tensors[name]
        if tensor.device.type != "cpu":
            return tensor_bytes(tensor)
        if name not in self._bytes:
            self._bytes[name] = tensor_bytes(tensor)
        return self._bytes[name]


def _equal_parts(sizes: Mapping[str, int], max_parts: int) -> list[list[str]]:
    """The names in at most `max_parts` runs of about as many bytes each."""
    total = sum(sizes.values())
    num = max(1, min(max_parts, total // _MIN_HASHED_BYTES))
    parts: list[list[str]] = [[] for _ in range(num)]
    before = 0
    for name, num_bytes in sizes.items():
        parts[min(num - 1, before * num // max(1, total))].append(name)
        before += num_bytes
    return parts
