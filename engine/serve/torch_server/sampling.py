"""Sampling parameters of a request, and sampling one token for every row of a pass.

What is sampled for a row depends on its logits, its parameters, its seed and how many tokens it has
sampled, never on the other rows.

Shape letters: B rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0.0,),
    "presence_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "min_new_tokens": (0,),
    "stop_regex": (None, [], ""),
    "ebnf": (None,),
    "structural_tag": (None,),
    "logit_bias": (None, {}),
    "custom_params": (None, {}),
    "beam_width": (None, 1),
    "watermark": (None, False),
    "choice": (None, []),
    "regex": (None,),
    "n": (1,),
}
"""Fields of SGLang that this server knows but cannot do, with the values that ask for nothing."""


class BadRequest(Exception):
    """The request cannot be served as it is; HTTP 400."""


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`sampling_params` of /generate: SGLang's names and defaults."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    """0: greedy, with logprobs of the unscaled logits."""
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    sampling_seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    n: int = 1
    skip_special_tokens: bool = True
    """Of the answer's text, as the next two are; this server gives none."""
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    stop_regex: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    logit_bias: Any = None
    custom_params: Any = None
    beam_width: int | None = None
    watermark: Any = None
    choice: Any = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings, without empty ones."""
        found = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in found if text)

    def check(self) -> None:
        """Refuse values out of range and what this server cannot do.

        Raises:
            BadRequest: names the field, its value and what is allowed.
        """
        ranges = (
            ("temperature", self.temperature >= 0.0, "0 or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "more than 0, at most 1"),
            ("top_k", self.top_k == -1 or self.top_k >= 1, "-1 or at least 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "0 to 1"),
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
        )
        for name, is_good, allowed in ranges:
            if not is_good:
                raise BadRequest(f"{name}={getattr(self, name)!r}; allowed: {allowed}")
        for name, neutral in _NEUTRAL.items():
            if getattr(self, name) not in neutral:
                raise BadRequest(
                    f"{name}={getattr(self, name)!r} is not supported by the torch server; "
                    f"allowed: {neutral[0]!r}. Leave it out, or use SGLang."
                )


class Constraint(Protocol):
    """Which ids a sequence may sample next; knows every id that it has sampled."""

    def allowed(self) -> npt.NDArray[np.bool_]:
        """[V], by id."""

    def take(self, token: int) -> None:
        """One more id was sampled."""


Top = list[tuple[float, int]]
"""Logprobs and ids, the most probable first."""
Support = tuple[list[int], float]
"""The ids that a token was sampled among, and its logprob over these; no ids: more than
`MAX_SUPPORT_IDS`."""
MAX_SUPPORT_IDS = 4096
"""As many as SGLang tells of by default."""


class RowParams:
    """Sampling parameters of every slot, as arrays that a pass indexes."""

    def __init__(self, num_slots: int) -> None:
        self.temperature: npt.NDArray[np.float32] = np.ones(num_slots, dtype=np.float32)
        """1 for greedy rows."""
        self.is_greedy: npt.NDArray[np.bool_] = np.zeros(num_slots, dtype=np.bool_)
        self.is_limited: npt.NDArray[np.bool_] = np.zeros(num_slots, dtype=np.bool_)
        self.top_p: npt.NDArray[np.float32] = np.ones(num_slots, dtype=np.float32)
        self.top_k: npt.NDArray[np.int64] = np.zeros(num_slots, dtype=np.int64)
        self.min_p: npt.NDArray[np.float32] = np.zeros(num_slots, dtype=np.float32)
        self.seed: npt.NDArray[np.uint64] = np.zeros(num_slots, dtype=np.uint64)
        self.num_sampled: npt.NDArray[np.uint64] = np.zeros(num_slots, dtype=np.uint64)

        self.constraint: dict[int, Constraint] = {}
        """By slot; few rows have one."""
        self.num_top: npt.NDArray[np.int64] = np.zeros(num_slots, dtype=np.int64)
        self.top: dict[int, Top] = {}
        """By slot: the most probable ids of the last sampled token, where they are asked for."""
        self.wants_support: npt.NDArray[np.bool_] = np.zeros(num_slots, dtype=np.bool_)
        self.support: dict[int, Support] = {}
        """By slot: what the last token was sampled among, where that is asked for."""

    def set(
        self,
        slot: int,
        params: SamplingParams,
        *,
        seed: int,
        num_sampled: int,
        num_top: int = 0,
        wants_support: bool = False,
        constraint: Constraint | None = None,
    ) -> None:
        """Enter a request's parameters; `seed` is below 2**64."""
        self.num_top[slot] = num_top
        self.top.pop(slot, None)
        self.wants_support[slot] = wants_support
        self.support.pop(slot, None)
        self.constraint.pop(slot, None)
        if constraint is not None:
            self.constraint[slot] = constraint
        is_greedy = params.temperature == 0.0
        self.is_greedy[slot] = is_greedy
        self.temperature[slot] = 1.0 if is_greedy else params.temperature
        self.top_p[slot] = params.top_p
        self.top_k[slot] = params.top_k if params.top_k > 0 else np.iinfo(np.int64).max
        self.min_p[slot] = params.min_p
        self.is_limited[slot] = not is_greedy and (
            params.top_p < 1.0 or params.top_k > 0 or params.min_p > 0.0
        )
        self.seed[slot] = seed
        self.num_sampled[slot] = num_sampled


