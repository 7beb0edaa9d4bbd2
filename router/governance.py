"""Which sampling parameters are in force for a turn, and which of its tokens may be trained.

Owns: enforce, record and reject; the loss spans of a turn. Does not own: drawing, storing.
Invariant: every parameter is decided here, never by a server's default; tokens whose behavior
distribution is unknown, that follow a stop, or that no client received have no loss.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from outloop.buffer.records import Opening, Sampling
from outloop.buffer.settings import SamplingSettings
from outloop.router.refusals import Refusal
from outloop.router.turns import TurnRequest

_FLOATS = frozenset(
    {"temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"}
)
_EPISODE_PARAMETERS = _FLOATS | {"top_k", "max_new_tokens", "seed"}


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
    for name in sampling:
        if name not in _EPISODE_PARAMETERS:
            raise Refusal(
                400,
                "invalid_value",
                f"sampling.{name}={sampling[name]!r}; allowed: "
                f"{', '.join(sorted(_EPISODE_PARAMETERS))}",
                param="sampling",
            )


def decide(
    request: TurnRequest, opening: Opening | None, settings: SamplingSettings, *, room: int
) -> Sampling:
    """The sampling in force; `room` is how many tokens the context still takes (at least 1).

    Raises:
        Refusal: 400, `sampling.governance` is reject and the client asked for something else.
    """
    base = Sampling(
        temperature=settings.temperature,
        max_new_tokens=settings.max_new_tokens,
        stop=request.stop,
    )
    governance = settings.governance
    own = opening.sampling if opening is not None else None
    if own is not None:
        base = _with(base, own)
        governance = "enforce"
    wanted = request.max_new_tokens
    if governance == "record":
        base = _with(base, request.asked)
        base = replace(base, seed=request.seed)
        limit = wanted if wanted is not None else base.max_new_tokens
    else:
        if governance == "reject":
            _refuse_other(request, base)
        limit = base.max_new_tokens if wanted is None else min(wanted, base.max_new_tokens)
    if request.constraints and governance != "enforce":
        raise Refusal(
            400,
            "unsupported_parameter",
            f"{request.constraints[0]} changes the behavior distribution and is not supported with "
            f'sampling.governance="{governance}"; leave it out, or use "enforce", which ignores it',
            param=request.constraints[0],
        )
    return replace(base, max_new_tokens=max(1, min(limit, room)))


def loss_spans(
    *,
    num_output: int,
    num_until_stop: int,
    undelivered_from: int | None,
    is_delivered: bool,
    is_behavior_known: bool,
    purpose: str,
) -> tuple[tuple[tuple[int, int], ...], str]:
    """Ranges of output tokens that may be trained, and why the rest may not."""
    if purpose == "eval":
        return (), "eval"
    if not is_behavior_known:
        return (), "behavior_unknown"
    if not is_delivered:
        return (), "undelivered"
    end, reason = num_output, ""
    if num_until_stop < end:
        end, reason = num_until_stop, "after_stop"
    if undelivered_from is not None and undelivered_from < end:
        end, reason = undelivered_from, "undelivered"
    return ((0, end),) if end else (), reason


def _with(base: Sampling, values: dict[str, float]) -> Sampling:
    known = {f.name for f in fields(Sampling)}
    changed: dict[str, Any] = {
        name: float(value) if name in _FLOATS else int(value)
        for name, value in values.items()
        if name in known
    }
    return replace(base, **changed)


def _refuse_other(request: TurnRequest, base: Sampling) -> None:
    for name, value in request.asked.items():
        in_force = getattr(base, name)
        if value != in_force:
            raise Refusal(
                400,
                "sampling_not_allowed",
                f"{name}={value!r}; this run samples with {name}={in_force!r} "
                '(sampling.governance="reject"). Leave it out.',
                param=name,
            )
    if request.seed is not None:
        raise Refusal(
            400,
            "sampling_not_allowed",
            f"seed={request.seed}; this run draws freely "
            '(sampling.governance="reject"). Leave it out.',
            param="seed",
        )
