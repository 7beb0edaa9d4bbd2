"""Each recipe against its paper's objective, in float64 on ragged data.

A paper's objective is written here from its equation, with its constants, and knows nothing of our
settings; the recipe's loss is that of a whole update of the tiny policy, from taken groups on.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outloop.buffer.errors import SettingsError
from outloop.buffer.records import Float32, Group, Trajectory, Turn
from outloop.buffer.settings import Settings, build_settings, with_overrides
from outloop.buffer.settings.recipes import DERIVED, LOSS_DEFAULTS, RECIPES, recipe_sentence
from outloop.engine.train.data.batch_builder import build_batch, with_reference
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.megatron.model_and_optimizer import Policy
from outloop.engine.train.step.critic_update import with_values
from outloop.engine.train.step.policy_update import rl_update
from outloop.engine.train.step.recompute_logprobs import score, with_proximal

MakeTurn = Callable[..., Turn]
MakeTrajectory = Callable[..., Trajectory]
VOCAB = 400
MAX_NEW_TOKENS = 10
GROUP_SIZE = 4


@dataclasses.dataclass
class Played:
    """One answer: its reward, and logprobs of its tokens under three policies."""

    reward: float
    policy: list[float]
    behavior: list[float]
    reference: list[float]

    @property
    def ratios(self) -> list[float]:
        """policy / behavior."""
        return [math.exp(p - b) for p, b in zip(self.policy, self.behavior, strict=True)]


Take = list[list[Played]]


def mean(values: Sequence[float]) -> float:
    """Their mean."""
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float], less: int) -> float:
    """Their standard deviation over n - less."""
    middle = mean(values)
    return math.sqrt(math.fsum((v - middle) ** 2 for v in values) / (len(values) - less))


def clipped(ratio: float, advantage: float, low: float, high: float) -> float:
    """PPO's min(r A, clip(r) A)."""
    return min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def group_advantages(group: list[Played]) -> list[float]:
    """GRPO: rewards less their mean over their deviation."""
    rewards = [one.reward for one in group]
    std = deviation(rewards, 1)
    return [0.0 if std == 0 else (r - mean(rewards)) / (std + 1e-6) for r in rewards]


def k3(one: Played) -> list[float]:
    """GRPO's equation 4 at each token; its weight is 1 on policy and policy / behavior off it."""
    pairs = zip(one.policy, one.reference, one.ratios, strict=True)
    return [min(w, 2.0) * (math.exp(r - p) - (r - p) - 1) for p, r, w in pairs]


def grpo(take: Take) -> float:
    """arXiv:2402.03300, equation 3: mean over answers of the mean over their tokens."""
    terms = []
    for group in take:
        for one, advantage in zip(group, group_advantages(group), strict=True):
            objective = [clipped(r, advantage, 0.2, 0.2) for r in one.ratios]
            terms.append(mean([o - 0.04 * d for o, d in zip(objective, k3(one), strict=True)]))
    return mean(terms)


def dr_grpo(take: Take) -> float:
    """arXiv:2503.20783, section 3.2: no deviation, and the budget in place of each length."""
    terms = []
    for group in take:
        middle = mean([one.reward for one in group])
        for one in group:
            objective = [clipped(r, one.reward - middle, 0.2, 0.2) for r in one.ratios]
            terms.append(math.fsum(objective) / MAX_NEW_TOKENS)
    return mean(terms)


def dapo(take: Take) -> float:
    """arXiv:2503.14476: equation 11 keeps groups with 0 < correct < G, equation 13 is taken off
    their rewards, equations 9, 10 and 12 are the rest."""
    total, count = 0.0, 0
    buffer = MAX_NEW_TOKENS // 5
    for group in take:
        if not 0 < sum(one.reward > 0 for one in group) < len(group):
            continue
        excess = [(len(one.policy) - (MAX_NEW_TOKENS - buffer)) / buffer for one in group]
        shaped = [
            dataclasses.replace(one, reward=one.reward - min(max(x, 0.0), 1.0))
            for one, x in zip(group, excess, strict=True)
        ]
        for one, advantage in zip(shaped, group_advantages(shaped), strict=True):
            total += math.fsum(clipped(r, advantage, 0.2, 0.28) for r in one.ratios)
            count += len(one.ratios)
    return total / count


