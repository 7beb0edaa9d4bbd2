"""Algorithms by name: the settings that a paper's objective needs.

A recipe sets defaults only: explicit settings win, and `recipe_sentence` names both. Equations, and
differences from the papers, are in docs/algorithms.md; tests/engine/train/test_recipes.py compares
each recipe with its paper's objective in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

Recipe = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "decoupled_ppo",
    "ppo",
    "distill",
    "raft",
    "geometric_mask",
    "sequence_mask",
]
Tree = dict[str, Any]
DEFAULT_MAX_NEW_TOKENS = 256
"""sampling.max_new_tokens where it is left out."""
USES_PARTS = ("reward_to_go", "gae")
"""Values of trainer.advantage that look at scores of turns, branches and tokens."""
_CLIPPED = ("ppo_clip", "gspo")

_EVERY_GROUP: Tree = {"drop_zero_signal": False}
"""Groups without signal count in the denominator, and are pulled to the reference."""
_DYNAMIC_SAMPLING: Tree = {"drop_zero_signal": True, "max_refills": 8}
"""DAPO, equation 11: the batch is filled again until all its groups have signal."""
_PPO: Tree = {"loss": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2}

RECIPES: dict[str, dict[str, Tree]] = {
    # DeepSeekMath, arXiv:2402.03300, equation 3 and section 4.1.2; beta is its 0.04.
    "grpo": {
        "trainer": _PPO
        | {
            "advantage": "grpo",
            "denominator": "episode_means",
            "kl": "k3",
            "kl_coefficient": 0.04,
        },
        "buffer": _EVERY_GROUP,
    },
    # arXiv:2503.20783, section 3.2.
    "dr_grpo": {
        "trainer": _PPO | {"advantage": "dr_grpo", "denominator": "budget"},
        "buffer": _EVERY_GROUP,
    },
    # arXiv:2503.14476, equations 8 to 13.
    "dapo": {
        "trainer": {
            "loss": "ppo_clip",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "advantage": "grpo",
            "denominator": "tokens",
            "overlong_penalty": 1.0,
        },
        "buffer": _DYNAMIC_SAMPLING,
    },
    # arXiv:2507.18071, equations 5 to 7; the clip range is that of its section 5.1.
    "gspo": {
        "trainer": {
            "loss": "gspo",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "advantage": "grpo",
            "denominator": "episode_means",
        },
        "buffer": _EVERY_GROUP,
    },
    # MiniMax-M1, arXiv:2506.13585, equations 4 and 5, with DAPO's dynamic sampling.
    "cispo": {
        "trainer": {
            "loss": "cispo",
            "clip_low": 1.0,
            "clip_high": 4.0,
            "advantage": "grpo",
            "denominator": "tokens",
        },
        "buffer": _DYNAMIC_SAMPLING,
    },
    # arXiv:2402.14740, section 2.3: REINFORCE over whole answers, KL in the reward.
    "rloo": {
        "trainer": {
            "loss": "reinforce",
            "advantage": "rloo",
            "denominator": "episodes",
            "kl": "k1",
            "kl_coefficient": 0.03,
        },
        "buffer": _EVERY_GROUP,
    },
    # arXiv:2501.03262 (v9), equations 4 and 5, in the objective of equation 1.
    "reinforce_pp": {
        "trainer": _PPO | {"advantage": "reinforce_pp", "denominator": "episode_means", "kl": "k1"},
        "buffer": _EVERY_GROUP,
    },
    # The same paper's variant for groups: its KL is k2, in the loss.
    "reinforce_pp_baseline": {
        "trainer": _PPO
        | {"advantage": "reinforce_pp_baseline", "denominator": "episode_means", "kl": "k2"},
        "buffer": _EVERY_GROUP,
    },
    # arXiv:2110.00641; AReaL, arXiv:2505.24298, section 5.2, whose code masks weights above 5.
    "decoupled_ppo": {
        "trainer": _PPO
        | {
            "denominator": "tokens",
            "proximal": "recompute",
            "correction": "token_mis",
            "correction_cap": 5.0,
        },
        "buffer": {},
    },
    # Liu et al. 2025, "When speed kills stability": the mask of whole sequences by their geometric
    # mean ratio, in the narrow band that suits a mean; IcePop, arXiv:2510.18855, masks tokens in
    # that way. The veto is for single tokens that the server cannot have sampled so.
    "geometric_mask": {
        "trainer": _PPO
        | {
            "denominator": "tokens",
            "proximal": "recompute",
            "correction": "geometric_mis",
            "correction_cap": 1.01,
            "correction_floor": 0.99,
            "correction_veto": 1e-4,
        },
        "buffer": {},
    },
    # The same source's mask by the product, at TRL's default cap of 3.
    "sequence_mask": {
        "trainer": _PPO
        | {
            "denominator": "tokens",
            "proximal": "recompute",
            "correction": "sequence_mis",
            "correction_cap": 3.0,
        },
        "buffer": {},
    },
    # arXiv:1707.06347, equation 7; arXiv:1506.02438, equation 16; for language arXiv:2203.02155.
    "ppo": {
        "trainer": _PPO | {"advantage": "gae", "denominator": "tokens"},
        "buffer": _EVERY_GROUP,
    },
    # GKD, arXiv:2306.13649, on the policy's own samples, with the reverse KL.
    "distill": {
        "trainer": {
            "advantage": "none",
            "loss": "cispo",
            "clip_low": 1.0,
            "clip_high": 4.0,
            "denominator": "tokens",
        },
        "buffer": _EVERY_GROUP,
    },
    # RAFT, arXiv:2304.06767, section 3: the best of n answers of a prompt is imitated.
    "raft": {
        "trainer": {"loss": "reinforce", "advantage": "best_of_n", "denominator": "episodes"},
        "buffer": _EVERY_GROUP,
    },
}

LOSS_DEFAULTS: dict[str, Tree] = {
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.28},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "denominator": "episode_means"},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0},
}
"""Defaults of a loss. GSPO's ratio is a mean over a sequence, so it never leaves a range that is
right for the ratio of a token."""

DERIVED = (
    *("clip_low", "clip_high", "token_budget", "overlong_buffer_tokens", "overlong_max_tokens"),
    *("kl_coefficient", "correction_cap", "correction_floor", "correction_veto", "max_refills"),
    *("overlong_penalty", "drop_zero_signal", "denominator", "correction", "proximal", "kl"),
    *("advantage", "loss"),
)
"""What recipes and losses set in [trainer] and [buffer]; a key that depends on others comes before
them."""

_OVERLONG_SHARE = 5
"""DAPO, section 4.1: a buffer of 4,096 of 20,480 tokens."""

Values = Mapping[str, Any]
EFFECTS: dict[str, tuple[Callable[[Values], bool], str]] = {
    "kl_coefficient": (lambda v: v.get("kl", "none") != "none", 'a trainer.kl other than "none"'),
    "kl_target": (lambda v: v.get("kl", "none") != "none", 'a trainer.kl other than "none"'),
    "kl_ratio_cap": (lambda v: v.get("kl") in ("k2", "k3"), 'trainer.kl = "k2" or "k3"'),
    "reference_path": (lambda v: v.get("kl", "none") != "none", 'a trainer.kl other than "none"'),
    "muon_momentum": (lambda v: v.get("optimizer") == "muon", 'trainer.optimizer = "muon"'),
    "entropy_target": (
        lambda v: v.get("entropy_coefficient", 0.0) > 0,
        "trainer.entropy_coefficient above 0, to begin with",
    ),
    "reference_refresh_every": (
        lambda v: v.get("kl", "none") != "none",
        'a trainer.kl other than "none"',
    ),
    "reference_decay": (
        lambda v: v.get("kl", "none") != "none",
        'a trainer.kl other than "none"',
    ),
    "denominator_constant": (
        lambda v: v.get("denominator") == "constant",
        'trainer.denominator = "constant"',
    ),
    "token_budget": (
        lambda v: v.get("denominator") == "budget",
        'trainer.denominator = "budget"',
    ),
    "correction_cap": (
        lambda v: v.get("correction", "none") != "none",
        'a trainer.correction other than "none"',
    ),
    "correction_floor": (
        lambda v: str(v.get("correction")).endswith("_mis"),
        'a masked trainer.correction, for example "token_mis"',
    ),
    "correction_veto": (
        lambda v: v.get("correction", "none") != "none",
        'a trainer.correction other than "none", for example "token_mis"',
    ),
    "dual_clip": (
        lambda v: v.get("loss_path") is not None or v.get("loss", "ppo_clip") in _CLIPPED,
        'trainer.loss = "ppo_clip" or "gspo"',
    ),
    "clip_low": (lambda v: _has_clips(v), 'a trainer.loss other than "reinforce"'),
    "clip_high": (lambda v: _has_clips(v), 'a trainer.loss other than "reinforce"'),
    "loss": (lambda v: v.get("loss_path") is None, "no trainer.loss_path, which takes its place"),
    "loss_options": (lambda v: v.get("loss_path") is not None, "trainer.loss_path"),
    "advantage": (
        lambda v: v.get("advantage_path") is None,
        "no trainer.advantage_path, which takes its place",
    ),
    "critic": (
        lambda v: v.get("advantage") == "gae" and v.get("advantage_path") is None,
        'trainer.advantage = "gae"',
    ),
    "overlong_max_tokens": (lambda v: bool(v.get("overlong_penalty")), "trainer.overlong_penalty"),
    "overlong_buffer_tokens": (
        lambda v: bool(v.get("overlong_penalty")),
        "trainer.overlong_penalty",
    ),
    "min_lr_ratio": (
        lambda v: v.get("lr_decay", "constant") != "constant",
        'trainer.lr_decay = "linear", "cosine" or "wsd"',
    ),
    "wsd_decay_updates": (lambda v: v.get("lr_decay") == "wsd", 'trainer.lr_decay = "wsd"'),
    "turn_discount": (
        lambda v: (
            v.get("advantage") == "reward_to_go"
            and v.get("advantage_path") is None
            and not v.get("sources")
        ),
        'trainer.advantage = "reward_to_go", for all sources',
    ),
    "pass_k": (
        lambda v: v.get("advantage") == "pass_at_k" and v.get("advantage_path") is None,
        'trainer.advantage = "pass_at_k"',
    ),
    "num_epochs": (lambda v: v.get("mode") == "sft", 'trainer.mode = "sft"'),
    "min_reward": (
        lambda v: v.get("mode") == "sft" and v.get("reward_model") is None,
        'trainer.mode = "sft" without trainer.reward_model',
    ),
    "reward_model": (lambda v: v.get("mode") == "sft", 'trainer.mode = "sft"'),
    "held_out_share": (lambda v: v.get("reward_model") is not None, "trainer.reward_model"),
}
"""Settings of [trainer] that depend on others: when they have an effect, and what they need."""

RL_ONLY = (
    *(
        "recipe",
        "num_updates_per_take",
        "num_epochs_per_take",
        "pass_k",
        "turn_discount",
        "advantage",
        "advantage_path",
        "critic",
        "teacher",
    ),
    "overlong_penalty",
    *("loss", "loss_path", "denominator", "proximal", "correction", "opsm_delta", "kl"),
    *("entropy_coefficient", "entropy_target", "mask_truncated", "sources", "curriculum"),
    *("routing_replay", "profile_steps", "max_grad_spike", "is_colocated"),
    *("checkpoint_every", "keep_checkpoints", "trains_while_saving", "resume"),
)
"""Settings of [trainer] without effect on supervised fine-tuning."""


def trainer_defaults(trainer: Values, *, budget: int | None = None) -> Tree:
    """`trainer` with the defaults of its recipe and of its loss under what is set explicitly.

    A default that would have no effect beside what is set explicitly is left out.

    Args:
        budget: tokens of one answer, sampling.max_new_tokens, if they are known.
    """
    name = str(trainer.get("recipe"))
    recipe = dict(RECIPES.get(name, {}).get("trainer", {}))
    if budget is not None and name == "dr_grpo":
        recipe["token_budget"] = budget
    if budget is not None and name == "dapo":
        limit = trainer.get("overlong_max_tokens") or budget
        recipe["overlong_max_tokens"] = limit
        recipe["overlong_buffer_tokens"] = int(limit) // _OVERLONG_SHARE
    merged = recipe | dict(trainer)
    if merged.get("mode") == "sft":
        # As many steps as the conversations need.
        merged.setdefault("num_steps", 0)
    if merged.get("loss_path") is None:
        merged = LOSS_DEFAULTS.get(str(merged.get("loss", "ppo_clip")), {}) | merged
    return {
        key: value
        for key, value in merged.items()
        if key in trainer or key not in EFFECTS or EFFECTS[key][0](merged)
    }


def with_recipe(tree: Values) -> Tree:
    """A tree of settings with the defaults of `trainer.recipe` in every section it concerns."""
    trainer = tree.get("trainer")
    if not isinstance(trainer, Mapping) or trainer.get("recipe") not in RECIPES:
        return dict(tree)
    sampling = tree.get("sampling")
    budget = sampling.get("max_new_tokens") if isinstance(sampling, Mapping) else None
    merged = dict(tree)
    merged["trainer"] = trainer_defaults(trainer, budget=budget or DEFAULT_MAX_NEW_TOKENS)
    own = tree.get("buffer")
    if own is None or isinstance(own, Mapping):
        own = dict(own or {})
        buffer = RECIPES[trainer["recipe"]]["buffer"] | own
        if "max_refills" not in own and not buffer.get("drop_zero_signal", True):
            buffer.pop("max_refills", None)
        merged["buffer"] = buffer
    return merged


def recipe_sentence(trainer: Values, buffer: Values) -> str:
    """What `trainer.recipe` set and what was set otherwise; empty without a recipe.

    Args:
        trainer, buffer: the resolved sections.
    """
    name = trainer.get("recipe")
    if name is None:
        return ""
    kept, other = [], []
    recipe = RECIPES[name]
    for section, values in (("trainer", trainer), ("buffer", buffer)):
        for key, wanted in recipe[section].items():
            if section == "trainer" and key in EFFECTS and not EFFECTS[key][0](trainer):
                continue
            if values[key] == wanted:
                kept.append(f"{section}.{key}={_toml(wanted)}")
            else:
                other.append(f"{section}.{key}={_toml(values[key])} (recipe: {_toml(wanted)})")
    for key in ("token_budget", "overlong_max_tokens", "overlong_buffer_tokens"):
        if values_set := trainer.get(key):
            kept.append(f"trainer.{key}={values_set}")
    sentence = f"recipe {name}: {', '.join(kept)}"
    return f"{sentence}; overridden: {', '.join(other)}" if other else sentence


def _has_clips(values: Values) -> bool:
    return values.get("loss_path") is not None or values.get("loss") != "reinforce"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value}"
