"""Filters, advantages and losses of the user, found and checked before a run starts.

Whatever is wrong with a path, a signature or a result is a SettingsError of one line that names the
change to make.
"""

from __future__ import annotations

import inspect
import traceback
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings
from outloop.buffer.user_code import import_object, text_of
from outloop.engine.train.algorithms.advantages import Float64, pass_at_k
from outloop.engine.train.algorithms.credit import (
    BySource,
    EpisodeAdvantage,
    GroupAdvantage,
    ScoredEpisode,
    ScoredGroup,
    ScoredTurn,
    SourceRule,
    reward_to_go,
)
from outloop.engine.train.algorithms.losses import (
    LossFunction,
    LossInputs,
    Sequences,
    TokenLoss,
    is_sequence_level,
    sequence_level,
)

_ADVANTAGE = "def advantage(group) -> advantages"
_KEEP = "def keep(group) -> str"
_LOSS = "def loss(inputs) -> losses"


def sources_of(settings: Settings) -> BySource:
    """What is different for the groups of single sources."""
    rules = {
        name: SourceRule(
            advantage=one.advantage,
            weight=one.weight,
            is_imitated=one.loss == "sft",
            min_reward=one.min_reward,
        )
        for name, one in settings.trainer.sources.items()
    }
    trainer = settings.trainer
    return BySource(trainer.advantage, rules, turn_discount=trainer.turn_discount)


def advantage_of(settings: Settings) -> str | GroupAdvantage:
    """The name of the run's advantage, or the user's function with its results checked.

    Raises:
        SettingsError: not importable, or another signature.
    """
    path = settings.trainer.advantage_path
    if path is None:
        k = settings.trainer.pass_k
        if settings.trainer.advantage == "pass_at_k" and k is not None:
            return lambda group: pass_at_k(group.rewards, k=k).tolist()
        discount = settings.trainer.turn_discount
        if settings.trainer.sources:
            return sources_of(settings)
        if settings.trainer.advantage == "reward_to_go" and discount < 1.0:
            return lambda group: reward_to_go(group, discount=discount)
        return settings.trainer.advantage
    named = f"trainer.advantage_path={path!r}"
    function = _imported(path, "trainer.advantage_path", _ADVANTAGE, settings)

    def checked(group: ScoredGroup) -> list[EpisodeAdvantage]:
        values = _tried(function, group, named, f"group_id={group.group_id!r}")
        if _is_single(values) or len(values) != len(group.episodes):
            raise SettingsError(
                f"{named} gave {values!r} for group_id={group.group_id!r} with "
                f"{len(group.episodes)} episodes; one entry for each of group.episodes is allowed: "
                "a number, one for each of its turns, or for each turn one for each of its tokens"
            )
        return [
            _checked_episode(value, episode, named)
            for value, episode in zip(values, group.episodes, strict=True)
        ]

    return checked


def _checked_episode(value: Any, episode: ScoredEpisode, named: str) -> EpisodeAdvantage:
    """What a user's function gave for one episode: a number, by turn, or by token."""
    if _is_single(value):
        return float(_finite(value, (), named, episode))
    if len(value) != len(episode.turns):
        raise SettingsError(
            f"{named} gave {len(value)} entries for episode_id={episode.episode_id!r}, which has "
            f"{len(episode.turns)} turns; one for each of episode.turns is allowed"
        )
    return [
        _finite(own, () if _is_single(own) else (turn.num_tokens,), named, episode).reshape(-1)
        for own, turn in zip(value, episode.turns, strict=True)
    ]


def _is_single(value: Any) -> bool:
    """True if it is not a list, a tuple or an array of something."""
    return not isinstance(value, list | tuple) and getattr(value, "ndim", 0) == 0