def raft(take: Take) -> float:
    """arXiv:2304.06767, section 3: log-likelihood of the best answer of each prompt, best ones that
    are as good sharing its weight; nothing of prompts whose answers are all as good."""
    terms = []
    for group in take:
        highest = max(one.reward for one in group)
        best = [math.fsum(one.policy) for one in group if one.reward == highest]
        differs = min(one.reward for one in group) < highest
        terms.append(mean(best) if differs else 0.0)
    return mean(terms)


def gspo(take: Take) -> float:
    """arXiv:2507.18071, equations 5 to 7, with the range of section 5.1."""
    terms = []
    for group in take:
        for one, advantage in zip(group, group_advantages(group), strict=True):
            gaps = [p - b for p, b in zip(one.policy, one.behavior, strict=True)]
            terms.append(clipped(math.exp(mean(gaps)), advantage, 3e-4, 4e-4))
    return mean(terms)


def cispo(take: Take) -> float:
    """arXiv:2506.13585, equations 4 and 5, without a lower bound, over the groups that dynamic
    sampling keeps; the weight's upper bound of 5 is ScaleRL's."""
    total, count = 0.0, 0
    for group in take:
        if 0 < sum(one.reward > 0 for one in group) < len(group):
            for one, advantage in zip(group, group_advantages(group), strict=True):
                pairs = zip(one.ratios, one.policy, strict=True)
                total += math.fsum(min(r, 5.0) * advantage * p for r, p in pairs)
                count += len(one.policy)
    return total / count


def rloo(take: Take) -> float:
    """arXiv:2402.14740, section 2.3: REINFORCE on whole answers, KL in the reward."""
    terms = []
    for group in take:
        rewards = [one.reward - 0.03 * k1(one) for one in group]
        for index, one in enumerate(group):
            others = rewards[:index] + rewards[index + 1 :]
            terms.append((rewards[index] - mean(others)) * math.fsum(one.policy))
    return mean(terms)


def k1(one: Played) -> float:
    """Sum over the answer of sampling - reference logprob."""
    return math.fsum(b - r for b, r in zip(one.behavior, one.reference, strict=True))


def reinforce_pp(take: Take) -> float:
    """arXiv:2501.03262 (v9), equations 4 and 5, in equation 1, whose answers weigh the same however
    long they are: the whole batch is the baseline."""
    rewards = [one.reward - 1e-3 * k1(one) for group in take for one in group]
    middle, std = mean(rewards), deviation(rewards, 0)
    answers = [one for group in take for one in group]
    total = 0.0
    for one, reward in zip(answers, rewards, strict=True):
        advantage = (reward - middle) / (std + 1e-6)
        total += mean([clipped(r, advantage, 0.2, 0.2) for r in one.ratios])
    return total / len(answers)


def reinforce_pp_baseline(take: Take) -> float:
    """The same paper's variant: the group's mean, the batch's deviation, k2 in the loss."""
    centred = [o.reward - mean([x.reward for x in group]) for group in take for o in group]
    std = deviation(centred, 0)
    answers = [one for group in take for one in group]
    total = 0.0
    for one, value in zip(answers, centred, strict=True):
        of_answer = 0.0
        for ratio, p, r in zip(one.ratios, one.policy, one.reference, strict=True):
            objective = clipped(ratio, value / (std + 1e-6), 0.2, 0.2)
            of_answer += objective - 1e-3 * min(ratio, 2.0) * (p - r) ** 2 / 2
        total += of_answer / len(one.policy)
    return total / len(answers)


def decoupled_ppo(take: Take) -> float:
    """AReaL, arXiv:2505.24298, equation 5 at the first update of a take, where the proximal policy
    is the policy; weights above 5 are masked, as in its code."""
    total, count = 0.0, 0
    for group in take:
        if len({one.reward for one in group}) > 1:
            for one, advantage in zip(group, group_advantages(group), strict=True):
                total += math.fsum(w * advantage for w in one.ratios if w <= 5.0)
                count += len(one.policy)
    return total / count


VALUE_SCALE = 4.0
"""A critic that knows no more than a token's id: so many times its gap to the reference."""


