"""Python values as messages between the tests and the code under test.

Decoded values are plain data only: nothing in them brings behaviour, such as an `__eq__` that is
always true.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

MAX_BYTES = 16 * 2**20
_MAX_PLAIN_INT = 2**63
"""Larger numbers are written as hexadecimal: Python refuses to read very long decimal ones."""


def encode(value: Any, refer: Callable[[Any], object]) -> object:
    """Encode a value for JSON; `refer(value)` names one that stays on this side.

    A value of a subclass is encoded as its built-in class, without its methods.
    """
    kind = type(value)
    if kind in (bool, str) or value is None:
        return value
    if isinstance(value, int):
        number = int.__index__(value)
        return number if abs(number) < _MAX_PLAIN_INT else {"n": int.__format__(number, "x")}
    if isinstance(value, float):
        return {"f": float.__repr__(value)}
    if isinstance(value, (list, tuple)):
        items = [encode(item, refer) for item in _items(value)]
        return items if isinstance(value, list) else {"t": items}
    if isinstance(value, dict):
        return {"d": [[encode(key, refer), encode(item, refer)] for key, item in dict.items(value)]}
    if isinstance(value, (set, frozenset)):
        items = [encode(item, refer) for item in _items(value)]
        return {"s": items, "z": isinstance(value, frozenset)}
    if isinstance(value, (bytes, bytearray)):
        return {"b": bytes(value).hex()}
    if isinstance(value, complex):
        return {"c": [repr(value.real), repr(value.imag)]}
    if isinstance(value, str):
        return str.__str__(value)
    if _is(value, "fractions", "Fraction"):
        return {"q": [encode(value.numerator, refer), encode(value.denominator, refer)]}
    if _is(value, "decimal", "Decimal"):
        return {"e": str(value)}
    return {"h": refer(value)}


def decode(form: Any, find: Callable[[Any], Any]) -> Any:
    """Decode a value; `find(name)` returns what a name stands for.

    Raises:
        Exception: `encode` does not make such a form; which one depends on the form.
    """
    if form is None or type(form) in (bool, int, str):
        return form
    if isinstance(form, list):
        return [decode(item, find) for item in form]
    if not isinstance(form, dict) or not form:
        raise ValueError("no form of a value")
    kind, content = next(iter(form.items()))
    if kind == "h":
        return find(content)
    if kind == "s":
        items = (decode(item, find) for item in content)
        return frozenset(items) if form.get("z") else set(items)
    if kind == "d":
        return {decode(key, find): decode(item, find) for key, item in content}
    if kind == "t":
        return tuple(decode(item, find) for item in content)
    if kind == "q":
        return _fraction(*(decode(part, find) for part in content))
    if kind in _FROM_TEXT:
        return _FROM_TEXT[kind](content)
    raise ValueError("no form of a value")


def _fraction(numerator: Any, denominator: Any) -> Any:
    from fractions import Fraction

    return Fraction(numerator, denominator)


def _decimal(text: Any) -> Any:
    from decimal import Decimal

    return Decimal(text)


_FROM_TEXT: dict[str, Callable[[Any], Any]] = {
    "n": lambda text: int(text, 16),
    "f": float,
    "b": bytes.fromhex,
    "c": lambda texts: complex(*map(float, texts)),
    "e": _decimal,
}


def _items(value: Any) -> Any:
    """The items of a collection, by the method of its built-in class."""
    kind: Any
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return kind.__iter__(value)
    raise TypeError(type(value).__name__)


def _is(value: object, module: str, name: str) -> bool:
    """True for an instance of a class in a module that may not be imported."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)


class MessageSocket:
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
            EOFError: the other side closed the socket.
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
