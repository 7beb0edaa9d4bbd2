"""The records that parts exchange.

A record is frozen, complete, and checked when it is built. A later stage makes a new type; it never
fills in a field.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

import msgspec
import numpy as np

from outloop.buffer.errors import RecordError
from outloop.buffer.foreign_text import storable
from outloop.buffer.routed_experts import RoutedExperts
from outloop.buffer.sampling_support import SamplingSupport

Purpose = Literal["train", "eval", "sft"]
"""`train`: may be trained by RL. `eval`: never trained. `sft`: messages only, trained by SFT."""
Outcome = Literal["completed", "truncated", "failed", "aborted"]
FailureKind = Literal["agent", "environment", "infrastructure"]
FinishReason = Literal["stop", "length", "tool_calls", "abort"]
DropReason = Literal["stale", "no_signal", "failed", "overlong", "malformed", "filtered"]
# Not npt.NDArray: with numpy 2.5 on Python 3.12 it is an alias, and msgspec passes its decoder
# a type that is not equal to the declared one.
Int32 = np.ndarray[tuple[Any, ...], np.dtype[np.int32]]
Float32 = np.ndarray[tuple[Any, ...], np.dtype[np.float32]]
MAX_REWARD = 1e12
"""Of a reward, a component or a part of one, above zero or below it."""
MAX_ANSWER_CHARS = 1000
SOURCE = "source"
"""Key of an episode's metadata: which of several lists of tasks its task is from."""
TEACHER_CONTEXT = "teacher_context"
"""Key of an episode's metadata: text that a teacher sees and the policy does not."""
INT32, FLOAT32 = np.dtype("<i4"), np.dtype("<f4")
"""Types of a turn's arrays, in memory and in their stored bytes."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The sampling parameters in force for one turn; nothing is left to a server's default."""

    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    """-1: no limit."""
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    seed: int | None = None
    constraint: str = ""
    """Grammar that restricted the sampled ids, as `json_schema:DIGEST`; empty: none."""

    @property
    def is_plain(self) -> bool:
        """True if behavior_logprobs are log_softmax(logits / T) over the whole vocabulary."""
        return self._scales_alone and not self._cuts

    @property
    def has_support(self) -> bool:
        """True if logprobs are log_softmax(logits / T) over some ids: what top-p, top-k, min-p or a
        grammar left of the vocabulary."""
        return self._scales_alone and self._cuts and self.top_k != 1

    @property
    def _scales_alone(self) -> bool:
        """True if logits are divided by a temperature and not changed otherwise."""
        return (
            self.temperature > 0.0
            and self.frequency_penalty == 0.0
            and self.presence_penalty == 0.0
            and self.repetition_penalty == 1.0
        )

    @property
    def _cuts(self) -> bool:
        return self.top_p != 1.0 or self.top_k > 0 or self.min_p != 0.0 or bool(self.constraint)