def _finite(value: Any, shape: tuple[int, ...], named: str, episode: ScoredEpisode) -> Float64:
    try:
        numbers = np.asarray(value, np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SettingsError(
            f"{named} gave {value!r} for episode_id={episode.episode_id!r}, which is no number "
            f"({error}); finite numbers are allowed, of shape {shape}"
        ) from error
    # Infinite in float32 where it is above 3e38.
    with np.errstate(over="ignore"):
        is_finite = bool(np.isfinite(numbers.astype(np.float32)).all())
    if numbers.shape != shape or not is_finite:
        raise SettingsError(
            f"{named} gave {numbers!r} for episode_id={episode.episode_id!r}; finite numbers are "
            f"allowed, in float32, of shape {shape}: one for the episode, for a turn, or for each "
            "of the turn's tokens"
        )
    return numbers


def loss_of(settings: Settings) -> LossFunction | None:
    """The user's loss with its results checked; None: trainer.loss is used.

    Raises:
        SettingsError: not importable, or another signature.
    """
    path = settings.trainer.loss_path
    if path is None:
        return None
    named = f"trainer.loss_path={path!r}"
    function = _imported(path, "trainer.loss_path", _LOSS, settings)

    def checked(inputs: LossInputs) -> TokenLoss:
        losses = _tried(function, inputs, named, f"{len(inputs.policy_logprobs)} tokens")
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


def filter_of(settings: Settings) -> Callable[[ScoredGroup], str] | None:
    """The user's filter with its results checked; None: every group is kept.

    Raises:
        SettingsError: not importable, or another signature.
    """
    path = settings.buffer.filter_path
    if path is None:
        return None
    named = f"buffer.filter_path={path!r}"
    function = _imported(path, "buffer.filter_path", _KEEP, settings)

    def checked(group: ScoredGroup) -> str:
        reason = _tried(function, group, named, f"group_id={group.group_id!r}")
        if not isinstance(reason, str):
            raise SettingsError(
                f"{named} gave {reason!r} for group_id={group.group_id}; an empty string (train) "
                "or the reason not to is allowed"
            )
        return reason

    return checked


def check_custom(settings: Settings) -> None:
    """Import the run's own filter, advantage and loss, and try each on a few numbers.

    Raises:
        SettingsError: with the sentence that says what to change.
    """
    keep = filter_of(settings)
    if keep is not None:
        keep(_probe_group())
    advantage = advantage_of(settings)
    if not isinstance(advantage, str):
        advantage(_probe_group())
    loss = loss_of(settings)
    if loss is None:
        return
    inputs = _probe_inputs(settings, sees_sequences=is_sequence_level(loss))
    result = loss(inputs)
    if not result.loss.requires_grad:
        raise SettingsError(
            f"trainer.loss_path={settings.trainer.loss_path!r} gave losses without gradient; "
            "compute them from inputs.policy_logprobs"
        )


def _probe_group() -> ScoredGroup:
    """Three episodes: of two turns, of one turn in which a span is scored, and of none.

    Each has any component that a function asks for: the names are the verifier's.
    """
    components = defaultdict[str, float](float)
    first, second, third = (
        ScoredTurn(
            turn_id=name,
            parent=parent,
            request=request,
            num_tokens=num_tokens,
            oldest_version=0,
            is_cut=False,
            reward=reward,
            spans=spans,
        )
        for name, parent, request, num_tokens, reward, spans in (
            ("a", None, 0, 2, 0.5, ()),
            ("b", 0, 1, 3, 0.0, ()),
            ("c", None, 0, 4, 0.0, ((1, 3, -1.0),)),
        )
    )
    return ScoredGroup(
        group_id="probe",
        task_id="probe",
        episodes=(
            ScoredEpisode(
                episode_id="0",
                reward=0.0,
                components=components,
                turns=(first, second),
                branches=((0, 1),),
            ),
            ScoredEpisode(
                episode_id="1",
                reward=1.0,
                components=components,
                turns=(third,),
                branches=((0,),),
            ),
            ScoredEpisode(
                episode_id="2",
                reward=1.0,
                components=components,
                is_truncated=True,
                outcome="truncated",
            ),
        ),
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
        teacher_logprobs=None if trainer.teacher is None else policy.detach() - 0.4,
        advantages=torch.tensor([1.0, -1.0, 0.5]),
        entropies=torch.tensor([1.0, 2.0, 3.0]),
        policy_versions=torch.tensor([0, 1, 1]),
        clip_low=trainer.clip_low,
        clip_high=trainer.clip_high,
        dual_clip=trainer.dual_clip,
        sequences=Sequences(torch.tensor([0, 0, 1]), 2) if sees_sequences else None,
        options=trainer.loss_options,
    )


def _tried(function: Callable[[Any], Any], argument: Any, named: str, given: str) -> Any:
    """What the user's function makes of its argument.

    Raises:
        SettingsError: it raised; `named` and `given` say which function, on what.
    """
    try:
        return function(argument)
    except Exception as error:  # the user's function may raise anything
        raise SettingsError(
            f"{named} raised {type(error).__name__}: {text_of(error)}{_where(error)} on {given}; "
            "it is called with every batch, so it may not raise"
        ) from error


def _where(error: Exception) -> str:
    """The file and line in which an exception was raised, with a space in front."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f" in {place.filename}:{place.lineno}"


def _imported(path: str, setting: str, expected: str, settings: Settings) -> Callable[[Any], Any]:
    """The user's function, which takes one argument.

    Raises:
        SettingsError: it is not there, or takes others; `expected` is how it is called.
    """
    function = import_object(path, setting=setting, import_dir=settings.env.import_dir)
    if inspect.iscoroutinefunction(function):
        raise SettingsError(f"{setting}={path!r} is async; `{expected}` is allowed")
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError) as error:
        raise SettingsError(
            f"{setting}={path!r} cannot be called as `{expected}`: {error}"
        ) from error
    found: Callable[[Any], Any] = function
    return found
