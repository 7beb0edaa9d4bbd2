"""Trajectories to token rows.

A row is the exact concatenation of what the server was given and sampled along one branch. Every
trainable token of a trajectory is trained in exactly one row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from outloop.buffer.errors import RecordError
from outloop.buffer.records import Float32, Int32, Trajectory, Turn
from outloop.buffer.routed_experts import RoutingShape
from outloop.engine.train.data.supports import Supports

Bool = npt.NDArray[np.bool_]
Routes = np.ndarray[tuple[Any, ...], np.dtype[np.void]]
"""A token's experts in every layer, as one item."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenColumns:
    """What is known of T tokens.

    Context tokens have loss_mask False, policy_versions -1, temperature 1 and zeros elsewhere.
    """

    token_ids: Int32
    """[T] int32."""
    loss_mask: Bool
    """[T] bool: True = trained."""
    behavior_logprobs: Float32 | None
    """[T] float32, log_softmax(logits / temperature) when the token was sampled, over its support;
    None for SFT."""
    policy_versions: Int32
    """[T] int32: the oldest version that the token attended to."""
    temperature: Float32
    """[T] float32."""
    turns: Int32
    """[T] int32: place in `Trajectory.turns` of the turn whose output the token is in this row,
    trained or not; -1 elsewhere."""
    advantages: Float32
    """[T] float32: an episode's scalar reward gives all its tokens one number. Zeros until the
    step's rewards are compared."""
    values: Float32 | None = None
    """[T] float32, what the critic expected before the token; None without one."""
    returns: Float32 | None = None
    """[T] float32, what the critic should have expected; None without one."""
    proximal_logprobs: Float32 | None = None
    """[T] float32, of the weights before the take's first update; None: behavior_logprobs."""
    reference_logprobs: Float32 | None = None
    """[T] float32, of the frozen reference; None without a KL term."""
    correction: Float32 | None = None
    """[T] float32, importance weight from behavior to proximal, 0: masked; None: 1."""
    teacher_logprobs: Float32 | None = None
    """[T] float32, of the teacher; None without one."""
    teacher_top_ids: Int32 | None = None
    """[T, K] int32, the teacher's most probable tokens; None: not asked for."""
    teacher_top_logprobs: Float32 | None = None
    """[T, K] float32, theirs under the teacher; -inf: it named fewer."""
    routed_experts: Routes | None = None
    """[T], each the bytes of [layers, top_k] of RoutingShape.dtype: where a server sent the token;
    all bits set: not known. None: of no token."""
    supports: Supports | None = None
    """[T]: among which ids trained tokens were sampled; None: all of them among the whole
    vocabulary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample(TokenColumns):
    """One branch as a token row; T is its length. A `TrainBatch` is the columns of many."""

    episode_id: str
    group_id: str
    """Empty for SFT."""
    branch: int
    """Index in `Trajectory.branches()`."""
    is_imitated: bool = False
    """Its trained tokens are trained by cross-entropy, weighed by their advantages."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def num_trained_tokens(self) -> int:
        """Tokens with loss."""
        return int(self.loss_mask.sum())

    @property
    def advantage(self) -> float:
        """Mean over its trained tokens: where the reward is a scalar, each token's."""
        return float(self.advantages[self.loss_mask].mean(dtype=np.float64))

    @property
    def oldest_version(self) -> int:
        """The oldest policy_version among trained tokens."""
        return int(self.policy_versions[self.loss_mask].min())


def prompt_sample(ids: Sequence[int]) -> Sample:
    """A row whose logprobs are asked for at every id but the first; never trained."""
    num = len(ids)
    return Sample(
        episode_id="",
        group_id="",
        branch=0,
        token_ids=np.asarray(ids, np.int32),
        loss_mask=np.arange(num) > 0,
        behavior_logprobs=None,
        policy_versions=np.full(num, -1, np.int32),
        temperature=np.ones(num, np.float32),
        turns=np.full(num, -1, np.int32),
        advantages=np.zeros(num, np.float32),
    )


