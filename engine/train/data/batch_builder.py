"""From taken groups to the batch of a step.

Decides which groups are dropped and why, measures their rewards, and splits a take into updates.
Statistics come before filters, filters keep admission order, and a group is trained whole or
dropped whole.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt
import structlog

from outloop.buffer.errors import RecordError, UpdateRefused
from outloop.buffer.records import DropReason, Float32, Group, Int32, Trajectory
from outloop.buffer.routed_experts import RoutingShape, replayed_shape
from outloop.buffer.settings import Settings
from outloop.engine.train.algorithms.advantages import Float64
from outloop.engine.train.algorithms.credit import (
    VALUE_ADVANTAGES,
    BySource,
    GroupAdvantage,
    ScoredGroup,
    divides_by_group,
    signals_of,
    take_credits,
)
from outloop.engine.train.algorithms.kl import k1
from outloop.engine.train.algorithms.reward_shaping import num_generated_tokens, overlong_penalty
from outloop.engine.train.algorithms.user_functions import advantage_of, filter_of
from outloop.engine.train.data.samples import (
    Sample,
    build_samples,
    is_cut,
    is_truncated,
    oldest_trained_version,
)
from outloop.engine.train.data.scored_groups import reward_metrics, scored, scored_group
from outloop.engine.train.data.train_batch import TrainBatch

Episodes = list[tuple[Sample, ...]]
"""The samples of each scored episode of a group."""
_TOO_LARGE = (
    "advantages of this step are not finite: its rewards, less penalties and times their source's "
    "weight, are too large for float32. Lower trainer.overlong_penalty, trainer.kl_coefficient or "
    "trainer.sources.NAME.weight, or bound what the verifier or trainer.advantage_path gives"
)
_log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True, slots=True)
class Credit:
    """The rewards of a take and the rows that they are for; sent to every rank with the rows."""

    groups: tuple[ScoredGroup, ...]
    """In admission order, dropped ones too; rewards less penalties."""
    teaches: tuple[bool, ...]
    """Whether each group has signal."""
    rows: Mapping[int, tuple[tuple[int, ...], ...]]
    """By kept group: the rows of each scored episode."""

    def advantages(
        self, rows: TrainBatch, *, advantage: str | GroupAdvantage, counts_dropped: bool = True
    ) -> Float32:
        """The column [T]: what its episode, its turn or the token itself was given.

        Args:
            advantage: of the settings, `advantage_of`.
            counts_dropped: whether dropped groups count in a take's statistics.

        Raises:
            UpdateRefused: an advantage, or a statistic of the rewards, is not finite.
        """
        # A function of the user's own may make use of infinity on its way.
        is_own = not isinstance(advantage, str)
        try:
            with np.errstate(over="ignore" if is_own else "raise"):
                found = take_credits(
                    self.groups,
                    advantage,
                    signal=self.teaches,
                    counted=[counts_dropped or i in self.rows for i in range(len(self.groups))],
                )
        except FloatingPointError as error:
            raise UpdateRefused(_TOO_LARGE) from error
        column = np.zeros(rows.token_ids.shape, np.float32)
        with np.errstate(over="ignore"):
            for index, episodes in self.rows.items():
                for members, value in zip(episodes, found[index], strict=True):
                    for row in members:
                        where = slice(rows.starts[row], rows.starts[row + 1])
                        if isinstance(value, float):
                            column[where] = value
                        else:
                            _fill_turns(column[where], rows.turns[where], value)
        if not np.isfinite(column).all():
            raise UpdateRefused(_TOO_LARGE)
        return column


def _fill_turns(column: Float32, turns: Int32, value: Sequence[Float64]) -> None:
    """Give the output tokens of a row what their turns were given."""
    for place in np.unique(turns[turns >= 0]).tolist():
        column[turns == place] = value[place]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What a step trains, what it drops, and what was measured before either was decided."""

    rows: TrainBatch
    """Of all kept groups, with advantages."""
    trained: tuple[tuple[int, ...], ...]
    """The rows of every kept group, in admission order, without those of masked episodes."""
    group_ids: tuple[str, ...]
    """The kept groups, in the same order."""
    dropped: tuple[tuple[str, DropReason], ...]
    credit: Credit
    metrics: dict[str, float]
    sentences: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What is wrong with each group that was dropped as malformed."""
    contexts: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    """By episode of a kept group, if it has any: ids that only the teacher sees, in front of its
    rows."""

    def updates(self, num_updates: int, *, num_epochs: int = 1, seed: int = 0) -> list[list[int]]:
        """The rows of each update: `num_updates` of them, or as many as there are groups, for each
        of `num_epochs` passes.

        Whole groups, each in one update of a pass; the numbers of groups differ by one at most, so
        that no update's tokens weigh several times what another's do. The first pass keeps the
        order of admission, the others deal the groups again by `seed`.
        """
        groups = [members for members in self.trained if members]
        count = min(num_updates, len(groups))
        bounds = [len(groups) * index // count for index in range(count + 1)] if count else []
        order = np.arange(len(groups))
        generator = np.random.default_rng(seed)
        found: list[list[int]] = []
        for _ in range(num_epochs):
            dealt = [groups[index] for index in order.tolist()]
            found += [list(chain.from_iterable(dealt[a:b])) for a, b in pairwise(bounds)]
            order = generator.permutation(len(groups))
        return found


def with_reference(
    rows: TrainBatch, credit: Credit, reference: Float32, settings: Settings
) -> tuple[TrainBatch, dict[str, float]]:
    """The rows with the reference's logprobs [T], and for k1 with the advantages of rewards less
    the KL penalty; and what was measured. Every rank computes the same from the same columns.

    A kept group without signal learns from its KL then, unless the advantage divides by the
    group's own deviation, which would blow it up. Dropped groups, which pay nothing, count in
    no statistics of it.
    """
    trainer = settings.trainer
    behavior = rows.behavior_logprobs
    assert behavior is not None
    rows = rows.with_columns(reference_logprobs=reference)
    gaps = k1(behavior, reference)
    mask = rows.loss_mask
    metrics = {"train/kl": _mean(gaps[mask])}
    if trainer.kl != "k1" or advantage_of(settings) in VALUE_ADVANTAGES:
        # With a critic each token pays for itself (step/critic_update).
        return rows, metrics
    by_row = [float(gaps[a:b][mask[a:b]].sum()) for a, b in pairwise(rows.starts.tolist())]
    rewards = [group.rewards.tolist() for group in credit.groups]
    penalties: list[float] = []
    for index, episodes in credit.rows.items():
        for place, members in enumerate(episodes):
            penalties.append(trainer.kl_coefficient * sum(by_row[row] for row in members))
            rewards[index][place] -= penalties[-1]
    advantage = advantage_of(settings)
    groups = tuple(
        group.with_rewards(values) for group, values in zip(credit.groups, rewards, strict=True)
    )
    credit = dataclasses.replace(credit, groups=groups)
    if not divides_by_group(advantage):
        credit = dataclasses.replace(credit, teaches=tuple(signals_of(groups, advantage)))
    column = credit.advantages(rows, advantage=advantage, counts_dropped=False)
    metrics["train/kl_penalty_mean"] = _mean(penalties)
    return rows.with_columns(advantages=column), metrics


def build_batch(
    groups: Sequence[Group],
    settings: Settings,
    *,
    policy_version: int,
    vocab_size: int,
    staleness_of: Callable[[int], int] | None = None,
    max_age: int | None = None,
    filtered: MutableMapping[str, str] | None = None,
    context_of: Callable[[Trajectory], tuple[int, ...]] | None = None,
) -> Batch:
    """Measure `groups`, drop what cannot be trained, and build rows from the rest.

    Drops: stale (a trained token is older than `max_age` publishes), failed (no scored
    episode), no_signal (equal rewards, unless buffer.drop_zero_signal is off), filtered
    (buffer.filter_path said so), overlong (a sample exceeds trainer.max_microbatch_tokens),
    malformed (ids outside the vocabulary, or a record that contradicts itself).

    Advantages come from rewards less the overlong penalty; with a KL term, `with_reference`
    follows on every rank. Whether a group carries signal is decided on the verifier's rewards
    alone, before either (DAPO, arXiv:2503.14476, equation 11 filters on correctness): an unsolved
    task with one overlong attempt teaches nothing. A kept group without signal, or whose rewards
    less the overlong penalty are equal, has advantages of zero. Statistics over a take include
    groups that are dropped.

    Args:
        staleness_of: publishes from a version to `policy_version`; left out: their difference.
        max_age: left out: that of the settings.
        filtered: what buffer.filter_path said of each group that it was asked about; it is asked
            about no group twice.
        context_of: ids that only the teacher sees of an episode; None: there are none.
    """
    if staleness_of is None:

        def staleness_of(version: int) -> int:
            return policy_version - version

    ordered = sorted(groups, key=lambda group: group.slot)
    advantage = advantage_of(settings)
    penalties = [overlong_penalties(group, settings) for group in ordered]
    sentences: dict[str, str] = {}
    earned = tuple(_scored_group(group, sentences) for group in ordered)
    paid = tuple(
        group.with_rewards((group.rewards - taken_off).tolist())
        for group, taken_off in zip(earned, penalties, strict=True)
    )
    signal = signals_of(earned, advantage)
    differs = signals_of(paid, advantage)
    routing = replayed_shape(settings)
    episodes, dropped = _sift(
        ordered,
        earned,
        signal,
        settings,
        routing=routing,
        sentences=sentences,
        staleness_of=staleness_of,
        max_age=settings.buffer.max_age if max_age is None else max_age,
        vocab_size=vocab_size,
        filtered={} if filtered is None else filtered,
        context_of=context_of,
    )
    samples = [
        dataclasses.replace(sample, is_imitated=_is_imitated(earned[index], advantage))
        for index, of_group in episodes.items()
        for sample in chain(*of_group)
    ]
    credit = Credit(
        groups=paid,
        teaches=tuple(has and still for has, still in zip(signal, differs, strict=True)),
        rows=_numbered(episodes),
    )
    rows = TrainBatch.of(samples)
    rows = rows.with_columns(advantages=credit.advantages(rows, advantage=advantage))
    trained = tuple(
        _without_masked(ordered[index], members, settings) for index, members in credit.rows.items()
    )
    return Batch(
        rows=rows,
        trained=trained,
        group_ids=tuple(ordered[index].group_id for index in episodes),
        dropped=tuple(dropped),
        credit=credit,
        metrics=_take_metrics(ordered, signal)
        | reward_metrics(earned)
        | _penalty_metrics(penalties, settings)
        | _sample_metrics([samples[row] for row in chain(*trained)], staleness_of)
        | (_replay_metrics([samples[row] for row in chain(*trained)]) if routing else {}),
        sentences=sentences,
        contexts={} if context_of is None else _contexts(ordered, episodes, context_of),
    )


def _is_imitated(group: ScoredGroup, advantage: str | GroupAdvantage) -> bool:
    return isinstance(advantage, BySource) and advantage.imitates(group.source)


def _contexts(
    groups: Sequence[Group],
    kept: Mapping[int, Episodes],
    context_of: Callable[[Trajectory], tuple[int, ...]],
) -> dict[str, tuple[int, ...]]:
    """What the teacher alone sees of each episode of the kept groups, where there is something."""
    found = {t.episode.episode_id: context_of(t) for index in kept for t in scored(groups[index])}
    return {name: ids for name, ids in found.items() if ids}


def _scored_group(group: Group, sentences: MutableMapping[str, str]) -> ScoredGroup:
    """The group's rewards; without those of parts, and with a sentence, if these contradict it."""
    try:
        return scored_group(group)
    except RecordError as error:
        _log.warning("group_malformed", group_id=group.group_id, sentence=str(error))
        sentences[group.group_id] = str(error)
        return scored_group(group, has_parts=False)