def ppo(take: Take) -> float:
    """arXiv:1707.06347, equation 7; advantages by arXiv:1506.02438, equation 16, with gamma 1 and
    lambda 0.95 (arXiv:2203.02155), of mean 0 and deviation 1 over all tokens."""
    ratios: list[float] = []
    advantages: list[float] = []
    for one in (one for group in take for one in group):
        gaps = [b - r for b, r in zip(one.behavior, one.reference, strict=True)]
        values = [*(VALUE_SCALE * gap for gap in gaps), 0.0]
        rewards = [0.0] * (len(gaps) - 1) + [one.reward]
        errors = [r + values[k + 1] - values[k] for k, r in enumerate(rewards)]
        advantages += [
            math.fsum(0.95 ** (later - k) * errors[later] for later in range(k, len(errors)))
            for k in range(len(errors))
        ]
        ratios += one.ratios
    middle, spread = mean(advantages), deviation(advantages, 0)
    return mean(
        [
            clipped(ratio, (advantage - middle) / spread, 0.2, 0.2)
            for ratio, advantage in zip(ratios, advantages, strict=True)
        ]
    )


def distill(take: Take) -> float:
    """GKD, arXiv:2306.13649, with the reverse KL, by the sampled token; the reference here is the
    teacher. The weight is that of CISPO."""
    total, count = 0.0, 0
    for group in take:
        for one in group:
            rows = zip(one.ratios, one.reference, one.policy, strict=True)
            total += math.fsum(min(r, 5.0) * (t - p) * p for r, t, p in rows)
            count += len(one.policy)
    return total / count


def masked(
    take: Take, ratio_of: Callable[[Sequence[float]], float], low: float, high: float
) -> float:
    """PPO at the weights before the take's first update, times the sequence's ratio where it lies
    within the bounds, over all tokens."""
    total, count = 0.0, 0
    for group in take:
        if len({one.reward for one in group}) == 1:
            continue
        for one, advantage in zip(group, group_advantages(group), strict=True):
            gaps = [p - b for p, b in zip(one.policy, one.behavior, strict=True)]
            weight = math.exp(ratio_of(gaps))
            if low <= weight <= high and min(gaps) >= math.log(1e-4):
                total += len(gaps) * weight * advantage
            count += len(gaps)
    return total / count


def geometric_mask(take: Take) -> float:
    """Liu et al. 2025: the mean log-ratio of a sequence, from 0.99 to 1.01."""
    return masked(take, mean, 0.99, 1.01)


def sequence_mask(take: Take) -> float:
    """Liu et al. 2025, TRL's default: the product of a sequence's ratios, up to 3."""
    return masked(take, math.fsum, 0.0, 3.0)


PAPERS: dict[str, Callable[[Take], float]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "cispo": cispo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "decoupled_ppo": decoupled_ppo,
    "ppo": ppo,
    "distill": distill,
    "raft": raft,
    "geometric_mask": geometric_mask,
    "sequence_mask": sequence_mask,
}
SPREAD = {"decoupled_ppo": 1.2, "geometric_mask": 0.03}
"""How far the behavior policy is from the trainer's, where it is not 0.3."""
NEEDED: dict[str, dict[str, Any]] = {"distill": {"teacher": {"path": "teacher"}}}
"""What a recipe does not run without."""


def offset(token_ids: Any) -> Any:
    """behavior - reference logprob of a token."""
    return 0.05 * (np.asarray(token_ids) % 5)


def reference_logprobs(rows: TrainBatch) -> Float32:
    """A frozen model that finds some tokens less likely than they were when sampled."""
    values = rows.behavior_logprobs - offset(rows.token_ids)
    return np.where(rows.loss_mask, values, 0.0).astype(np.float32)


