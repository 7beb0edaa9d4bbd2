"""Messages between a sandbox and the supervisor in it: lists of byte fields.

It imports nothing, so that a session starts quickly. Parsing a malformed message raises ValueError.
"""

from __future__ import annotations

_LENGTH_BYTES = 8
MAX_MESSAGE_BYTES = 2**31


def pack(fields: list[bytes]) -> bytes:
    """One message: its length, then every field after its own length."""
    parts = [b""]
    for field in fields:
        parts.append(len(field).to_bytes(_LENGTH_BYTES, "big"))
        parts.append(field)
    parts[0] = sum(map(len, parts)).to_bytes(_LENGTH_BYTES, "big")
    return b"".join(parts)


def body_length(head: bytes) -> int:
    """Bytes that follow the first `_LENGTH_BYTES` of a message.

    Raises:
        ValueError: not a length, or over MAX_MESSAGE_BYTES.
    """
    length = int.from_bytes(head, "big")
    if len(head) != _LENGTH_BYTES or length > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of length={length}; at most {MAX_MESSAGE_BYTES} is allowed")
    return length


def unpack(body: bytes) -> list[bytes]:
    """The fields of a message without its length.

    Raises:
        ValueError: a field ends after the message.
    """
    fields, start = [], 0
    while start < len(body):
        begin = start + _LENGTH_BYTES
        end = begin + int.from_bytes(body[start:begin], "big")
        if begin > len(body) or end > len(body):
            raise ValueError(f"a field ends at {end}, its message at {len(body)}")
        fields.append(body[begin:end])
        start = end
    return fields