def group_rewards(group: Group) -> list[float]:
    """Rewards of the scored episodes, each once, zero-turn episodes included."""
    return [t.episode.reward.value for t in scored(group) if t.episode.reward is not None]


def _sift(
    ordered: Sequence[Group],
    earned: Sequence[ScoredGroup],
    signal: Sequence[bool],
    settings: Settings,
    *,
    routing: RoutingShape | None,
    sentences: MutableMapping[str, str],
    staleness_of: Callable[[int], int],
    max_age: int,
    vocab_size: int,
    filtered: MutableMapping[str, str],
    context_of: Callable[[Trajectory], tuple[int, ...]] | None,
) -> tuple[dict[int, Episodes], list[tuple[str, DropReason]]]:
    """Samples of the groups that can be trained, by index, and why the others cannot.

    `routing`: of the experts that are replayed, if any are.
    `sentences`: what is wrong with those that are malformed; more are added.
    """
    keep = filter_of(settings)
    dropped: list[tuple[str, DropReason]] = []
    episodes: dict[int, Episodes] = {}
    for index, group in enumerate(ordered):
        rows: Episodes = []
        reason = _reason_to_drop(
            group, settings, staleness_of, max_age=max_age, has_signal=signal[index]
        )
        if group.group_id in sentences and reason in (None, "no_signal"):
            reason = "malformed"
        if reason is None and keep is not None:
            if group.group_id not in filtered:
                filtered[group.group_id] = sentence = keep(earned[index])
                if sentence:
                    _log.info("group_filtered", group_id=group.group_id, sentence=sentence)
            reason = "filtered" if filtered[group.group_id] else None
        if reason is None and context_of is not None:
            reason = _reason_in_contexts(group, context_of, settings)
        if reason is None:
            try:
                rows = _group_samples(group, settings, routing)
                reason = _reason_in_samples(list(chain(*rows)), settings, vocab_size)
            except RecordError as error:
                _log.warning("group_malformed", group_id=group.group_id, sentence=str(error))
                sentences[group.group_id], reason = str(error), "malformed"
        if reason is None:
            episodes[index] = rows
        else:
            dropped.append((group.group_id, reason))
    return episodes, dropped


