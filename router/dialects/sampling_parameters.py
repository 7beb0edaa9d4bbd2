"""The values that sampling parameters may have.

Invariant: no server is asked to sample with a value that it would refuse, or die of.
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
"""The lower end itself would divide by zero, or leave no token to sample."""
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
