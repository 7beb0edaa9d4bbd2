"""What values sampling parameters may have.

Owns: their ranges. Does not own: which of them are in force (governance), their names on a wire
(dialects). Invariant: no server is asked to draw with a value for which it would refuse, or die.
"""

from __future__ import annotations

import math
from types import MappingProxyType

from outloop.router.errors import Refusal

_MAX_INT32 = 2**31 - 1
_RANGES = MappingProxyType(
    {
        "temperature": (0.0, 2.0),
        "top_p": (0.0, 1.0),
        "min_p": (0.0, 1.0),
        "frequency_penalty": (-2.0, 2.0),
        "presence_penalty": (-2.0, 2.0),
        "repetition_penalty": (0.0, 2.0),
        "top_k": (-1, _MAX_INT32),
        "max_new_tokens": (1, _MAX_INT32),
        "seed": (-(2**63), 2**63 - 1),
    }
)
_WHOLE = frozenset({"top_k", "max_new_tokens", "seed"})
_ABOVE_LOW = frozenset({"top_p", "repetition_penalty"})
"""What would divide by zero, or leave nothing to draw, at the lower end."""
PARAMETERS = tuple(_RANGES)
FLOATS = tuple(name for name in PARAMETERS if name not in _WHOLE)


def check_value(name: str, value: float, param: str) -> None:
    """Refuse a value of the parameter `name` that cannot be.

    Raises:
        Refusal: 400, out of range, or no whole number where one is needed; it names `param`.
    """
    low, high = _RANGES[name]
    is_above = value > low if name in _ABOVE_LOW else value >= low
    if is_above and value <= high and not (name in _WHOLE and value != math.floor(value)):
        return
    border = "above " if name in _ABOVE_LOW else ""
    limits = f"whole numbers, {low} to {high}" if name in _WHOLE else f"{border}{low:g} to {high:g}"
    raise Refusal(400, "invalid_value", f"{param}={value!r}; allowed: {limits}", param=param)
