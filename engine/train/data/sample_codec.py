"""Samples as bytes, for the other trainer ranks.

Owns: the encoding of samples between ranks of one start. Does not own: transport (exchange).
Invariant: decoding gives equal samples; no object is pickled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from outloop.engine.train.data.samples import Sample


def encode_samples(samples: Sequence[Sample]) -> bytes:
    """All fields of all samples; arrays as their dtype and their bytes."""
    names = [item.name for item in dataclasses.fields(Sample)]
    return msgspec.msgpack.encode(
        [[_plain(getattr(sample, name)) for name in names] for sample in samples]
    )


def decode_samples(data: bytes) -> list[Sample]:
    """The samples of `encode_samples`; arrays are read-only."""
    names = [item.name for item in dataclasses.fields(Sample)]
    rows = msgspec.msgpack.decode(data)
    return [Sample(**dict(zip(names, map(_restored, row), strict=True))) for row in rows]


def _plain(value: Any) -> Any:
    return [value.dtype.str, value.tobytes()] if isinstance(value, np.ndarray) else value


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        dtype, data = value
        return np.frombuffer(data, np.dtype(dtype))
    return value
