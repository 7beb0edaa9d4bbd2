"""Groups of records as advantage functions see them, and what their rewards were.

A reward that names a turn, a branch or tokens that the episode does not have is refused, never left
out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from outloop.buffer.errors import RecordError
from outloop.buffer.records import SOURCE, Group, Reward, TokenReward, Trajectory, Turn
from outloop.engine.train.algorithms.credit import ScoredEpisode, ScoredGroup, ScoredTurn
from outloop.engine.train.data.samples import is_truncated


def scored(group: Group) -> tuple[Trajectory, ...]:
    """The group's episodes that count in its statistics: those with a reward."""
    return tuple(t for t in group.trajectories if t.episode.reward is not None)


def source_of(group: Group) -> str:
    """The name of the list of tasks that it is from; empty where there is one list alone."""
    sources = {t.episode.metadata.get(SOURCE, "") for t in scored(group)}
    return sources.pop() if len(sources) == 1 else ""


def scored_group(group: Group, *, has_parts: bool = True) -> ScoredGroup:
    """The rewards of a group with their structure.

    Args:
        has_parts: false: what turns, branches and tokens earned is left out.

    Raises:
        RecordError: a reward belongs to nothing that its episode has.
    """
    trajectories = scored(group)
    return ScoredGroup(
        group_id=group.group_id,
        task_id=group.task_id,
        source=source_of(group),
        episodes=tuple(_scored_episode(t, has_parts=has_parts) for t in trajectories),
    )


def _scored_episode(trajectory: Trajectory, *, has_parts: bool) -> ScoredEpisode:
    episode, reward = trajectory.episode, trajectory.episode.reward
    assert reward is not None
    parts = reward if has_parts else Reward(value=reward.value)
    places = {turn.turn_id: place for place, turn in enumerate(trajectory.turns)}
    branches = tuple(
        tuple(places[turn.turn_id] for turn in branch) for branch in trajectory.branches()
    )
    spans = _check_parts(episode.episode_id, parts, trajectory.turns, {b[-1] for b in branches})
    requests = _requests(trajectory.turns)
    return ScoredEpisode(
        episode_id=episode.episode_id,
        reward=float(reward.value),
        components=reward.components,
        outcome=episode.outcome,
        is_truncated=is_truncated(trajectory),
        turns=tuple(
            ScoredTurn(
                turn_id=turn.turn_id,
                parent=None if turn.parent_turn_id is None else places[turn.parent_turn_id],
                request=requests[place],
                num_tokens=len(turn.output_ids),
                oldest_version=turn.trained_version_bounds[0],
                is_cut=turn.finish_reason == "length",
                reward=float(parts.turns.get(turn.turn_id, 0.0)),
                branch_reward=float(parts.branches.get(turn.turn_id, 0.0)),
                spans=tuple((s.start, s.end, float(s.value)) for s in spans[turn.turn_id]),
            )
            for place, turn in enumerate(trajectory.turns)
        ),
        branches=branches,
    )


def _check_parts(
    episode_id: str, reward: Reward, turns: Sequence[Turn], leaves: set[int]
) -> Mapping[str, list[TokenReward]]:
    """The spans of each turn, in order; raises if a part of the reward has nothing to belong to."""
    sizes = {turn.turn_id: len(turn.output_ids) for turn in turns}
    ends = {turns[place].turn_id for place in leaves}
    named = [*reward.turns, *(span.turn_id for span in reward.tokens)]
    if unknown := [name for name in named if name not in sizes]:
        raise RecordError(
            f"episode_id={episode_id}: its reward names turn {unknown[0]!r}, which is none of its "
            f"{len(turns)} turns"
        )
    if unknown := [name for name in reward.branches if name not in ends]:
        raise RecordError(
            f"episode_id={episode_id}: its reward names branch {unknown[0]!r}, which is the last "
            f"turn of none of its {len(ends)} branches"
        )
    spans: dict[str, list[TokenReward]] = defaultdict(list)
    for span in sorted(reward.tokens, key=lambda span: span.start):
        if span.end > sizes[span.turn_id]:
            raise RecordError(
                f"episode_id={episode_id}: its reward names tokens {span.start}..{span.end} of "
                f"turn {span.turn_id!r}, which has {sizes[span.turn_id]}"
            )
        spans[span.turn_id].append(span)
    return spans


def _requests(turns: Sequence[Turn]) -> list[int]:
    """A number for each turn that the choices of one request share."""
    last: dict[tuple[str | None, float], tuple[int, int]] = {}
    found: list[int] = []
    for place, turn in enumerate(turns):
        key = (turn.parent_turn_id, turn.started_at)
        request, choice = last.get(key, (place, turn.choice_index))
        if turn.choice_index <= choice:
            request = place
        last[key] = (request, turn.choice_index)
        found.append(request)
    return found


def reward_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Means of what the verifier named, over all scored episodes of the take and by task source.

    A component that an episode lacks is left out of its mean, not counted as 0.
    """
    metrics: dict[str, float] = {}
    everyone = [episode for group in groups for episode in group.episodes]
    metrics |= {f"reward/{name}": value for name, value in _means(everyone).items()}
    if any(turn.earned for episode in everyone for turn in episode.turns):
        metrics["train/return_mean"] = float(np.mean([episode.total for episode in everyone]))
    for source in sorted({group.source for group in groups if group.source}):
        members = [e for group in groups if group.source == source for e in group.episodes]
        if not members:
            continue
        metrics[f"source/{source}/reward_mean"] = float(np.mean([e.reward for e in members]))
        metrics[f"source/{source}/episodes"] = len(members)
        for name, value in _means(members).items():
            metrics[f"source/{source}/reward/{name}"] = value
    return metrics


def _means(episodes: Sequence[ScoredEpisode]) -> dict[str, float]:
    found: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        for name, value in episode.components.items():
            found[name].append(value)
    return {name: float(np.mean(values)) for name, values in sorted(found.items())}
