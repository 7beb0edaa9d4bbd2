"""Which sampling parameters are in force for a turn, and which of its tokens may be trained.

Owns: enforce, record and reject; the loss spans of a turn. Does not own: generating, storing.
Invariant: every parameter is decided here, never by a server's default; tokens whose behavior
distribution is unknown, that follow a stop, that no client received or that a version asked for by
name generated have no loss.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from outloop.buffer.records import Opening, Sampling
from outloop.buffer.sampling_support import SamplingSupport
from outloop.buffer.settings import SamplingSettings
from outloop.router.dialects.base import TurnRequest
from outloop.router.dialects.sampling_parameters import FLOATS, PARAMETERS, check_value
from outloop.router.errors import Refusal

_MAX_SEED = 2**63 - 1


def check_episode_sampling(sampling: dict[str, float] | None, purpose: str) -> None:
    """Refuse sampling that an episode may not bring along.

    Raises:
        Refusal: 400, not an evaluation, or an unknown or impossible parameter.
    """
    if sampling is None:
        return
    if purpose != "eval":
        raise Refusal(
            400,
            "invalid_value",
            f"sampling={sampling} with purpose={purpose!r}; only eval episodes carry their own "
            "sampling. Leave it out, or set sampling.* of the run.",
            param="sampling",
        )
    for name, value in sampling.items():
        if name not in PARAMETERS:
            raise Refusal(
                400,
                "invalid_value",
                f"sampling.{name}={value!r}; allowed: {', '.join(sorted(PARAMETERS))}",
                param="sampling",
            )
        check_value(name, value, f"sampling.{name}")


def decide(
    request: TurnRequest, opening: Opening | None, settings: SamplingSettings, *, room: int
) -> Sampling:
    """The sampling in force; `room` is how many tokens the context still takes (at least 1).

    Raises:
        Refusal: 400, the governance of a parameter is reject and the client asked for another
            value, or it may ask for what cannot be served.
    """
    wanted, limit = request.max_new_tokens, settings.max_new_tokens
    own = opening.sampling if opening is not None else None
    if own is not None:
        limit = int(own.get("max_new_tokens", limit))
    if wanted is not None:
        may_raise = own is None and settings.governance_of("max_new_tokens") == "record"
        limit = wanted if may_raise else min(wanted, limit)
    limit = max(1, min(limit, room))
    asks_more = request.asked or request.has_logit_bias or request.json_schema is not None
    if own is None and not asks_more and request.seed is None:
        # Nearly every turn; what follows comes to the same for more.
        return _usual(
            settings.temperature,
            settings.top_p,
            settings.top_k,
            settings.min_p,
            limit,
            request.stop,
        )
    in_force = _of_the_run(settings)
    in_force |= own if own is not None else _asked(request, settings)
    in_force["max_new_tokens"] = limit
    parameters: dict[str, Any] = {
        name: _as_recorded(name, value) for name, value in in_force.items()
    }
    constraint = _constraint(request, opening, settings)
    return _sampling(stop=request.stop, constraint=constraint, **parameters)


def sampling_of_choice(sampling: Sampling, choice_index: int) -> Sampling:
    """What one of several choices is sampled with: each has a seed of its own."""
    if sampling.seed is None or choice_index == 0:
        return sampling
    seed = (sampling.seed + choice_index + _MAX_SEED + 1) % (2 * _MAX_SEED + 2) - _MAX_SEED - 1
    return replace(sampling, seed=seed)


@lru_cache(maxsize=256)
def _sampling(**parameters: Any) -> Sampling:
    """One record for all turns that are generated alike; every turn in memory holds one."""
    return Sampling(**parameters)


@lru_cache(maxsize=256)
def _usual(
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    max_new_tokens: int,
    stop: tuple[str, ...],
) -> Sampling:
    return _sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        max_new_tokens=max_new_tokens,
        stop=stop,
        constraint="",
    )


def _asked(request: TurnRequest, settings: SamplingSettings) -> dict[str, float]:
    """What a client asked for and gets; raises as decide."""
    found = {}
    plain = _sampling(**_of_the_run(settings))
    for name, value in request.asked.items():
        governance = settings.governance_of(name)
        if governance == "record":
            found[name] = value
        elif governance == "reject" and value != getattr(plain, name):
            raise _not_allowed(name, value, f"samples with {name}={getattr(plain, name)!r}")
    if request.seed is not None:
        governance = settings.governance_of("seed")
        if governance == "reject":
            raise _not_allowed("seed", request.seed, "samples freely")
        if governance == "record":
            found["seed"] = request.seed
    return found


def is_honoured(name: str, opening: Opening | None, settings: SamplingSettings) -> bool:
    """Whether a client's `response_format` or `tool_choice` is in force.

    Evaluation and unkeyed traffic are never trained, so that there is nothing to protect.

    Raises:
        Refusal: 400, the run rejects it.
    """
    if opening is None or opening.purpose == "eval":
        return True
    governance = settings.governance_of(name)
    if governance == "reject":
        raise _not_allowed(name, "...", "lets the policy choose what it says")
    return governance == "record"


def _constraint(request: TurnRequest, opening: Opening | None, settings: SamplingSettings) -> str:
    if request.has_logit_bias and settings.governance_of("logit_bias") != "enforce":
        raise Refusal(
            400,
            "unsupported_parameter",
            "logit_bias changes the behavior distribution and is not supported; leave it out, or "
            'have it ignored with sampling.governance="enforce"',
            param="logit_bias",
        )
    schema = request.json_schema
    if schema is None or not is_honoured("response_format", opening, settings):
        return ""
    return f"json_schema:{hashlib.blake2b(schema.encode(), digest_size=8).hexdigest()}"


def _not_allowed(name: str, value: object, what_runs_do: str) -> Refusal:
    return Refusal(
        400,
        "sampling_not_allowed",
        f"{name}={value!r}; this run {what_runs_do}, and rejects what clients ask "
        "(sampling.governance). Leave it out.",
        param=name,
    )


def loss_spans(
    *,
    num_output: int,
    num_until_stop: int,
    undelivered_from: int | None,
    is_delivered: bool,
    is_behavior_known: bool,
    is_frozen: bool,
    purpose: str,
    support: SamplingSupport | None = None,
) -> tuple[tuple[tuple[int, int], ...], str]:
    """Ranges of output tokens that may be trained, and why the rest may not.

    Args:
        support: tokens of which it does not know the ids are left out.
    """
    if purpose == "eval":
        return (), "eval"
    if is_frozen:
        return (), "frozen"
    if not is_behavior_known:
        return (), "behavior_unknown"
    if not is_delivered:
        return (), "undelivered"
    end, reason = num_output, ""
    if num_until_stop < end:
        end, reason = num_until_stop, "after_stop"
    if undelivered_from is not None and undelivered_from < end:
        end, reason = undelivered_from, "undelivered"
    if support is not None and not support.counts[:end].all():
        return _runs(support.counts[:end] > 0), "support_unknown"
    return ((0, end),) if end else (), reason


def _runs(is_kept: npt.NDArray[np.bool_]) -> tuple[tuple[int, int], ...]:
    """Half-open ranges in which `is_kept` is True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], is_kept, [0])))).tolist()
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def _as_recorded(name: str, value: float) -> float:
    return float(value) if name in FLOATS else int(value)


def _of_the_run(settings: SamplingSettings) -> dict[str, Any]:
    """What is in force when nobody asks for anything else."""
    return {name: getattr(settings, name) for name in ("temperature", "top_p", "top_k", "min_p")}