def padded(row: Sample, *, before: int = 0, after: int = 0) -> Sample:
    """The row with context tokens of id 0 in front of it and behind it, without its supports."""
    filled = {"temperature": 1.0, "policy_versions": -1, "turns": -1}
    columns: dict[str, Any] = {}
    for item in dataclasses.fields(row):
        column = getattr(row, item.name)
        if not isinstance(column, np.ndarray):
            continue
        ends = [
            unknown_routes(num, column.dtype.itemsize)
            if item.name == "routed_experts"
            else np.full((num, *column.shape[1:]), filled.get(item.name, 0), column.dtype)
            for num in (before, after)
        ]
        columns[item.name] = np.concatenate([ends[0], column, ends[1]])
    return replace(row, supports=None, **columns)


def with_one_more(row: Sample) -> Sample:
    """The row with a token behind it whose value is asked for; which token does not matter."""
    longer = padded(row, after=1)
    longer.loss_mask[-1] = True
    return longer


def build_samples(
    trajectory: Trajectory, *, routing: RoutingShape | None = None, has_supports: bool = True
) -> tuple[Sample, ...]:
    """One sample for every branch that owns trained tokens, without advantages.

    A turn that several branches share is trained in the first of them and is context in the
    others. Tokens whose distribution cannot be rebuilt, because their turn was sampled with a
    penalised distribution, at temperature 0, or among ids that are not known, are context
    everywhere.

    Args:
        routing: of the model, to have where tokens were sent; None: nobody wants to know.
        has_supports: False: tokens that were sampled among some ids are context too.

    Raises:
        RecordError: a turn without behavior_logprobs in an episode that is not SFT data.
    """
    episode = trajectory.episode
    if episode.purpose == "eval":
        raise RecordError(
            f"episode {episode.episode_id} has purpose='eval'; train and sft are allowed here"
        )
    places = {turn.turn_id: place for place, turn in enumerate(trajectory.turns)}
    owned: set[str] = set()
    samples: list[Sample] = []
    for index, branch in enumerate(trajectory.branches()):
        new = {turn.turn_id: places[turn.turn_id] for turn in branch if turn.turn_id not in owned}
        owned |= new.keys()
        sample = _row(trajectory, index, branch, new, has_supports=has_supports)
        if routing is not None:
            sample = replace(sample, routed_experts=_routes(branch, routing))
        if sample.loss_mask.any():
            samples.append(sample)
    return tuple(samples)


def _row(
    trajectory: Trajectory,
    index: int,
    branch: tuple[Turn, ...],
    trained_turns: Mapping[str, int],
    *,
    has_supports: bool,
) -> Sample:
    is_sft = trajectory.episode.purpose == "sft"
    num_tokens = sum(len(turn.prompt_ids) + len(turn.output_ids) for turn in branch)
    token_ids = np.zeros(num_tokens, np.int32)
    loss_mask = np.zeros(num_tokens, np.bool_)
    behavior_logprobs = np.zeros(num_tokens, np.float32)
    policy_versions = np.full(num_tokens, -1, np.int32)
    temperature = np.ones(num_tokens, np.float32)
    turns = np.full(num_tokens, -1, np.int32)
    position = 0
    for turn in branch:
        start = position + len(turn.prompt_ids)
        end = start + len(turn.output_ids)
        token_ids[position:start] = turn.prompt_ids
        token_ids[start:end] = turn.output_ids
        position = end
        if turn.turn_id not in trained_turns:
            continue
        turns[start:end] = trained_turns[turn.turn_id]
        if turn.support is not None and not has_supports:
            continue
        for low, high in _trainable_spans(turn, is_sft=is_sft):
            loss_mask[start + low : start + high] = True
        if is_sft:
            continue
        assert turn.behavior_logprobs is not None
        behavior_logprobs[start:end] = turn.behavior_logprobs
        temperature[start:end] = turn.sampling.temperature or 1.0
        for span in turn.attended_spans:
            policy_versions[start + span.start : start + span.end] = span.policy_version
    # Nothing predicts the first token of a row.
    loss_mask[:1] = False
    if not is_sft:
        behavior_logprobs[~loss_mask] = 0.0
        policy_versions[~loss_mask] = -1
        temperature[~loss_mask] = 1.0
    return Sample(
        episode_id=trajectory.episode.episode_id,
        group_id=trajectory.episode.group_id or "",
        branch=index,
        token_ids=token_ids,
        loss_mask=loss_mask,
        behavior_logprobs=None if is_sft else behavior_logprobs,
        policy_versions=policy_versions,
        temperature=temperature,
        turns=turns,
        advantages=np.zeros(num_tokens, np.float32),
        supports=None if is_sft else _supports(branch, trained_turns, loss_mask),
    )


