"""From ragged takes to the loss of their update, against plain Python in float64.

Groups of zero to five episodes, with one reward or equal ones; episodes without turns, without a
reward, truncated, with one branch, two or three; turns whose tokens may not be trained.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from outloop.buffer.records import Float32, Group, Sampling, Trajectory, Turn
from outloop.buffer.settings import Settings
from outloop.engine.train.data.batch_builder import build_batch, with_reference
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.megatron.model_and_optimizer import Policy
from outloop.engine.train.step.policy_update import rl_update
from outloop.engine.train.step.recompute_logprobs import score, with_proximal

MakeTurn = Callable[..., Turn]
MakeTrajectory = Callable[..., Trajectory]
VOCAB = 400
CLIPS = {"clip_low": 0.1, "clip_high": 0.15}
GSPO = {"loss": "gspo"}
CONSTANT = {"denominator": "constant", "denominator_constant": 9.0}
BUDGET = {"denominator": "budget", "token_budget": 11}
RECOMPUTE = {"proximal": "recompute", "correction_cap": 1.3}
FLOOR = {"correction_floor": 0.7}
CHOICES: list[dict[str, Any]] = [
    {"advantage": "grpo"},
    {"advantage": "rloo", "denominator": "episodes"},
    {"advantage": "grpo", "denominator": "episode_means", "kl": "k3", "kl_coefficient": 0.1},
    {"advantage": "dr_grpo", **BUDGET},
    {"advantage": "dr_grpo", **CONSTANT},
    {"advantage": "reinforce_pp", "kl": "k1", "kl_coefficient": 0.1},
    {"advantage": "reinforce_pp_baseline", "kl": "k2", "kl_coefficient": 0.1},
    {"advantage": "grpo", "kl": "k3", "kl_coefficient": 0.1, "entropy_coefficient": 0.01},
    {"advantage": "grpo", "kl": "k1", "kl_coefficient": 0.2, **GSPO},
    {"advantage": "grpo", "entropy_coefficient": 0.02, **GSPO},
    {"loss": "cispo", "advantage": "rloo"},
    {"loss": "reinforce", "advantage": "rloo", "kl": "k1", "kl_coefficient": 0.1},
    {"correction": "token_tis", **RECOMPUTE},
    {"correction": "sequence_tis", **RECOMPUTE, **GSPO},
    {"correction": "geometric_tis", "kl": "k3", "kl_ratio_cap": 1.1, **RECOMPUTE},
    {"correction": "token_mis", "correction_veto": 0.5, **RECOMPUTE, **FLOOR},
    {"correction": "sequence_mis", "correction_veto": 0.5, "loss": "cispo", **RECOMPUTE, **FLOOR},
    {
        "correction": "geometric_mis",
        "kl": "k2",
        "kl_coefficient": 0.3,
        "entropy_coefficient": 0.02,
        **(RECOMPUTE | {"correction_cap": 1.05, "correction_floor": 0.95}),
    },
    {"opsm_delta": 0.02, "kl": "k3", "kl_coefficient": 0.1, "dual_clip": 1.05},
    {"opsm_delta": 0.05, **GSPO},
    {
        "overlong_penalty": 0.7,
        "overlong_max_tokens": 9,
        "overlong_buffer_tokens": 4,
        "mask_truncated": True,
    },
    {"mask_truncated": True, "kl": "k1", "kl_coefficient": 0.2, **GSPO},
]


SHAPES = ((), (None,), (None, 0), (None, 0, 0), (None, 0, 1, 0))
"""Each turn's parent: no turns, one, a chain, two leaves under one root, three turns deep."""


