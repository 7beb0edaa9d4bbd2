"""Why a step teaches nothing, in words for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from outloop.buffer.records import Group, Trajectory, Turn
from outloop.buffer.settings import Settings
from outloop.engine.train.data.batch_builder import Batch

_MIN_LOW_SHARE = 0.25
"""Fewer episodes with the lowest reward do not hold a run back."""


class SignalWatch:
    """Counts the steps in a row that teach nothing, or that one cause holds back."""

    def __init__(self, settings: Settings, run_dir: Path) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._steps_without = 0
        self._steps_held_back = 0

    def look(self, batch: Batch, groups: Sequence[Group]) -> str:
        """Take the groups of a step and what was made of them; return a warning, or nothing.

        A warning comes after telemetry.no_signal_warning_steps such steps in a row. A step without
        signal is warned of again after as many more, a cause that holds back a run that learns is
        named once until a step is free of it.
        """
        episodes = [one for group in groups for one in group.trajectories]
        limit = self._settings.telemetry.no_signal_warning_steps
        cause = _commonest_cause(episodes, self._settings, self._run_dir)
        if not self._teaches(batch):
            self._steps_without += 1
            if self._steps_without % limit:
                return ""
            sentence = self._sentence(batch, cause)
            return f"nothing was learned in {self._steps_without} steps: {sentence}."
        self._steps_without = 0
        self._steps_held_back = self._steps_held_back + 1 if cause else 0
        if self._steps_held_back != limit:
            return ""
        return f"of the episodes with the lowest reward, {cause}."

    def _teaches(self, batch: Batch) -> bool:
        has_signal = batch.metrics["train/groups_with_signal_share"] > 0
        return any(batch.trained) and (has_signal or self._settings.trainer.teacher is not None)

    def _sentence(self, batch: Batch, cause: str) -> str:
        if cause:
            return cause
        trainer = self._settings.trainer
        if batch.metrics["train/groups_with_signal_share"] > 0:
            if batch.group_ids and trainer.mask_truncated:
                return (
                    "every episode was truncated, and trainer.mask_truncated = true leaves these "
                    "out; raise the limit that ends them"
                )
            reasons = Counter(reason for _, reason in batch.dropped)
            words = ", ".join(f"{number} as {reason}" for reason, number in reasons.most_common())
            by_filter = f": buffer.filter_path={self._settings.buffer.filter_path!r}"
            hint = by_filter if "filtered" in reasons else ""
            return (
                f"all groups with different rewards were dropped ({words}){hint}; `outloop buffer "
                f"dead list --run {self._run_dir}` and logs/trainer.log say why"
            )
        return (
            "all rewards were equal in every group (mean reward "
            f"{batch.metrics['train/reward_mean']:.3f}). Check the verifier, make tasks easier or "
            "harder, or raise buffer.group_size"
        )


def _commonest_cause(episodes: Sequence[Trajectory], settings: Settings, run_dir: Path) -> str:
    """What most of the episodes with the lowest reward have in common; empty if nothing, or if
    these are few."""
    rewards = [one.episode.reward.value for one in episodes if one.episode.reward is not None]
    lowest = min(rewards, default=0.0)
    low = [
        one for one in episodes if one.episode.reward is None or one.episode.reward.value <= lowest
    ]
    if not low or len(low) < _MIN_LOW_SHARE * len(episodes):
        return ""
    refused = [one for one in low if not one.turns and one.episode.refusals.counts]
    silent = [one for one in low if not one.turns and not one.episode.refusals.counts]
    failed = [one for one in low if one.turns and one.episode.outcome == "failed"]
    cut = [answer for one in low for answer in _cut_answer(one)]
    ended = [one for one in low if one.turns and one.episode.outcome == "truncated"]
    most, total = len(low) / 2, len(low)
    if len(refused) > most:
        return f"the router refused every call of {len(refused)} of {total} episodes: " + _refusal(
            refused
        )
    if len(cut) > most:
        limits = Counter(_limit_of(turn, one, settings) for turn, one in cut)
        return f"{len(cut)} of {total} answers were cut at {limits.most_common(1)[0][0]}"
    if len(failed) > most:
        return (
            f"{len(failed)} of {total} episodes failed by their agent; `outloop episodes --run "
            f"{run_dir} --failed` says where"
        )
    if len(silent) > most:
        return f"{len(silent)} of {total} episodes made no model call"
    if len(ended) > most:
        return (
            f"{len(ended)} of {total} episodes were ended by a limit: env.episode_deadline_s, "
            "router.max_turns_per_episode or max_tokens_per_episode; raise it"
        )
    return ""


def _refusal(refused: Sequence[Trajectory]) -> str:
    codes = Counter[str]()
    for one in refused:
        codes.update(one.episode.refusals.counts)
    return f"{codes.most_common(1)[0][0]}: {refused[-1].episode.refusals.last}"


def _cut_answer(episode: Trajectory) -> list[tuple[Turn, int]]:
    """The last answer that was cut, with the length of its branch up to there; at most one."""
    found: list[tuple[Turn, int]] = []
    for branch in episode.branches():
        num_tokens = 0
        for turn in branch:
            num_tokens += len(turn.prompt_ids) + len(turn.output_ids)
            if turn.finish_reason == "length":
                found = [(turn, num_tokens)]
    return found


def _limit_of(turn: Turn, num_tokens: int, settings: Settings) -> str:
    """The limit that cut an answer, and what to do."""
    own = settings.sampling.max_new_tokens
    if len(turn.output_ids) >= own:
        return f"sampling.max_new_tokens={own}; raise it"
    context = settings.model.max_context_tokens
    if num_tokens >= context - 1:
        return f"model.max_context_tokens={context}; raise it, with a model that allows it"
    return f"the agent's own limit of {turn.sampling.max_new_tokens} tokens; raise it there"