def _reason_in_contexts(
    group: Group, context_of: Callable[[Trajectory], tuple[int, ...]], settings: Settings
) -> DropReason | None:
    teacher = settings.trainer.teacher
    assert teacher is not None
    longest = max((len(context_of(trajectory)) for trajectory in scored(group)), default=0)
    if longest <= teacher.max_context_tokens:
        return None
    _log.warning(
        "teacher_context_too_long",
        group_id=group.group_id,
        sentence=f"the text for the teacher has {longest} ids, trainer.teacher.max_context_tokens="
        f"{teacher.max_context_tokens} are allowed; the group is dropped",
    )
    return "overlong"


def overlong_penalties(group: Group, settings: Settings) -> list[float]:
    """What each scored episode of the group pays for its length."""
    trainer = settings.trainer
    if not trainer.overlong_penalty:
        return [0.0] * len(scored(group))
    assert trainer.overlong_max_tokens is not None
    return [
        overlong_penalty(
            num_generated_tokens(trajectory),
            max_tokens=trainer.overlong_max_tokens,
            buffer_tokens=trainer.overlong_buffer_tokens,
            penalty=trainer.overlong_penalty,
        )
        for trajectory in scored(group)
    ]


def _reason_to_drop(
    group: Group,
    settings: Settings,
    staleness_of: Callable[[int], int],
    *,
    max_age: int,
    has_signal: bool,
) -> DropReason | None:
    versions = [oldest_trained_version(trajectory) for trajectory in group.trajectories]
    if any(version is not None and staleness_of(version) > max_age for version in versions):
        return "stale"
    if not scored(group):
        return "failed"
    if settings.buffer.drop_zero_signal and not has_signal:
        return "no_signal"
    return None


