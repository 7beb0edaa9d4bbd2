"""Values that several dialects read alike.

Owns: reading a body into a type, limits of numbers and stops, text of content parts. Does not own:
any dialect's field names beyond what it is told. Invariant: pure functions; an impossible value is
refused with 400 and the name of its parameter.
"""

from __future__ import annotations

import math
import re
from typing import Any, NoReturn, TypeVar

import msgspec

from outloop.router.refusals import Refusal

T = TypeVar("T")
MAX_CHOICES = 128
_MAX_STOPS = 16
_RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 2.0),
    "top_k": (-1.0, math.inf),
}
_WHERE = re.compile(r"`\$\.([^`]*)`")


def absent() -> msgspec.Raw:
    """The default of a field that is kept as JSON."""
    return msgspec.Raw(b"null")


def refuse(param: str, message: str, code: str = "invalid_value") -> NoReturn:
    """Refuse a value.

    Raises:
        Refusal: 400, always.
    """
    raise Refusal(400, code, message, param=param)


def read(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """The body as the decoder's type.

    Raises:
        Refusal: 400, not JSON, or a field of another type.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        where = _WHERE.search(str(error))
        raise Refusal(
            400, "invalid_value", f"{error}", param=where.group(1) if where else None
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal(400, "invalid_json", f"the body is not JSON: {error}") from error


def asked(body: object) -> dict[str, float]:
    """The sampling parameters that a body sets, by the names of `Sampling`.

    Raises:
        Refusal: 400, out of range.
    """
    found: dict[str, float] = {}
    for name, (low, high) in _RANGES.items():
        value = getattr(body, name, None)
        if value is None:
            continue
        if not low <= value <= high or (name == "top_p" and value == 0.0):
            refuse(name, f"{name}={value!r}; allowed: {low:g} to {high:g}")
        found[name] = value
    return found


def stops(name: str, stop: str | list[str] | None) -> tuple[str, ...]:
    """Stop strings.

    Raises:
        Refusal: 400, too many, or an empty one.
    """
    given = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(given) > _MAX_STOPS or not all(given):
        refuse(name, f"{name}={stop!r}; at most {_MAX_STOPS} non-empty strings are allowed")
    return given


def whole(name: str, value: int | None, low: int, high: int | None) -> int | None:
    """A whole number within limits, None when it was left out.

    Raises:
        Refusal: 400, out of range.
    """
    if value is None:
        return None
    if value < low or (high is not None and value > high):
        limit = f"{low} to {high}" if high is not None else f"{low} or more"
        refuse(name, f"{name}={value}; allowed: {limit}")
    return value


def function_tool(
    name: object, description: object, parameters: object, strict: object = None
) -> dict[str, Any]:
    """A tool in the form that chat formats render; what was left out stays out."""
    function = {"name": name, "description": description, "parameters": parameters}
    if strict is not None:
        function["strict"] = strict
    return {
        "type": "function",
        "function": {key: value for key, value in function.items() if value is not None},
    }


def tool_objects(raw: bytes) -> list[dict[str, Any]]:
    """The tools of a body as objects.

    Raises:
        Refusal: 400, not a list of objects.
    """
    try:
        return msgspec.json.decode(raw, type=list[dict[str, Any]] | None) or []
    except msgspec.DecodeError as error:
        raise Refusal(400, "invalid_value", f"tools: {error}", param="tools") from error


def rest_of(text: str, shown: str) -> str:
    """What of a finished text a stream has not shown; nothing when it showed something else."""
    return text[len(shown) :] if text.startswith(shown) else ""