def sample(
    logits: Tensor, params: RowParams, slots: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """One id and its logprob for each row of `logits` [B, V]; counts the sampled token.

    The logprob is log_softmax(logits / T) over the whole vocabulary, truncated or not, and
    log_softmax(logits) for greedy rows, as SGLang reports it; of constrained rows over what the
    constraint allows. It is NaN where logits are not finite.
    """
    device = logits.device
    constrained = {
        row: params.constraint[slot]
        for row, slot in enumerate(slots.tolist())
        if slot in params.constraint
    }
    if constrained:
        logits = logits.clone()
    for row, constraint in constrained.items():
        forbidden = torch.from_numpy(~constraint.allowed()).to(device)
        logits[row].masked_fill_(forbidden, -torch.inf)
    temperature = params.temperature[slots]
    if (temperature != 1.0).any():
        logits = logits / torch.from_numpy(temperature).to(device)[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    greedy = params.is_greedy[slots]
    probabilities = None
    if greedy.all():
        sampled = logprobs.argmax(dim=-1)
    else:
        probabilities = logprobs.exp()
        limited = params.is_limited[slots]
        if limited.any():
            _limit(probabilities, params, slots, np.flatnonzero(limited))
        cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
        uniform = _uniform(params.seed[slots], params.num_sampled[slots])
        point = torch.from_numpy(uniform).to(device)[:, None] * cumulative[:, -1:]
        sampled = torch.searchsorted(cumulative, point, right=True).squeeze(1)
        sampled = sampled.clamp_(max=logits.shape[1] - 1)
        if greedy.any():
            sampled = torch.where(
                torch.from_numpy(greedy).to(device), logprobs.argmax(dim=-1), sampled
            )
    params.num_sampled[slots] += np.uint64(1)
    chosen = logprobs.gather(1, sampled[:, None]).squeeze(1)
    ids = sampled.cpu().numpy()
    for row, constraint in constrained.items():
        constraint.take(int(ids[row]))
    if params.num_top[slots].any():
        _note_top(logprobs, params, slots)
    if params.wants_support[slots].any():
        _note_support(logprobs, probabilities, ids, params, slots)
    return ids, chosen.cpu().numpy()


def _note_top(logprobs: Tensor, params: RowParams, slots: npt.NDArray[np.int64]) -> None:
    numbers = params.num_top[slots]
    values, ids = logprobs.topk(min(int(numbers.max()), logprobs.shape[1]), dim=-1)
    for slot, number, row_values, row_ids in zip(
        slots.tolist(), numbers.tolist(), values.tolist(), ids.tolist(), strict=True
    ):
        if number:
            params.top[slot] = list(zip(row_values[:number], row_ids[:number], strict=True))


def _note_support(
    logprobs: Tensor,
    probabilities: Tensor | None,
    sampled: npt.NDArray[np.int64],
    params: RowParams,
    slots: npt.NDArray[np.int64],
) -> None:
    """Note the ids with a probability above 0; of greedy rows the sampled one alone."""
    for row, slot in enumerate(slots.tolist()):
        if not params.wants_support[slot]:
            continue
        token = int(sampled[row])
        if probabilities is None or params.is_greedy[slot]:
            params.support[slot] = [token], 0.0
            continue
        kept = probabilities[row].nonzero().squeeze(1)
        of_kept = logprobs[row, kept].double()
        logprob = float(logprobs[row, token].double() - of_kept.logsumexp(0))
        ids = kept.tolist() if len(kept) <= MAX_SUPPORT_IDS else []
        params.support[slot] = ids, logprob


def _limit(
    probabilities: Tensor,
    params: RowParams,
    slots: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
) -> None:
    """Zero what top-k, top-p and min-p leave out in `rows`; each looks at the full distribution."""
    device = probabilities.device
    index = torch.from_numpy(rows).to(device)
    own = slots[rows]
    ordered, places = probabilities.index_select(0, index).sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    rank = torch.arange(ordered.shape[1], device=device)
    out = rank >= torch.from_numpy(params.top_k[own]).to(device)[:, None]
    out |= before > torch.from_numpy(params.top_p[own]).to(device)[:, None]
    out |= ordered < ordered[:, :1] * torch.from_numpy(params.min_p[own]).to(device)[:, None]
    ordered.masked_fill_(out, 0.0)
    probabilities[index] = torch.zeros_like(ordered).scatter_(1, places, ordered)


def _uniform(
    seed: npt.NDArray[np.uint64], counter: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) that depend on (seed, counter) only: splitmix64, twice mixed."""
    state = _mix(seed + np.uint64(0x9E3779B97F4A7C15))
    state = _mix(state + counter * np.uint64(0xD1342543DE82EF95))
    return (state >> np.uint64(32)).astype(np.float64) * 2.0**-32


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