class Takes:
    """Random takes from a seed."""

    def __init__(self, seed: int, make_turn: MakeTurn, make_trajectory: MakeTrajectory) -> None:
        self._random = np.random.default_rng(seed)
        self._make_turn = make_turn
        self._make_trajectory = make_trajectory

    def take(self) -> list[Group]:
        """Up to five groups, in an order that is not that of admission."""
        groups = [self._group(slot) for slot in range(int(self._random.integers(1, 6)))]
        return [groups[index] for index in self._random.permutation(len(groups))]

    def _group(self, slot: int) -> Group:
        kind = self._random.choice(["mixed", "mixed", "equal", "single"])
        count = 1 if kind == "single" else int(self._random.integers(1, 6))
        rewards = [0.5 if kind == "equal" else float(self._random.normal()) for _ in range(count)]
        return Group(
            group_id=f"g{slot}",
            slot=slot,
            task_id="t",
            group_size=count,
            trajectories=tuple(
                self._make_trajectory(
                    self._turns(),
                    reward=None if self._random.random() < 0.15 else reward,
                    episode_id=f"e{slot}-{index}",
                    group_id=f"g{slot}",
                    outcome="truncated" if self._random.random() < 0.2 else "completed",
                )
                for index, reward in enumerate(rewards)
            ),
        )

    def _turns(self) -> list[Turn]:
        """None, a chain, or a root with two or three leaves; ids unique in the episode."""
        shape = SHAPES[int(self._random.integers(len(SHAPES)))]
        return [
            self._turn(str(index), None if parent is None else str(parent))
            for index, parent in enumerate(shape)
        ]

    def _turn(self, turn_id: str, parent: str | None) -> Turn:
        size = int(self._random.integers(1, 6))
        start = int(self._random.integers(0, size)) if self._random.random() < 0.3 else 0
        greedy = self._random.random() < 0.15
        return self._make_turn(
            turn_id,
            parent=parent,
            prompt=self._random.integers(0, VOCAB, int(self._random.integers(1, 5))),
            output=self._random.integers(0, VOCAB, size),
            logprobs=self._random.normal(-6.0, 0.3, size).tolist(),
            loss_spans=((start, size),),
            sampling=Sampling(temperature=0.0) if greedy else None,
            finish_reason="length" if self._random.random() < 0.1 else "stop",
        )


def reference_logprobs(rows: TrainBatch) -> Float32:
    """A frozen model that finds some tokens less likely than they were when sampled."""
    values = rows.behavior_logprobs - offset(rows.token_ids)
    return np.where(rows.loss_mask, values, 0.0).astype(np.float32)


def offset(token_ids: Any) -> Any:
    """behavior - reference logprob of a token."""
    return 0.05 * (token_ids % 5)


class Row:
    """One branch: its ids, the trained positions that it owns, and what was recorded for them."""

    def __init__(self, path: Sequence[Turn], owned: set[str]) -> None:
        self.ids: list[int] = []
        self.trained: list[int] = []
        self.behavior: list[float] = []
        for turn in path:
            self.ids += turn.prompt_ids.tolist()
            if turn.turn_id in owned and turn.sampling.temperature > 0:
                for low, high in turn.loss_spans:
                    self.trained += range(len(self.ids) + low, len(self.ids) + high)
                    self.behavior += turn.behavior_logprobs[low:high].tolist()
            self.ids += turn.output_ids.tolist()
        self.offsets = [offset(self.ids[position]) for position in self.trained]


def rows_of(trajectory: Trajectory) -> list[Row]:
    """A row for each leaf; a shared turn belongs to the first leaf under it."""
    parents = {turn.turn_id: turn.parent_turn_id for turn in trajectory.turns}
    by_id = {turn.turn_id: turn for turn in trajectory.turns}
    seen: set[str] = set()
    rows = []
    for leaf in [turn_id for turn_id in by_id if turn_id not in parents.values()]:
        names: list[str] = []
        name: str | None = leaf
        while name is not None:
            names.insert(0, name)
            name = parents[name]
        rows.append(Row([by_id[n] for n in names], set(names) - seen))
        seen |= set(names)
    return [row for row in rows if row.trained]


def has_signal(rewards: list[float]) -> bool:
    """At least two, not all equal."""
    return len(rewards) > 1 and max(rewards) - min(rewards) > 1e-9


def statistics(values: list[float], *, less: int = 0) -> tuple[float, float]:
    """Mean and standard deviation: the population's, or the sample's (`less` = 1)."""
    mean = math.fsum(values) / len(values)
    squares = math.fsum((v - mean) ** 2 for v in values)
    return mean, math.sqrt(squares / max(1, len(values) - less))


def advantages_of(rewards: list[list[float]], name: str) -> list[list[float]]:
    """Advantages by group, signal or not."""
    results = []
    centred = [[r - statistics(group)[0] for r in group] if group else [] for group in rewards]
    everyone = [r for group in rewards for r in group]
    spread = [r for group in centred for r in group]
    for group, middle in zip(rewards, centred, strict=True):
        count = len(group)
        if name == "reinforce_pp":
            mean, std = statistics(everyone)
            results.append([(r - mean) / (std + 1e-6) for r in group])
        elif name == "reinforce_pp_baseline":
            results.append([r / (statistics(spread)[1] + 1e-6) for r in middle])
        elif name == "rloo":
            total = math.fsum(group)
            results.append([r - (total - r) / (count - 1) for r in group] if count > 1 else [0.0])
        elif name == "dr_grpo":
            results.append(middle)
        else:
            std = statistics(group, less=1)[1] if group else 0.0
            results.append([r / (std + 1e-6) for r in middle])
    return results


