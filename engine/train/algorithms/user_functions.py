"""Filters, advantages and losses of the user, found and checked before a run starts.

Owns: buffer.filter_path, trainer.advantage_path and trainer.loss_path. Does not own: the built-in
ones. Invariant: whatever is wrong with a path, a signature or a result is a SettingsError of one
line that says what to change.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outloop.buffer.errors import SettingsError
from outloop.buffer.records import Group
from outloop.buffer.settings import Settings
from outloop.engine.train.algorithms.advantages import Advantage, Float64
from outloop.engine.train.algorithms.losses import (
    LossFunction,
    LossInputs,
    Sequences,
    TokenLoss,
    is_sequence_level,
    sequence_level,
)

_ADVANTAGE = "def advantage(rewards) -> advantages"
_KEEP = "def keep(group) -> str"
_LOSS = "def loss(inputs) -> losses"


def advantage_of(settings: Settings) -> str | Advantage:
    """The name of the run's advantage, or the user's function with its results checked.

    Raises:
        SettingsError: not importable, or another signature.
    """
    path = settings.trainer.advantage_path
    if path is None:
        return settings.trainer.advantage
    named = f"trainer.advantage_path={path!r}"
    function = _import(path, named, settings.env.import_dir)
    _check_signature(function, named, _ADVANTAGE, (None,), {})

    def checked(rewards: Float64) -> Float64:
        values = np.asarray(function(rewards.copy()), np.float64)
        if values.shape != rewards.shape or not np.isfinite(values).all():
            raise SettingsError(
                f"{named} gave {values!r} for rewards={rewards!r}; finite numbers of the same "
                "shape are allowed"
            )
        return values

    return checked


def loss_of(settings: Settings) -> LossFunction | None:
    """The user's loss with its results checked; None: trainer.loss is used.

    Raises:
        SettingsError: not importable, or another signature.
    """
    path = settings.trainer.loss_path
    if path is None:
        return None
    named = f"trainer.loss_path={path!r}"
    function = _import(path, named, settings.env.import_dir)
    _check_signature(function, named, _LOSS, (None,), {})

    def checked(inputs: LossInputs) -> TokenLoss:
        losses = function(inputs)
        if isinstance(losses, TokenLoss):
            return losses
        wanted = inputs.policy_logprobs.shape
        if not isinstance(losses, Tensor) or losses.shape != wanted:
            raise SettingsError(
                f"{named} gave {getattr(losses, 'shape', type(losses).__name__)}; a tensor of one "
                f"loss per token, shape {tuple(wanted)}, is allowed. Do not sum or average."
            )
        ratio = inputs.ratio.detach()
        return TokenLoss(loss=losses, ratio=ratio, is_clipped=torch.zeros_like(ratio).bool())

    return sequence_level(checked) if is_sequence_level(function) else checked


def filter_of(settings: Settings) -> Callable[[Group], str] | None:
    """The user's filter with its results checked; None: every group is kept.

    Raises:
        SettingsError: not importable, or another signature.
    """
    path = settings.buffer.filter_path
    if path is None:
        return None
    named = f"buffer.filter_path={path!r}"
    function = _import(path, named, settings.env.import_dir)
    _check_signature(function, named, _KEEP, (None,), {})

    def checked(group: Group) -> str:
        reason = function(group)
        if not isinstance(reason, str):
            raise SettingsError(
                f"{named} gave {reason!r} for group_id={group.group_id}; an empty string (train) "
                "or the reason not to is allowed"
            )
        return reason

    return checked


def check_custom(settings: Settings) -> None:
    """Import the run's own filter, advantage and loss, and try the last two on a few numbers.

    Raises:
        SettingsError: with the sentence that says what to change.
    """
    filter_of(settings)
    advantage = advantage_of(settings)
    if not isinstance(advantage, str):
        _probe("trainer.advantage_path", lambda: advantage(np.array([0.0, 1.0, 1.0])))
    loss = loss_of(settings)
    if loss is None:
        return
    inputs = _probe_inputs(settings, sees_sequences=is_sequence_level(loss))
    result = _probe("trainer.loss_path", lambda: loss(inputs))
    if not result.loss.requires_grad:
        raise SettingsError(
            f"trainer.loss_path={settings.trainer.loss_path!r} gave losses without gradient; "
            "compute them from inputs.policy_logprobs"
        )


def _probe_inputs(settings: Settings, *, sees_sequences: bool) -> LossInputs:
    """Three tokens of two sequences, with everything that a loss may look at."""
    trainer = settings.trainer
    policy = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    return LossInputs(
        policy_logprobs=policy,
        behavior_logprobs=policy.detach() - 0.2,
        proximal_logprobs=policy.detach() - 0.1,
        reference_logprobs=None if trainer.kl == "none" else policy.detach() - 0.3,
        advantages=torch.tensor([1.0, -1.0, 0.5]),
        entropies=torch.tensor([1.0, 2.0, 3.0]),
        policy_versions=torch.tensor([0, 1, 1]),
        clip_low=trainer.clip_low,
        clip_high=trainer.clip_high,
        dual_clip=trainer.dual_clip,
        sequences=Sequences(torch.tensor([0, 0, 1]), 2) if sees_sequences else None,
        options=trainer.loss_options,
    )


def _probe(setting: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except SettingsError:
        raise
    except Exception as error:  # the user's function may raise anything
        raise SettingsError(
            f"{setting} raised {type(error).__name__}: {error} on three episodes or tokens; "
            "it is called with every batch, so it may not raise"
        ) from error


def _import(path: str, named: str, import_dir: Path | None) -> Callable[..., Any]:
    module_name, _, name = path.partition(":")
    if not module_name or not name.isidentifier():
        raise SettingsError(f"{named} is not package.module:function; for example 'mine:loss'")
    for folder in (import_dir, Path.cwd()):
        if folder is not None and str(folder.resolve()) not in sys.path:
            sys.path.insert(0, str(folder.resolve()))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's module may raise anything
        raise SettingsError(
            f"{named} cannot be imported: {type(error).__name__}: {error}; it is looked for in the "
            f"working directory, in env.import_dir={str(import_dir)!r} and among the installed "
            "packages"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise SettingsError(f"{named}: module {module_name!r} has no function {name!r}")
    found: Callable[..., Any] = function
    return found


def _check_signature(
    function: Callable[..., Any],
    named: str,
    expected: str,
    arguments: tuple[None, ...],
    options: dict[str, float],
) -> None:
    try:
        signature = inspect.signature(function)
        signature.bind(*arguments, **options)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{named} cannot be called as `{expected}`: {error}") from error
