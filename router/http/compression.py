"""Bodies that clients compress.

Owns: which content encodings are read, and undoing them. Does not own: reading bodies (web), what
is in them. Invariant: nothing is unfolded beyond the limit of any body, and never for long at once.
"""

from __future__ import annotations

import asyncio
import zlib

from outloop.router.errors import Refusal, body_too_large

_PIECE_BYTES = 256 * 1024
_GZIP = 16 + zlib.MAX_WBITS


async def decoded(body: bytes, encoding: bytes, max_bytes: int) -> bytes:
    """What a body of this `content-encoding` stands for.

    Raises:
        Refusal: 413, it unfolds to more than `max_bytes`; 415, another encoding; 400, it breaks.
    """
    name = encoding.decode("latin-1").strip().lower()
    if name in ("", "identity"):
        return body
    if name in ("gzip", "x-gzip"):
        window = _GZIP
    elif name == "deflate":
        window = zlib.MAX_WBITS if _has_zlib_head(body) else -zlib.MAX_WBITS
    else:
        raise Refusal(
            415,
            "unsupported_encoding",
            f"content-encoding={name!r}; allowed: gzip, deflate or identity, one of them, once",
        )
    try:
        return await _unfolded(body, window, max_bytes)
    except zlib.error as error:
        raise Refusal(
            400, "invalid_encoding", f"the body is not whole, or not {name}: {error}"
        ) from error


async def _unfolded(body: bytes, window: int, max_bytes: int) -> bytes:
    unfolding = zlib.decompressobj(window)
    whole = bytearray()
    for start in range(0, len(body), _PIECE_BYTES):
        if unfolding.eof:
            raise zlib.error("there is more after its end")
        piece = body[start : start + _PIECE_BYTES]
        while piece:
            whole += unfolding.decompress(piece, _PIECE_BYTES)
            if len(whole) > max_bytes:
                raise body_too_large(max_bytes)
            piece = unfolding.unconsumed_tail
            # Other turns go on meanwhile.
            await asyncio.sleep(0)
    whole += unfolding.flush()
    if not unfolding.eof:
        raise zlib.error("it ends early")
    if unfolding.unused_data:
        raise zlib.error("there is more after its end")
    return bytes(whole)


def _has_zlib_head(body: bytes) -> bool:
    """False for bare deflate, which some clients send under the same name (RFC 9110, 8.4.1.2)."""
    return len(body) > 1 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0