def _supports(
    branch: tuple[Turn, ...], trained_turns: Mapping[str, int], loss_mask: Bool
) -> Supports | None:
    """Among which ids the trained tokens of a branch were sampled, if any was among some."""
    counts = np.zeros(len(loss_mask), np.int64)
    ids: list[Int32] = []
    position = 0
    for turn in branch:
        start = position + len(turn.prompt_ids)
        position = start + len(turn.output_ids)
        if turn.support is None or turn.turn_id not in trained_turns:
            continue
        own = turn.support.counts
        is_trained = loss_mask[start:position]
        counts[start:position] = np.where(is_trained, own, 0)
        ids.append(turn.support.ids[np.repeat(is_trained, own)])
    return Supports.of(counts, np.concatenate(ids)) if counts.any() else None


def unknown_routes(num_tokens: int, row_bytes: int) -> Routes:
    """Of tokens [num_tokens] of which it is not known where they were sent."""
    return np.full(num_tokens * row_bytes, 0xFF, np.uint8).view(f"V{row_bytes}")


def _routes(branch: tuple[Turn, ...], routing: RoutingShape) -> Routes:
    """Where the tokens of a branch were sent, but for the last, which no server computed.

    A turn's rows begin with the token before its first id: the last of its parent.
    """
    num_tokens = sum(len(turn.prompt_ids) + len(turn.output_ids) for turn in branch)
    found = unknown_routes(num_tokens, routing.row_bytes)
    end = 0
    for turn in branch:
        start, end = max(0, end - 1), end + len(turn.prompt_ids) + len(turn.output_ids)
        known = turn.routed_experts
        if known is not None and known.shape == routing:
            found[start : end - 1] = np.frombuffer(known.data, found.dtype)
    return found


def _trainable_spans(turn: Turn, *, is_sft: bool) -> Iterator[tuple[int, int]]:
    if not is_sft:
        if turn.behavior_logprobs is None:
            raise RecordError(
                f"turn {turn.turn_id}: behavior_logprobs=None; only episodes with purpose='sft' "
                "may lack them. Record logprobs with the ids, or send the episode as SFT data."
            )
        if not turn.is_behavior_known:
            return
    yield from turn.loss_spans


def is_cut(trajectory: Trajectory) -> bool:
    """True if the last turn of any branch was cut at its token limit."""
    return any(branch[-1].finish_reason == "length" for branch in trajectory.branches())


def is_truncated(trajectory: Trajectory) -> bool:
    """True if any limit ended the episode, or an answer that nothing follows (6.1 rule 16)."""
    return trajectory.episode.outcome == "truncated" or is_cut(trajectory)


def oldest_trained_version(trajectory: Trajectory) -> int | None:
    """The oldest policy_version that sampled a trainable token; None when there is none."""
    bounds = (t.trained_version_bounds[0] for t in trajectory.turns if t.is_behavior_known)
    versions = [version for version in bounds if version is not None]
    return min(versions, default=None)