def _is_masked(trajectory: Trajectory, settings: Settings) -> bool:
    return settings.trainer.mask_truncated and is_truncated(trajectory)


def _group_samples(group: Group, settings: Settings, routing: RoutingShape | None) -> Episodes:
    """The samples of every scored episode.

    An episode that is left out of the loss has none, unless its reward needs them.
    """
    needs_all = settings.trainer.kl == "k1"
    return [
        build_samples(trajectory, routing=routing, has_supports=settings.trainer.teacher is None)
        if needs_all or not _is_masked(trajectory, settings)
        else ()
        for trajectory in scored(group)
    ]


def _numbered(episodes: Mapping[int, Episodes]) -> dict[int, tuple[tuple[int, ...], ...]]:
    """By group the rows of each episode, counted through all groups."""
    numbers: dict[int, tuple[tuple[int, ...], ...]] = {}
    first = 0
    for index, of_group in episodes.items():
        rows = []
        for samples in of_group:
            rows.append(tuple(range(first, first + len(samples))))
            first += len(samples)
        numbers[index] = tuple(rows)
    return numbers


def _without_masked(
    group: Group, episodes: Sequence[tuple[int, ...]], settings: Settings
) -> tuple[int, ...]:
    """The rows of a group's episodes that are trained."""
    return tuple(
        row
        for trajectory, members in zip(scored(group), episodes, strict=True)
        if not _is_masked(trajectory, settings)
        for row in members
    )