@pytest.fixture
def played(
    make_turn: MakeTurn, make_trajectory: MakeTrajectory, double_model: Any
) -> Callable[..., tuple[list[Group], Take]]:
    """Groups of one to three turns an answer: two mixed, one all wrong, one all right."""

    def play(seed: int, *, on_policy: bool = False, spread: float = 0.3) -> Any:
        random = np.random.default_rng(seed)
        rewards = [[1, -1, -1, 1], [-1, -1, -1, -1], [1, 1, 1, 1], [-1, 1, -1, -1]]
        groups, take = [], []
        for slot, of_group in enumerate(rewards):
            trajectories, answers = [], []
            for index, reward in enumerate(of_group):
                ids: list[int] = []
                trained: list[int] = []
                prompts: list[list[int]] = []
                outputs: list[list[int]] = []
                for _ in range(int(random.integers(1, 4))):
                    prompts.append(random.integers(0, VOCAB, int(random.integers(1, 4))).tolist())
                    outputs.append(random.integers(0, VOCAB, int(random.integers(1, 7))).tolist())
                    ids += prompts[-1]
                    trained += range(len(ids), len(ids) + len(outputs[-1]))
                    ids += outputs[-1]
                with torch.no_grad():
                    table = double_model(torch.tensor([ids])).logits[0].log_softmax(-1)
                policy = [float(table[place - 1, ids[place]]) for place in trained]
                noise = (
                    np.zeros(len(policy)) if on_policy else random.normal(0, spread, len(policy))
                )
                behavior = np.asarray(policy + noise, np.float32)
                turns, start = [], 0
                for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
                    turns.append(
                        make_turn(
                            str(number),
                            parent=str(number - 1) if number else None,
                            prompt=prompt,
                            output=output,
                            logprobs=behavior[start : start + len(output)].tolist(),
                        )
                    )
                    start += len(output)
                trajectories.append(
                    make_trajectory(
                        turns, reward=reward, episode_id=f"{slot}-{index}", group_id=f"g{slot}"
                    )
                )
                gaps = offset([ids[place] for place in trained])
                answers.append(
                    Played(reward, policy, behavior.tolist(), (behavior - gaps).tolist())
                )
            groups.append(
                Group(
                    group_id=f"g{slot}",
                    slot=slot,
                    task_id="t",
                    group_size=GROUP_SIZE,
                    trajectories=tuple(trajectories),
                )
            )
            take.append(answers)
        return groups, take

    return play


def loss_of_the_recipe(name: str, groups: list[Group], policy: Policy) -> float:
    """What one update under the recipe reports, with nothing else set."""
    settings = Settings(
        model={"path": "m"},
        sampling={"max_new_tokens": MAX_NEW_TOKENS},
        trainer={"recipe": name, "max_microbatch_tokens": 60} | NEEDED.get(name, {}),
    )
    batch = build_batch(groups, settings, policy_version=0, vocab_size=VOCAB)
    if settings.trainer.teacher is not None:
        columns = {"teacher_logprobs": reference_logprobs(batch.rows)}
        batch = dataclasses.replace(batch, rows=batch.rows.with_columns(**columns))
    if settings.trainer.kl != "none":
        reference = reference_logprobs(batch.rows)
        with_kl, _ = with_reference(batch.rows, batch.credit, reference, settings)
        batch = dataclasses.replace(batch, rows=with_kl)
    if settings.trainer.advantage == "gae":
        values = np.where(batch.rows.loss_mask, VALUE_SCALE * offset(batch.rows.token_ids), 0.0)
        with_critic, _, _ = with_values(
            batch.rows, batch.credit, values.astype(np.float32), {}, settings.trainer
        )
        batch = dataclasses.replace(batch, rows=with_critic)
    (rows,), taken = batch.updates(1), batch.rows
    if settings.trainer.proximal == "recompute":
        column = score(policy.model, taken, rows=rows, max_tokens=60, on_microbatch=lambda: None)
        taken, _ = with_proximal(taken, column, settings.trainer, rows=rows)
    report = rl_update(
        policy, taken, settings.trainer, rows=rows, policy_version=0, on_microbatch=lambda: None
    )
    return report.loss


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_is_its_papers_objective(
    name: str, seed: int, played: Callable[..., Any], make_policy: Callable[..., Policy]
) -> None:
    """Off policy, with answers of unequal length, unsolved tasks and solved ones.

    The papers' ratios stay below the dual clip here (it is none of theirs), but in decoupled PPO,
    where some weights exceed its cap of 5.
    """
    groups, take = played(seed, spread=SPREAD.get(name, 0.3))
    largest = max(ratio for group in take for one in group for ratio in one.ratios)
    assert (largest > 5.0) == (name == "decoupled_ppo")
    got = loss_of_the_recipe(name, groups, make_policy())
    assert got == pytest.approx(-PAPERS[name](take), rel=2e-4, abs=2e-5)
    assert abs(got) > 1e-4


