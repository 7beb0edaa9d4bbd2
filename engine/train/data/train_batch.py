"""The columns of everything that a take trains.

Shape letters: R rows (one for each trained branch), T tokens of all rows behind each other, K of a
teacher's tokens at each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from outloop.buffer.records import Float32, Int32
from outloop.engine.train.data.samples import Routes, Sample, TokenColumns, unknown_routes
from outloop.engine.train.data.supports import joined_supports

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBatch(TokenColumns):
    """Rows and what is known of each of their tokens; built once for a take, equal on all ranks.

    A column that is not known of any row is None.
    """

    episode_ids: tuple[str, ...]
    """[R]; the branches of an episode share one."""
    group_ids: tuple[str, ...]
    """[R]; empty for SFT."""
    branches: tuple[int, ...]
    """[R]: index in `Trajectory.branches()`."""
    is_imitated: tuple[bool, ...]
    """[R]: trained by cross-entropy, weighed by the advantages."""
    starts: Int64
    """[R + 1]: row r is tokens starts[r] to starts[r + 1]."""

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> TrainBatch:
        """The rows of `samples`, in their order.

        Raises:
            ValueError: some have a column that others lack.
        """
        columns = {name: _joined([getattr(s, name) for s in samples], name) for name in _COLUMNS}
        lengths = [sample.num_tokens for sample in samples]
        return cls(
            episode_ids=tuple(sample.episode_id for sample in samples),
            group_ids=tuple(sample.group_id for sample in samples),
            branches=tuple(sample.branch for sample in samples),
            is_imitated=tuple(sample.is_imitated for sample in samples),
            starts=np.cumsum([0, *lengths], dtype=np.int64),
            routed_experts=_joined_routes([s.routed_experts for s in samples], lengths),
            supports=joined_supports([s.supports for s in samples], lengths),
            **columns,
        )

    def __len__(self) -> int:
        return len(self.episode_ids)

    def __iter__(self) -> Iterator[Sample]:
        return map(self.row, range(len(self)))

    @property
    def lengths(self) -> list[int]:
        """[R]: tokens of each row."""
        lengths: list[int] = np.diff(self.starts).tolist()
        return lengths

    @property
    def num_trained_tokens(self) -> list[int]:
        """[R]: tokens of each row with loss."""
        before = np.concatenate(([0], np.cumsum(self.loss_mask)))
        counts: list[int] = np.diff(before[self.starts]).tolist()
        return counts

    def row(self, index: int) -> Sample:
        """One row; its arrays are views."""
        where = slice(self.starts[index], self.starts[index + 1])
        return Sample(
            episode_id=self.episode_ids[index],
            group_id=self.group_ids[index],
            branch=self.branches[index],
            is_imitated=self.is_imitated[index],
            **self._columns(where),
        )

    def select(self, rows: Sequence[int]) -> TrainBatch:
        """Some rows, copied, in the order given."""
        return TrainBatch.of([self.row(index) for index in rows]) if rows else self._empty()

    def with_columns(self, **columns: Float32 | Int32) -> TrainBatch:
        """The same rows with other columns [T], or [T, K] of the teacher's tokens."""
        for name, values in columns.items():
            if values.shape[: 2 if name not in _WIDE else 1] != self.token_ids.shape:
                raise ValueError(f"{name} has shape {values.shape}; {self.token_ids.shape} is due")
        changed: dict[str, Any] = dict(columns)
        return dataclasses.replace(self, **changed)

    def encode(self) -> bytes:
        """For another rank or a file: no object is pickled."""
        return msgspec.msgpack.encode(self, enc_hook=plain)

    @classmethod
    def decode(cls, data: bytes) -> TrainBatch:
        """What `encode` gave; arrays are read-only.

        Raises:
            msgspec.DecodeError: it is something else.
        """
        return msgspec.msgpack.decode(data, type=cls, dec_hook=restored)

    def _empty(self) -> TrainBatch:
        """No rows, and the same columns."""
        return TrainBatch(
            episode_ids=(),
            group_ids=(),
            branches=(),
            is_imitated=(),
            starts=np.zeros(1, np.int64),
            **self._columns(slice(0)),
        )

    def _columns(self, where: slice) -> dict[str, Any]:
        """What is known of some tokens, as views."""
        columns = {name: getattr(self, name) for name in _ALL_COLUMNS}
        return {name: None if it is None else it[where] for name, it in columns.items()}


_COLUMNS: dict[str, Any] = {
    "token_ids": np.int32,
    "loss_mask": np.bool_,
    "behavior_logprobs": np.float32,
    "policy_versions": np.int32,
    "temperature": np.float32,
    "turns": np.int32,
    "advantages": np.float32,
    "values": np.float32,
    "returns": np.float32,
    "proximal_logprobs": np.float32,
    "reference_logprobs": np.float32,
    "correction": np.float32,
    "teacher_logprobs": np.float32,
    "teacher_top_ids": np.int32,
    "teacher_top_logprobs": np.float32,
}
_ALL_COLUMNS = (*_COLUMNS, "routed_experts", "supports")
_WIDE = ("teacher_top_ids", "teacher_top_logprobs")
"""Columns with several numbers a token."""
_ALWAYS_KNOWN = (
    *("token_ids", "loss_mask", "policy_versions", "temperature", "turns", "advantages"),
)


def _joined(parts: Sequence[Any], name: str) -> Any:
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) and known:
        raise ValueError(f"{len(parts) - len(known)} of {len(parts)} rows have no {name}")
    if known:
        return np.concatenate(known).astype(_COLUMNS[name], copy=False)
    return np.zeros(0, _COLUMNS[name]) if name in _ALWAYS_KNOWN else None


def _joined_routes(parts: Sequence[Routes | None], lengths: Sequence[int]) -> Routes | None:
    """Where tokens were sent; of tokens without, that it is not known."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    size = known[0].dtype.itemsize
    whole: Routes = np.concatenate(
        [
            unknown_routes(length, size) if part is None else part
            for part, length in zip(parts, lengths, strict=True)
        ]
    )
    return whole


def plain(value: Any) -> Any:
    """An array or a path as msgpack knows it, for `msgspec`'s enc_hook."""
    match value:
        case np.ndarray():
            return value.dtype.str, value.shape, value.tobytes()
        case Path():
            return str(value)
    raise NotImplementedError(type(value).__name__)


def restored(kind: Any, value: Any) -> Any:
    """What `plain` was given, for `msgspec`'s dec_hook; arrays are read-only."""
    if kind is Path:
        return Path(value)
    dtype, shape, data = value
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape)