def _reason_in_samples(
    samples: Sequence[Sample], settings: Settings, vocab_size: int
) -> DropReason | None:
    if any(sample.num_tokens > settings.trainer.max_microbatch_tokens for sample in samples):
        return "overlong"
    for sample in samples:
        if (highest := int(sample.token_ids.max())) >= vocab_size:
            raise RecordError(
                f"episode_id={sample.episode_id}: token_ids hold id {highest}; ids below the "
                f"model's vocab_size={vocab_size} are allowed"
            )
    return None


def _take_metrics(groups: Sequence[Group], signal: Sequence[bool]) -> dict[str, float]:
    trajectories = [t for group in groups for t in group.trajectories]
    rewards = np.array([r for group in groups for r in group_rewards(group)], np.float64)
    outcomes = [t.episode.outcome for t in trajectories]
    lengths = [num_generated_tokens(t) for t in trajectories]
    return {
        "train/reward_mean": _mean(rewards),
        "train/reward_std": float(rewards.std()) if len(rewards) else float("nan"),
        "train/groups_with_signal_share": _mean(signal),
        "train/episodes": len(trajectories),
        "train/turns_per_episode": _mean([len(t.turns) for t in trajectories]),
        "train/branches_per_episode": _mean([len(t.branches()) for t in trajectories]),
        "train/truncated_share": _mean([is_truncated(t) for t in trajectories]),
        "train/length_cut_share": _mean([is_cut(t) for t in trajectories]),
        "train/generated_tokens_mean": _mean(lengths),
        "train/generated_tokens_max": max(lengths, default=float("nan")),
        "train/length_reward_correlation": _length_reward_correlation(groups),
        "train/failed_share": _mean([outcome == "failed" for outcome in outcomes]),
    } | _refusal_metrics(trajectories)


def _refusal_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Only where the router refused a call."""
    counts = Counter[str]()
    for trajectory in trajectories:
        counts.update(trajectory.episode.refusals.counts)
    return {f"refused/{code}": number for code, number in sorted(counts.items())}


def _length_reward_correlation(groups: Sequence[Group]) -> float:
    """Pearson's, over the scored episodes of the take; NaN where either does not vary."""
    episodes = [t for group in groups for t in scored(group)]
    lengths = np.array([num_generated_tokens(t) for t in episodes], np.float64)
    rewards = np.array([r for group in groups for r in group_rewards(group)], np.float64)
    if len(episodes) < 2 or not lengths.std() or not rewards.std():
        return float("nan")
    return float(np.corrcoef(lengths, rewards)[0, 1])


def _penalty_metrics(penalties: Sequence[list[float]], settings: Settings) -> dict[str, float]:
    if not settings.trainer.overlong_penalty:
        return {}
    return {"train/overlong_penalty_mean": _mean(list(chain(*penalties)))}


def _sample_metrics(
    samples: Sequence[Sample], staleness_of: Callable[[int], int]
) -> dict[str, float]:
    staleness = [staleness_of(sample.oldest_version) for sample in samples]
    return {
        "train/samples": len(samples),
        "train/staleness_mean": _mean(staleness),
        "train/staleness_max": max(staleness, default=float("nan")),
    } | _support_metrics(samples)


def _support_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Only where tokens were sampled among some ids."""
    known = [sample.supports.counts for sample in samples if sample.supports is not None]
    if not known:
        return {}
    counts = np.concatenate(known)
    num_trained = sum(sample.num_trained_tokens for sample in samples)
    return {
        "train/support_share": int((counts > 0).sum()) / num_trained,
        "train/support_ids_mean": float(counts[counts > 0].mean()),
    }


def _replay_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    known: list[npt.NDArray[np.bool_]] = []
    for sample in samples:
        predicted_from = np.flatnonzero(sample.loss_mask) - 1
        assert sample.routed_experts is not None
        rows = sample.routed_experts[predicted_from].view(np.uint8)
        known.append((rows.reshape(len(predicted_from), -1) != 0xFF).any(axis=1))
    return {"train/replayed_routes_share": _mean(np.concatenate(known) if known else [])}


def _mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else float("nan")