def test_grpo_on_policy_is_its_paper_without_our_weights(
    played: Callable[..., Any], make_policy: Callable[..., Policy]
) -> None:
    """With every ratio 1 the KL term is exactly equation 4: its importance weight is the only
    difference from the paper."""
    groups, take = played(5, on_policy=True)
    terms = []
    for group in take:
        for one, advantage in zip(group, group_advantages(group), strict=True):
            gaps = [r - p for p, r in zip(one.policy, one.reference, strict=True)]
            terms.append(advantage - 0.04 * mean([math.exp(g) - g - 1 for g in gaps]))
    got = loss_of_the_recipe("grpo", groups, make_policy())
    assert got == pytest.approx(-mean(terms), rel=2e-4, abs=2e-5)


def test_every_recipe_has_a_paper() -> None:
    """None is added without its objective, nor without a section that says all of it."""
    assert RECIPES.keys() == PAPERS.keys()
    page = (Path(__file__).resolve().parents[3] / "docs" / "algorithms.md").read_text()
    sections = {text.partition("\n")[0]: text for text in page.split("\n## ")}
    for name in RECIPES:
        for part in ("Objective", "Source", "Settings", "When", "Differs"):
            assert f"**{part}.** " in sections[name], (name, part)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_what_is_set_explicitly_wins(name: str) -> None:
    """Every default of a recipe gives way, and the sentence says that it did."""
    needed = {"recipe": name} | NEEDED.get(name, {})
    settings = Settings(model={"path": "m"}, trainer=needed)
    for section, defaults in RECIPES[name].items():
        for key, wanted in defaults.items():
            assert getattr(getattr(settings, section), key) == wanted
    own = needed | {"loss": "ppo_clip", "clip_low": 0.1, "clip_high": 0.11, "kl": "none"}
    own |= {"advantage": "grpo"}
    chosen = Settings(
        model={"path": "m"},
        trainer=own | {"denominator": "tokens"},
        buffer={"drop_zero_signal": True},
    )
    assert chosen.trainer.clip_high == 0.11
    assert chosen.trainer.kl == "none"
    assert chosen.buffer.drop_zero_signal
    sentence = recipe_sentence(dict(chosen.trainer), dict(chosen.buffer))
    assert sentence.startswith(f"recipe {name}: ")
    assert "; overridden: " in sentence
    assert ("trainer.clip_high=0.11 (recipe: " in sentence) == ("clip_high" in defaults_of(name))
    again = build_settings(chosen.model_dump(mode="json"), source="again")
    assert again == chosen


def defaults_of(name: str) -> dict[str, Any]:
    """A recipe's, of the trainer."""
    return RECIPES[name]["trainer"]


def test_the_sentence_says_what_was_set() -> None:
    """Without a recipe there is none."""
    plain = Settings(model={"path": "m"})
    assert recipe_sentence(dict(plain.trainer), dict(plain.buffer)) == ""
    gspo = Settings(model={"path": "m"}, trainer={"recipe": "gspo"})
    assert recipe_sentence(dict(gspo.trainer), dict(gspo.buffer)) == (
        'recipe gspo: trainer.loss="gspo", trainer.clip_low=0.0003, trainer.clip_high=0.0004, '
        'trainer.advantage="grpo", trainer.denominator="episode_means", '
        "buffer.drop_zero_signal=false"
    )


def test_an_unknown_recipe_is_refused() -> None:
    """With those that exist."""
    with pytest.raises(SettingsError, match="'grpo', 'dr_grpo', 'dapo'"):
        build_settings({"model": {"path": "m"}, "trainer": {"recipe": "trpo"}}, source="x")