def penalty_of(trajectory: Trajectory, trainer: Any) -> float:
    """What the episode pays for its length."""
    if not trainer.overlong_penalty:
        return 0.0
    generated = sum(len(turn.output_ids) for turn in trajectory.turns)
    free = trainer.overlong_max_tokens - trainer.overlong_buffer_tokens
    share = (generated - free) / trainer.overlong_buffer_tokens
    return trainer.overlong_penalty * min(max(share, 0.0), 1.0)


def is_truncated(trajectory: Trajectory) -> bool:
    """A limit ended the episode, or the answer at the end of one of its branches."""
    parents = {turn.parent_turn_id for turn in trajectory.turns}
    last = [turn for turn in trajectory.turns if turn.turn_id not in parents]
    cut = any(turn.finish_reason == "length" for turn in last)
    return cut or trajectory.episode.outcome == "truncated"


def policy_term(trainer: Any, ratio: float, advantage: float, logprob: float) -> float:
    """The policy's loss of one token."""
    cut = min(max(ratio, 1 - trainer.clip_low), 1 + trainer.clip_high)
    if trainer.loss == "reinforce":
        return -advantage * logprob
    if trainer.loss == "cispo":
        return -cut * advantage * logprob
    objective = min(ratio * advantage, cut * advantage)
    if advantage < 0:
        objective = max(objective, trainer.dual_clip * advantage)
    return -objective


def token_losses(row: Row, advantage: float, table: np.ndarray, trainer: Any) -> float:
    """The summed loss of one branch; `table` [T, V] are logprobs of what follows each position."""
    policy = [float(table[position - 1, row.ids[position]]) for position in row.trained]
    old = policy if trainer.proximal == "recompute" else row.behavior
    to_policy = [math.exp(p - b) for p, b in zip(policy, row.behavior, strict=True)]
    weights = correction_of(to_policy, trainer)
    mean_gap = math.fsum(p - o for p, o in zip(policy, old, strict=True)) / len(policy)
    drift = math.fsum(b - p for p, b in zip(policy, row.behavior, strict=True)) / len(policy)
    total = 0.0
    for index, position in enumerate(row.trained):
        if weights[index] == 0.0:
            continue
        ratio = math.exp(mean_gap if trainer.loss == "gspo" else policy[index] - old[index])
        loss = policy_term(trainer, ratio, advantage, policy[index]) * weights[index]
        if trainer.opsm_delta and advantage < 0 and drift > trainer.opsm_delta:
            loss = 0.0
        distance = policy[index] - (row.behavior[index] - row.offsets[index])
        weight = min(to_policy[index], trainer.kl_ratio_cap)
        if trainer.kl == "k2":
            loss += trainer.kl_coefficient * weight * distance**2 / 2
        if trainer.kl == "k3":
            loss += trainer.kl_coefficient * weight * (math.exp(-distance) - 1 + distance)
        logprobs = table[position - 1]
        loss += trainer.entropy_coefficient * float((np.exp(logprobs) * logprobs).sum())
        total += loss
    return total


def correction_of(ratios: list[float], trainer: Any) -> list[float]:
    """Importance weights from the behavior policy to the weights before the update."""
    cap, floor = trainer.correction_cap, trainer.correction_floor
    if trainer.correction_veto and min(ratios) < trainer.correction_veto:
        return [0.0] * len(ratios)
    if trainer.correction.startswith("sequence"):
        ratios = [math.prod(ratios)] * len(ratios)
    if trainer.correction.startswith("geometric"):
        ratios = [math.prod(ratios) ** (1 / len(ratios))] * len(ratios)
    if trainer.correction.endswith("tis"):
        return [min(ratio, cap) for ratio in ratios]
    if trainer.correction.endswith("mis"):
        return [ratio if floor <= ratio <= cap else 0.0 for ratio in ratios]
    return [1.0] * len(ratios)


