"""Values that several dialects decode and encode alike.

Pure functions; an invalid value is refused with 400 and the name of its parameter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

import msgspec

from outloop.router.dialects.base import Message, TokenLogprob
from outloop.router.dialects.sampling_parameters import FLOATS, check_value
from outloop.router.errors import Refusal, not_json

T = TypeVar("T")
MAX_CHOICES = 128
MAX_ITEMS = 4096
"""Messages, tools, or parts of all messages in one request: each costs far more than its bytes."""
_MAX_STOP_CHARS = 4096
_TEXTS = frozenset({"text", "input_text", "output_text", "refusal"})
MAX_TOP_LOGPROBS = 20
_MAX_STOPS = 16
_SAMPLING = (*FLOATS, "top_k")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
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
        return decoder.decode(body.removeprefix(_BYTE_ORDER_MARK))
    except msgspec.ValidationError as error:
        where = _WHERE.search(str(error))
        raise Refusal(
            400, "invalid_value", f"{error}", param=where.group(1) if where else None
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise not_json(body, error) from error


def asked(body: object) -> dict[str, float]:
    """The sampling parameters that a body sets, by the names of `Sampling`.

    Raises:
        Refusal: 400, out of range.
    """
    found: dict[str, float] = {}
    for name in _SAMPLING:
        value = getattr(body, name, None)
        if value is None:
            continue
        check_value(name, value, name)
        # Some clients write "off" as 0.
        found[name] = -1 if name == "top_k" and value == 0 else value
    return found


def check_number(param: str, number: int) -> None:
    """Refuse more items than one request may have.

    Raises:
        Refusal: 400.
    """
    if number > MAX_ITEMS:
        refuse(param, f"{param} has {number} items; at most {MAX_ITEMS} are allowed")


def no_text(where: str, what: str, kind: str) -> str:
    """Say why a part or block of content is refused."""
    if kind in _TEXTS:
        return f"{where} holds a {what} of type={kind!r} whose text is null; a string is needed"
    return f"{where} holds a {what} of type={kind!r}; only text is served. Leave other {what}s out."


def seed(value: int | None) -> int | None:
    """A seed.

    Raises:
        Refusal: 400, out of range.
    """
    if value is not None:
        check_value("seed", value, "seed")
    return value


def stops(name: str, stop: str | list[str] | None) -> tuple[str, ...]:
    """Stop strings.

    Raises:
        Refusal: 400, too many, or an empty one.
    """
    given = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(given) > _MAX_STOPS or not all(given) or sum(map(len, given)) > _MAX_STOP_CHARS:
        refuse(
            name,
            f"{name} has {len(given)} strings; at most {_MAX_STOPS}, none of them empty, of "
            f"{_MAX_STOP_CHARS} characters together are allowed",
        )
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
    """A tool in the form that chat formats render; fields that are None are left out."""
    function = {"name": name, "description": description, "parameters": parameters}
    if strict is not None:
        function["strict"] = strict
    return {
        "type": "function",
        "function": {key: value for key, value in function.items() if value is not None},
    }


def top_logprobs(value: int | None, *, is_asked: bool) -> int:
    """How many of the most probable tokens to return with each logprob.

    Raises:
        Refusal: 400, out of range, or without logprobs.
    """
    number = whole("top_logprobs", value, 0, MAX_TOP_LOGPROBS) or 0
    if number and not is_asked:
        refuse("top_logprobs", f"top_logprobs={number} needs logprobs=true")
    return number


def json_schema(param: str, form: dict[str, Any] | None, nested: str | None) -> str | None:
    """The schema, as JSON, that a response format asks for; None when it asks for text.

    Args:
        nested: the field of the format that holds `schema`; None when `schema` is in it.

    Raises:
        Refusal: 400, an unknown format, or one without its schema.
    """
    kind = form.get("type") if form else None
    if not form or kind in (None, "text"):
        return None
    if kind == "json_object":
        return '{"type":"object"}'
    holder = form.get(nested) if nested is not None else form
    schema = holder.get("schema") if isinstance(holder, dict) else None
    if kind != "json_schema" or not isinstance(schema, dict):
        refuse(
            param,
            f"{param}.type={kind!r}; allowed: text, json_object, and json_schema with its schema",
        )
    return msgspec.json.encode(schema).decode()


def mode_of(allowed: object) -> str:
    """The mode of a choice among `allowed_tools`: `auto` or `required`."""
    mode = allowed.get("mode") if isinstance(allowed, dict) else None
    return "required" if mode == "required" else "auto"


def tool_choice_of(choice: str, tools: Sequence[dict[str, Any]]) -> str:
    """`choice`, if it is among `tools`; without function tools it has no effect.

    Raises:
        Refusal: 400, a function that is not among the tools.
    """
    names = [tool["function"]["name"] for tool in tools]
    kind, _, name = choice.partition(":")
    if names and kind == "function" and name not in names:
        refuse("tool_choice", f"tool_choice={name!r}; the tools are {', '.join(names)}")
    return choice


def tool_objects(raw: bytes) -> list[dict[str, Any]]:
    """The tools of a body as objects.

    Raises:
        Refusal: 400, not a list of objects.
    """
    try:
        tools = msgspec.json.decode(raw, type=list[dict[str, Any]] | None) or []
    except msgspec.DecodeError as error:
        raise Refusal(400, "invalid_value", f"tools: {error}", param="tools") from error
    check_number("tools", len(tools))
    return tools


def arguments(value: str | dict[str, Any] | None) -> str:
    """A call's arguments as JSON text; some clients hand them back as an object."""
    return msgspec.json.encode(value).decode() if isinstance(value, dict) else value or ""


def split_prefill(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], str]:
    """The conversation, and the prefill: the beginning of the answer, where the client wrote it."""
    *before, last = messages
    is_begun = last.role == "assistant" and not last.tool_calls and not last.reasoning
    if not (before and is_begun and last.text.strip()):
        return messages, ""
    return tuple(before), last.text


def event(body: Any, name: str = "") -> bytes:
    """A server-sent event with a JSON body, and a name where the dialect gives events names."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + msgspec.json.encode(body) + b"\n\n"


def sampled_token(token: TokenLogprob) -> dict[str, Any]:
    """A token and the most probable ones in its place, as OpenAI writes them."""
    return {**_token(token), "top_logprobs": [_token(other) for other in token.top]}


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.data)}


def rest_of(text: str, shown: str) -> str:
    """The part of a finished text that a stream has not shown; empty if it showed another text."""
    return text[len(shown) :] if text.startswith(shown) else ""