def test_the_budget_comes_from_the_run() -> None:
    """Dr.GRPO's and DAPO's lengths are those of an answer, unless they are set."""
    sampling = {"max_new_tokens": 1000}
    made = Settings(model={"path": "m"}, sampling=sampling, trainer={"recipe": "dr_grpo"})
    assert made.trainer.token_budget == 1000
    made = Settings(model={"path": "m"}, sampling=sampling, trainer={"recipe": "dapo"})
    assert made.trainer.overlong_max_tokens == 1000
    assert made.trainer.overlong_buffer_tokens == 200
    own = {"recipe": "dapo", "overlong_max_tokens": 50}
    made = Settings(model={"path": "m"}, sampling=sampling, trainer=own)
    assert made.trainer.overlong_buffer_tokens == 10
    without = Settings(model={"path": "m"}, trainer={"recipe": "dapo", "overlong_penalty": 0})
    assert without.trainer.overlong_max_tokens is None


@pytest.mark.parametrize(
    ("section", "values", "sentence"),
    [
        ("buffer", {"max_refills": 3, "drop_zero_signal": False}, "buffer.max_refills=3 has no"),
    ],
)
def test_idle_settings_of_the_buffer_are_refused(
    section: str, values: dict[str, object], sentence: str
) -> None:
    """As those of the trainer are (test_custom)."""
    with pytest.raises(ValueError, match="has no effect") as caught:
        Settings(model={"path": "m"}, **{section: values})
    assert sentence in str(caught.value)


@pytest.mark.parametrize("before", [None, *RECIPES])
@pytest.mark.parametrize("after", RECIPES)
def test_a_recipe_set_over_resolved_settings_is_resolved_anew(
    before: str | None, after: str
) -> None:
    """As if the run's file had named it: defaults that the run's own recipe made explicit in
    settings.json make room; what the file set otherwise stays."""
    own = {"learning_rate": 3e-6, "groups_per_step": 4, **NEEDED.get(after, {})}
    recipe = {} if before is None else {"recipe": before}
    teacher = NEEDED.get(before or "", {})
    tree: dict[str, Any] = {"model": {"path": "m"}, "sampling": {"max_new_tokens": 700}}
    run = build_settings(tree | {"trainer": own | recipe | teacher}, source="run.toml")
    # As settings.json has it: every value explicit.
    run = build_settings(run.model_dump(mode="json"), source="settings.json")
    found = with_overrides(run, (f'trainer.recipe="{after}"',))
    wanted = build_settings(
        tree | {"trainer": own | teacher | {"recipe": after}}, source="run.toml"
    )
    assert found == wanted


@pytest.mark.parametrize(
    ("trainer", "override", "wanted"),
    [
        ({"loss": "gspo"}, "loss='cispo'", {"clip_low": 1.0, "clip_high": 4.0}),
        ({"loss": "gspo", "clip_low": 0.01}, "loss='cispo'", {"clip_low": 0.01, "clip_high": 4.0}),
        ({"recipe": "grpo"}, "kl='none'", {"kl_coefficient": 1e-3, "advantage": "grpo"}),
        ({"recipe": "rloo", "kl_coefficient": 0.5}, "recipe='grpo'", {"kl_coefficient": 0.5}),
        ({"recipe": "dapo"}, "overlong_penalty=0.0", {"overlong_max_tokens": None}),
        ({"recipe": "decoupled_ppo"}, "correction='none'", {"correction_cap": 2.0}),
        ({}, "loss='gspo'", {"clip_low": 3e-4, "denominator": "episode_means"}),
        ({"recipe": "grpo"}, "num_steps=3", {"advantage": "grpo", "kl": "k3", "num_steps": 3}),
    ],
)
def test_what_a_changed_setting_brings_replaces_what_the_old_one_brought(
    trainer: dict[str, Any], override: str, wanted: dict[str, Any]
) -> None:
    """A value that was set otherwise in the run's file stays."""
    run = build_settings({"model": {"path": "m"}, "trainer": trainer}, source="run.toml")
    run = build_settings(run.model_dump(mode="json"), source="settings.json")
    found = with_overrides(run, (f"trainer.{override}",)).trainer
    assert {name: getattr(found, name) for name in wanted} == wanted


def test_every_value_that_a_recipe_sets_can_be_resolved_anew() -> None:
    """A new key of a recipe or of a loss belongs in the list."""
    keys = {key for recipe in RECIPES.values() for section in recipe.values() for key in section}
    keys |= {key for values in LOSS_DEFAULTS.values() for key in values}
    assert keys | {"token_budget", "overlong_max_tokens", "overlong_buffer_tokens"} == set(DERIVED)