class VersionSpan(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """Output tokens [start, end) of a turn were sampled under `policy_version`."""

    policy_version: int
    start: int
    end: int


def _least(array: Any) -> Any:
    """The least item; False of booleans. For the few hundred items of a turn this takes less than
    half the time of a ufunc's reduction."""
    return array.item(array.argmin())


def _make_plain(turn: Turn, name: str, array: Any, dtype: np.dtype[Any]) -> Any:
    """Replace an array of the turn by a contiguous one of this dtype, as its bytes are stored."""
    if array.dtype is not dtype or not array.flags.c_contiguous:
        with np.errstate(over="ignore"):
            array = np.ascontiguousarray(array, dtype)
        msgspec.structs.force_setattr(turn, name, array)
    return array


class Turn(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One model call and its answer, as ids.

    Guarantees: `prompt_ids` are the ids the server was given after the parent's ids (all of them
    when `parent_turn_id` is None), `output_ids` the ids it sampled, in order, the token that
    completes a stop included. A branch is the path root -> leaf; its ids are the concatenation of
    prompt_ids + output_ids along it.

    Example: parent None, prompt_ids [5, 6], output_ids [7, 8], behavior_logprobs [-0.1, -0.2],
    version_spans (0, 0, 2), loss_spans ((0, 2),): two trained tokens sampled by version 0.
    """

    turn_id: str
    episode_id: str
    parent_turn_id: str | None
    choice_index: int = 0
    prompt_ids: Int32
    """[P] int32."""
    output_ids: Int32
    """[O] int32."""
    behavior_logprobs: Float32 | None
    """[O] float32, or None for SFT turns, which no policy sampled; with `support`, over its ids."""
    version_spans: tuple[VersionSpan, ...]
    """Cover [0, O) without gaps for sampled turns; empty for SFT turns."""
    loss_spans: tuple[tuple[int, int], ...]
    """Half-open ranges of output tokens that may be trained (6.1 rules 1 and 2)."""
    mask_reason: str = ""
    """Why tokens are outside loss_spans: behavior_unknown, support_unknown, after_stop, ..."""
    sampling: Sampling
    finish_reason: FinishReason
    branch_cause: str = "root"
    """root, extension, or why this request started a new branch."""
    retry_key: str | None = None
    started_at: float
    """Unix seconds."""
    finished_at: float
    routed_experts: RoutedExperts | None = None
    """Where the tokens before each of prompt_ids and output_ids were sent, as its page says; None:
    not known, or the model has no experts."""
    support: SamplingSupport | None = None
    """Among which ids each of output_ids was sampled; None: the whole vocabulary, or not known."""

    def __post_init__(self) -> None:
        for name, ids in (("prompt_ids", self.prompt_ids), ("output_ids", self.output_ids)):
            if ids.dtype != INT32 or ids.ndim != 1 or (len(ids) and _least(ids) < 0):
                raise RecordError(f"turn {self.turn_id}: {name} must be non-negative int32 [T]")
            _make_plain(self, name, ids, INT32)
        logprobs, num_output = self.behavior_logprobs, len(self.output_ids)
        if logprobs is not None:
            logprobs = _make_plain(self, "behavior_logprobs", logprobs, FLOAT32)
            if logprobs.shape != (num_output,):
                raise RecordError(
                    f"turn {self.turn_id}: len(behavior_logprobs)={len(logprobs)} but "
                    f"len(output_ids)={num_output}; they must be equal, and behavior_logprobs "
                    "float32 [O]. Record both from one answer."
                )
            if num_output and not _least(np.isfinite(logprobs)):
                raise RecordError(f"turn {self.turn_id}: behavior_logprobs holds NaN or infinity")
            position = 0
            for span in self.version_spans:
                if span.start != position or span.end < position:
                    raise RecordError(
                        f"turn {self.turn_id}: version_spans={self.version_spans} leave a gap"
                    )
                position = span.end
            if position != num_output:
                raise RecordError(
                    f"turn {self.turn_id}: version_spans end at {position}, "
                    f"len(output_ids)={num_output}"
                )
        if self.routed_experts is not None:
            self._check_rows(self.routed_experts.num_rows)
        self._check_loss_spans()
        if self.support is not None:
            self._check_support(self.support)

    def _check_loss_spans(self) -> None:
        num_output = len(self.output_ids)
        for start, end in self.loss_spans:
            if not 0 <= start <= end <= num_output:
                raise RecordError(
                    f"turn {self.turn_id}: loss_spans={self.loss_spans} leave [0, {num_output}]"
                )

    def _check_rows(self, num_rows: int) -> None:
        due = len(self.prompt_ids) + len(self.output_ids) - (self.parent_turn_id is None)
        if num_rows != due:
            raise RecordError(
                f"turn {self.turn_id}: routed_experts has {num_rows} rows; {due} are due, one "
                "before each id that has one before it"
            )

    def _check_support(self, support: SamplingSupport) -> None:
        counts = support.counts
        if len(counts) != len(self.output_ids) or not self.sampling.has_support:
            raise RecordError(
                f"turn {self.turn_id}: support of {len(counts)} tokens for {len(self.output_ids)} "
                f"output_ids sampled with {self.sampling}; it is for each token of a distribution "
                "cut by top_p, top_k, min_p or a grammar"
            )
        owner = np.repeat(np.arange(len(counts)), counts)
        is_own = support.ids == self.output_ids[owner]
        found = np.bincount(owner[is_own], minlength=len(counts))
        if (found != (counts > 0)).any():
            raise RecordError(
                f"turn {self.turn_id}: support lacks, or repeats, an id that was sampled"
            )
        for start, end in self.loss_spans:
            if not counts[start:end].all():
                raise RecordError(
                    f"turn {self.turn_id}: loss_spans={self.loss_spans} hold a token whose support "
                    "is not known"
                )

    @property
    def is_behavior_known(self) -> bool:
        """True if the distribution that its trainable tokens were sampled from can be rebuilt."""
        return self.sampling.is_plain or self.support is not None

    @property
    def trained_version_bounds(self) -> tuple[int | None, int | None]:
        """(oldest version among the trained tokens, newest among the output tokens)."""
        oldest = [
            span.policy_version
            for span in self.attended_spans
            if any(max(span.start, start) < min(span.end, end) for start, end in self.loss_spans)
        ]
        newest = [span.policy_version for span in self.version_spans if span.end > span.start]
        return (min(oldest) if oldest else None, max(newest) if newest else None)

    @property
    def attended_spans(self) -> tuple[VersionSpan, ...]:
        """version_spans with each token under the oldest version it attended to.

        A turn that goes on in place across a publish keeps keys and values of the version before,
        so its later tokens are of no policy that ever existed as a whole; the oldest bounds them.
        """
        spans: list[VersionSpan] = []
        oldest: int | None = None
        for span in self.version_spans:
            oldest = span.policy_version if oldest is None else min(oldest, span.policy_version)
            spans.append(VersionSpan(policy_version=oldest, start=span.start, end=span.end))
        return tuple(spans)


_ARRAYS = ("prompt_ids", "output_ids", "behavior_logprobs", "routed_experts", "support")


def facts_of(turn: Turn) -> dict[str, Any]:
    """All of a turn but its arrays, as JSON has it."""
    names = (name for name in turn.__struct_fields__ if name not in _ARRAYS)
    return {name: msgspec.to_builtins(getattr(turn, name)) for name in names}


def turn_with(
    facts: Mapping[str, Any],
    *,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    behavior_logprobs: Sequence[float] | None,
) -> Turn:
    """The turn with these arrays of which `facts_of` made `facts`; other keys are left out.

    Raises:
        RecordError, msgspec.ValidationError: they do not make a turn.
    """
    logprobs = None if behavior_logprobs is None else np.array(behavior_logprobs, FLOAT32)
    arrays = {
        "prompt_ids": np.array(prompt_ids, INT32),
        "output_ids": np.array(output_ids, INT32),
        "behavior_logprobs": logprobs,
    }
    return msgspec.convert({**facts, **arrays}, Turn, dec_hook=lambda _, array: array)


class TokenReward(msgspec.Struct, frozen=True, gc=False):
    """What the output tokens [start, end) of a turn earned together."""

    turn_id: str
    start: int
    end: int
    value: float


class Reward(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A verifier's score: `value` is the episode's; parts of the episode may have their own.

    What parts earned is not contained in `value`: the return of an episode is the sum of all.
    """

    value: float
    components: dict[str, float] = {}
    """Parts of the value, by name."""
    turns: dict[str, float] = {}
    """Scores of single turns, by turn_id."""
    branches: dict[str, float] = {}
    """Scores of single branches, by the turn_id of their last turn."""
    tokens: tuple[TokenReward, ...] = ()
    """What spans of output tokens earned; those of a turn do not overlap."""
    answer: str = ""
    """What the episode answered, as its verifier reads it; equal answers count together in the
    majority vote of an evaluation. Empty: the verifier does not say."""

    def __post_init__(self) -> None:
        if type(self.value) is not float or not -MAX_REWARD <= self.value <= MAX_REWARD:
            msgspec.structs.force_setattr(self, "value", _number("value", self.value))
        if not self.answer.isascii():
            msgspec.structs.force_setattr(self, "answer", storable(self.answer))
        if len(self.answer) > MAX_ANSWER_CHARS:
            raise RecordError(
                f"answer has {len(self.answer)} characters; at most {MAX_ANSWER_CHARS} are "
                "allowed: give the final answer, or a hash of it"
            )
        if not (self.components or self.has_parts):
            return
        for name in ("components", "turns", "branches"):
            numbers = {
                storable(part): _number(f"{name}.{part}", number)
                for part, number in getattr(self, name).items()
            }
            msgspec.structs.force_setattr(self, name, numbers)
        msgspec.structs.force_setattr(self, "tokens", tuple(map(_plain_span, self.tokens)))
        _check_spans(self.tokens)

    @property
    def has_parts(self) -> bool:
        """True if turns, branches or tokens have scores of their own."""
        return bool(self.turns or self.branches or self.tokens)


def _plain_span(span: TokenReward) -> TokenReward:
    value = _number(f"tokens.{span.turn_id}", span.value)
    return span if value is span.value else msgspec.structs.replace(span, value=value)


def _check_spans(spans: tuple[TokenReward, ...]) -> None:
    ends: dict[str, tuple[int, int]] = {}
    for span in sorted(spans, key=lambda span: (span.turn_id, span.start)):
        if not 0 <= span.start < span.end:
            raise RecordError(
                f"reward tokens: start={span.start}, end={span.end} of turn {span.turn_id}; "
                "0 <= start < end is allowed, counted in the turn's output tokens"
            )
        before = ends.get(span.turn_id, (0, 0))
        if span.start < before[1]:
            raise RecordError(
                f"reward tokens: spans {before[0]}..{before[1]} and {span.start}..{span.end} of "
                f"turn {span.turn_id} overlap; give each token one score"
            )
        ends[span.turn_id] = (span.start, span.end)


def _number(name: str, number: Any) -> float:
    """The number as a float; scalars of array libraries, Decimal and Fraction are numbers too.

    Raises:
        RecordError: it is none, not finite, or beyond MAX_REWARD.
    """
    # A numpy.float64 is a float, which msgspec does not encode.
    given = number.item() if getattr(number, "shape", None) == () else number
    if number is np.ma.masked or isinstance(number, np.timedelta64):
        given = None  # numpy gives 0.0 for a value that is masked out, and counts of any unit.
    if isinstance(given, bool) or not isinstance(given, numbers.Real | Decimal):
        raise RecordError(
            f"reward {name}={number!r} is a {type(number).__name__}; "
            "a finite number is allowed. Return a float from the verifier."
        )
    try:
        plain = float(given)
    except (ValueError, OverflowError):  # a signalling NaN; an int or a fraction above 1e308
        number = plain = math.nan if isinstance(given, Decimal) else math.inf
    if not math.isfinite(plain):
        raise RecordError(
            f"reward {name}={number!r}; a finite number is allowed. "
            "Check the verifier for a division by zero or an empty mean."
        )
    if abs(plain) > MAX_REWARD:
        raise RecordError(
            f"reward {name}={number!r}; numbers from -{MAX_REWARD:g} to {MAX_REWARD:g} are "
            "allowed: the statistics of a group with a larger one overflow, and its others teach "
            "nothing. Check the verifier's unit, or bound what it gives"
        )
    return given if type(given) is float else plain


class Refusals(msgspec.Struct, frozen=True, kw_only=True):
    """Model calls of an episode that the router refused and no repetition would have mended."""

    counts: dict[str, int] = {}
    """By the code of the refusal."""
    last: str = ""
    """The sentence of the last one, at most 500 characters."""


NO_REFUSALS = Refusals()


class Episode(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One closed attempt at a task, without its turns."""

    episode_id: str
    task_id: str
    group_id: str | None
    """None for eval and SFT episodes, which belong to no group."""
    attempt: int
    purpose: Purpose
    outcome: Outcome
    failure_kind: FailureKind | None
    reward: Reward | None
    """None only for eval/SFT episodes without a score and for infrastructure failures."""
    metadata: dict[str, str]
    opened_at: float
    closed_at: float
    refusals: Refusals = NO_REFUSALS


class Trajectory(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A closed episode with all its turns, in the order they were recorded."""

    episode: Episode
    turns: tuple[Turn, ...]

    def branches(self) -> tuple[tuple[Turn, ...], ...]:
        """Every root-to-leaf path, leaves in recorded order; () without turns."""
        by_id = {turn.turn_id: turn for turn in self.turns}
        parents = {turn.parent_turn_id for turn in self.turns}
        paths: list[tuple[Turn, ...]] = []
        for leaf in self.turns:
            if leaf.turn_id in parents:
                continue
            path = [leaf]
            while path[-1].parent_turn_id is not None:
                path.append(by_id[path[-1].parent_turn_id])
            paths.append(tuple(reversed(path)))
        return tuple(paths)


def check_turns(episode_id: str, turns: Sequence[Turn]) -> None:
    """Refuse turns that do not make one episode.

    Raises:
        RecordError: a turn is of another episode, or its parent does not come before it.
    """
    known: set[str] = set()
    for turn in turns:
        parent = turn.parent_turn_id
        if turn.episode_id != episode_id or (parent is not None and parent not in known):
            raise RecordError(
                f"episode_id={episode_id}: turn {turn.turn_id} has episode_id={turn.episode_id}, "
                f"parent_turn_id={parent}; its own episode and an earlier turn are allowed"
            )
        known.add(turn.turn_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A sealed group: every scored episode of one task slot."""

    group_id: str
    slot: int
    """Position in the run's task order; admission order."""
    task_id: str
    group_size: int
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """The right of the trainer with `fence` to train one group, until `deadline`."""

    group: Group
    fence: int
    deadline: float
    """Unix seconds."""
    max_age: int | None = None
    """How many publishes old its tokens may be, as it was when the group was taken; None: as the
    settings say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointMark:
    """The groups in a checkpoint's weights; acknowledged at once when it is complete on disk."""

    fence: int
    group_ids: tuple[str, ...]
    """Every group trained since the previous mark."""
    next_slot: int
    """Slots below it that are in no mark must be played again."""
    policy_version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One problem to solve, as JSON-able data; `payload` is what the rollout function reads."""

    task_id: str
    payload: dict[str, object]
    priority: int = 0
    """A higher one is played earlier, by up to buffer.priority_window slots. Set when tasks are
    registered; 0 in the task of a claim."""
    source: str = ""
    """Of an evaluation task: the list of env.tasks that it was held out from, where there are
    several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """An attempt to play, given to a runner."""

    task: Task
    purpose: Purpose
    group_id: str | None
    attempt: int
    deadline_s: float
    sampling: dict[str, float] | None = None
    """Only eval claims carry their own sampling."""
    eval_name: str = ""
    """Which evaluation this belongs to: `{version}:{name}`; empty for train."""
    resumes: str | None = None
    """A lost episode: its recorded turns answer this attempt's requests until these differ."""
    source: str = ""
    """Which of several lists of tasks it is from; empty where there is one, and for eval."""


class Opening(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is fixed when an episode opens."""

    episode_id: str
    task_id: str
    group_id: str | None
    attempt: int
    purpose: Purpose
    deadline_at: float
    """Unix seconds; the episode key is valid until then."""
    sampling: dict[str, float] | None = None
    """Only eval episodes carry their own sampling."""
    eval_name: str = ""
    metadata: dict[str, str] = {}
    opened_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenEpisode:
    """An episode as it is in the buffer now: its opening, turns so far, and how it ended."""

    opening: Opening
    turns: tuple[Turn, ...]
    is_closed: bool
    outcome: Outcome | None
    reward: Reward | None
    failure_kind: FailureKind | None = None
    error: str = ""
    """What went wrong, as the runner reported it."""
    output: str = ""
    """The end of what an agent program wrote."""
    refusals: Refusals = NO_REFUSALS
    resumes: str | None = None
    """The lost episode that this one resumes."""
    recorded: tuple[Turn, ...] = ()
    """Turns of the lost episodes that this one has not replayed yet: parents before children, those
    of the newest episode first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimResult:
    """What a runner may play now; `reason` says why `claims` is empty."""

    claims: tuple[Claim, ...]
    reason: str
    """Empty, or: admission, not_ready, finished, no_tasks, paused."""
    retry_after_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CloseResult:
    """What closing an episode did."""

    counted: bool
    """False: the episode was too late for its group, or its attempt will be replaced."""
    sealed_group: str | None
    """The group that this close completed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Libraries:
    """Releases that a process computes and communicates with on GPUs; empty: none, or not known."""

    torch: str = ""
    cuda: str = ""
    """The runtime that torch was built for."""
    nccl: str = ""

    def __str__(self) -> str:
        named = {"NCCL": self.nccl, "torch": self.torch, "CUDA": self.cuda}
        return ", ".join(f"{name} {release}" for name, release in named.items() if release)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerEntry:
    """A server in the run's registry."""

    server_id: str
    url: str
    kind: str
    policy_version: int | None
    """None: it holds no published weights."""
    is_quarantined: bool
    gpus: tuple[str, ...] = ()
    """Of its tensor-parallel ranks, as CUDA_VISIBLE_DEVICES names them; empty: not known."""
    released: tuple[str, ...] = ()
    """What of its memory it was asked to give to a trainer on the same GPUs, by SGLang's tags."""
    libraries: Libraries = Libraries()
    """As the server told when it registered."""
    is_frozen: bool = False
    """It holds an earlier version, which no publish replaces, and serves that one by name alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyState:
    """The announced version, the version that every serving server holds, and the servers."""

    announced_version: int | None
    acknowledged_version: int | None
    servers: tuple[ServerEntry, ...]
    """Those of earlier versions too."""
    run_state: Literal["running", "finished", "failed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalEpisode:
    """A scored episode of an evaluation."""

    attempt: int
    task_id: str
    source: str
    """The list of env.tasks that the task was held out from, where there are several."""
    reward: Reward
    outcome: Outcome
    num_turns: int
    num_tokens: int
    """Sampled, over all its turns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalProgress:
    """How far a requested evaluation is; rewards of its closed episodes."""

    num_done: int
    num_total: int
    rewards: tuple[float, ...]
    num_in_flight: int = 0
    """Attempts of the run that are in flight, those of training included."""
    oldest_version: int | None = None
    newest_version: int | None = None
    """The first and the latest that sampled one of its tokens; None before the first token."""
    num_mixed: int = 0
    """Closed episodes with tokens of later versions than the one that is evaluated."""
