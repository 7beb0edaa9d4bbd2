"""Python values as messages between the tests and the code that they test.

Owns: which values cross, and their bytes. Does not own: who sends them (tests_side, code_side).
Invariant: what is read is built of plain data only: nothing that was sent can bring behaviour with
it, an `__eq__` that says yes to everything for example.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

MAX_BYTES = 16 * 2**20
_PLAIN = (type(None), bool, int, str)


def encode(value: Any, keep: Callable[[Any], int]) -> object:
    """A JSON-able form; `keep(value)` numbers what does not cross."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, float):
        return {"f": float.__repr__(value)}
    if isinstance(value, (list, tuple)):
        items = [encode(item, keep) for item in value]
        return items if isinstance(value, list) else {"t": items}
    if isinstance(value, dict):
        return {"d": [[encode(key, keep), encode(item, keep)] for key, item in value.items()]}
    if isinstance(value, (set, frozenset)):
        return {"s": [encode(item, keep) for item in value], "z": isinstance(value, frozenset)}
    if isinstance(value, (bytes, bytearray)):
        return {"b": bytes(value).hex()}
    if isinstance(value, complex):
        return {"c": [repr(value.real), repr(value.imag)]}
    for plain in _PLAIN[1:]:
        if isinstance(value, plain):
            return plain(value)
    return {"h": keep(value)}


def decode(form: Any, find: Callable[[int], Any]) -> Any:
    """The value of a form; `find(number)` gives what a handle stands for.

    Raises:
        ValueError, TypeError, KeyError, RecursionError: it is no form that `encode` makes.
    """
    if type(form) in _PLAIN:
        return form
    if isinstance(form, list):
        return [decode(item, find) for item in form]
    if not isinstance(form, dict) or not form:
        raise ValueError("no form of a value")
    kind, content = next(iter(form.items()))
    if kind == "h":
        return find(int(content))
    if kind == "f":
        return float(content)
    if kind == "t":
        return tuple(decode(item, find) for item in content)
    if kind == "d":
        return {decode(key, find): decode(item, find) for key, item in content}
    if kind == "s":
        items = (decode(item, find) for item in content)
        return frozenset(items) if form.get("z") else set(items)
    if kind == "b":
        return bytes.fromhex(content)
    if kind == "c":
        return complex(*map(float, content))
    raise ValueError("no form of a value")


class Line:
    """Messages over a descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def send(self, message: object) -> None:
        """Write one message."""
        data = json.dumps(message).encode()
        view = memoryview(len(data).to_bytes(8, "big") + data)
        while view:
            view = view[os.write(self._fd, view) :]

    def receive(self) -> Any:
        """The next message.

        Raises:
            EOFError: the other side has gone.
            ValueError: it is too long, or no JSON.
        """
        length = int.from_bytes(self._read(8), "big")
        if length > MAX_BYTES:
            raise ValueError(f"a message of length={length}; at most {MAX_BYTES} is allowed")
        return json.loads(self._read(length))

    def _read(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            chunk = os.read(self._fd, length - len(data))
            if not chunk:
                raise EOFError
            data += chunk
        return bytes(data)