def wanted_loss(groups: list[Group], chosen: Settings, model: Any) -> float | None:
    """The loss of the take's one update; None when nothing can be trained."""
    trainer = chosen.trainer
    scored = [[t for t in group.trajectories if t.episode.reward is not None] for group in groups]
    verified = [[t.episode.reward.value for t in group] for group in scored]
    rewards = [[t.episode.reward.value - penalty_of(t, trainer) for t in group] for group in scored]
    # What can teach anything is decided on what the verifier said, before any penalty.
    signal, differs = signal_of(verified, trainer), signal_of(rewards, trainer)
    kept = [
        index
        for index, group in enumerate(scored)
        if group and (signal[index] or not chosen.buffer.drop_zero_signal)
    ]
    counted = list(range(len(groups)))
    if trainer.kl == "k1":
        counted = kept
        for index in kept:
            for place, trajectory in enumerate(scored[index]):
                gaps = [gap for row in rows_of(trajectory) for gap in row.offsets]
                rewards[index][place] -= trainer.kl_coefficient * math.fsum(gaps)
    teaches = [has and still for has, still in zip(signal, differs, strict=True)]
    if trainer.kl == "k1" and trainer.advantage != "grpo":
        differs = signal_of(rewards, trainer)
        teaches = [index in kept and has for index, has in enumerate(differs)]
    values = advantages_of([rewards[index] for index in counted], trainer.advantage)
    advantages = dict(zip(counted, values, strict=True))
    total, num_tokens, num_episodes = 0.0, 0, 0
    for index in kept:
        for trajectory, value in zip(scored[index], advantages[index], strict=True):
            if trainer.mask_truncated and is_truncated(trajectory):
                continue
            rows = rows_of(trajectory)
            count = sum(len(row.trained) for row in rows)
            num_tokens, num_episodes = num_tokens + count, num_episodes + (count > 0)
            for row in rows:
                with torch.no_grad():
                    logits = model(torch.tensor([row.ids])).logits[0]
                table = logits.log_softmax(-1).numpy()
                loss = token_losses(row, value if teaches[index] else 0.0, table, trainer)
                total += loss / count if trainer.denominator == "episode_means" else loss
    if num_tokens == 0:
        return None
    scale = {
        "tokens": num_tokens,
        "episodes": num_episodes,
        "episode_means": num_episodes,
        "budget": num_episodes * (trainer.token_budget or 0),
        "constant": trainer.denominator_constant,
    }
    return total / scale[trainer.denominator]


def signal_of(rewards: list[list[float]], trainer: Any) -> list[bool]:
    """Whether each group's rewards differ, or the take's where that is the baseline."""
    if trainer.advantage == "reinforce_pp":
        take = has_signal([r for group in rewards for r in group])
        return [take and bool(group) for group in rewards]
    return [has_signal(group) for group in rewards]


@pytest.mark.medium
@examples(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 10**6), choice=st.sampled_from(CHOICES), keeps_equal=st.booleans())
def test_the_loss_of_a_ragged_take_is_that_of_the_formulas(
    seed: int,
    choice: dict[str, Any],
    keeps_equal: bool,
    make_turn: MakeTurn,
    make_trajectory: MakeTrajectory,
    make_policy: Callable[..., Policy],
    double_model: Any,
) -> None:
    """Every advantage, loss, KL and correction, with every kind of group, to one number."""
    chosen = Settings(
        model={"path": "m"},
        buffer={"drop_zero_signal": not keeps_equal},
        trainer=({} if choice.get("loss") == "reinforce" else CLIPS)
        | {"max_microbatch_tokens": 60}
        | choice,
    )
    groups = Takes(seed, make_turn, make_trajectory).take()
    batch = build_batch(groups, chosen, policy_version=0, vocab_size=VOCAB)
    if chosen.trainer.kl != "none" and len(batch.rows):
        reference = reference_logprobs(batch.rows)
        with_kl, _ = with_reference(batch.rows, batch.credit, reference, chosen)
        batch = dataclasses.replace(batch, rows=with_kl)
    wanted = wanted_loss(groups, chosen, double_model)
    updates = batch.updates(1)
    if wanted is None:
        assert not any(updates)
        return
    policy = make_policy()

    (rows,), taken = updates, batch.rows
    if chosen.trainer.proximal == "recompute":
        column = score(policy.model, taken, rows=rows, max_tokens=60, on_microbatch=lambda: None)
        taken, _ = with_proximal(taken, column, chosen.trainer, rows=rows)
    report = rl_update(
        policy, taken, chosen.trainer, rows=rows, policy_version=0, on_microbatch=lambda: None
    )
    assert report.loss == pytest.approx(wanted, rel=2e-4, abs=2e-5)
