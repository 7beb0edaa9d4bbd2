"""The settings of the optimizer's side.

Owns: names, types, defaults and cross-field rules of `[trainer]`. Does not own: where values come
from and the rules across sections (settings), upstream options in the raw table. Invariant: frozen;
cross-field rules refuse and never rewrite.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class TrainerSettings(BaseModel):
    """The optimizer's side."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Literal["rl", "sft"] = "rl"
    num_steps: int = Field(40, gt=0)
    groups_per_step: int = Field(32, gt=0)
    """Groups (RL) or conversations (SFT) that one step consumes."""
    num_updates_per_take: int = Field(1, gt=0)
    """Optimizer updates made from one taken batch; one publish per take."""
    num_epochs: int = Field(1, gt=0)
    """SFT: passes over the conversations."""
    max_microbatch_tokens: int = Field(16384, gt=0)
    learning_rate: float = Field(1e-3, gt=0)
    warmup_steps: int = Field(0, ge=0)
    lr_decay: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    weight_decay: float = Field(0.0, ge=0)
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    max_grad_norm: float = Field(1.0, gt=0)
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"] = "grpo"
    advantage_path: str | None = None
    """package.module:function, `def advantage(rewards) -> advantages` for one group's scored
    episodes (float64 arrays of the same length); takes the place of `advantage`."""
    overlong_penalty: float = Field(0.0, ge=0)
    """Taken off the reward of an episode that draws more than overlong_max_tokens; 0: nothing."""
    overlong_max_tokens: int | None = Field(None, gt=0)
    """Tokens drawn in an episode, over all its turns, from which the whole penalty is due."""
    overlong_buffer_tokens: int = Field(0, ge=0)
    """The penalty grows linearly over this many tokens below overlong_max_tokens."""
    loss: Literal["ppo_clip", "gspo", "cispo"] = "ppo_clip"
    loss_path: str | None = None
    """package.module:function, `def loss(policy_logprobs, proximal_logprobs, advantages, *,
    clip_low, clip_high) -> losses`, float32 tensors [N]; takes the place of `loss`."""
    clip_low: float = Field(0.2, gt=0)
    """Ratios are clipped below 1 - clip_low; 1 or more: no lower bound. GSPO's ratio is a mean
    over a sequence: its paper uses 3e-4 here and 4e-4 for clip_high."""
    clip_high: float = Field(0.28, gt=0)
    """Ratios are clipped above 1 + clip_high."""
    denominator: Literal["tokens", "episodes", "constant"] = "tokens"
    denominator_constant: float = Field(1.0, gt=0)
    proximal: Literal["behavior", "recompute"] = "behavior"
    """What the ratio of the loss is taken to: the logprobs recorded when tokens were drawn, or
    those of the trainer's weights before the first update of a take (one forward more)."""
    correction: Literal["none", "token_tis", "sequence_tis", "token_mis", "sequence_mis"] = "none"
    """Weight of a token for the step from behavior to proximal logprobs, by token or by sequence:
    truncated at correction_cap, or masked outside correction_floor..correction_cap."""
    correction_cap: float = Field(2.0, ge=1)
    """Largest importance weight; also that of the KL term in the loss."""
    correction_floor: float = Field(0.0, ge=0, le=1)
    """Masked corrections: ratios below are masked too."""
    correction_veto: float = Field(0.0, ge=0, lt=1)
    """A sequence with a token whose ratio proximal / behavior is below is masked whole; 0: none."""
    kl: Literal["none", "k1", "k2", "k3"] = "none"
    """Pull towards the reference model: k1 in the reward, k2 or k3 in the loss."""
    reference_path: Path | None = None
    """Hugging Face folder of the reference, of the policy's vocabulary; left out: model.path as
    it was when the run began."""
    kl_coefficient: float = Field(1e-3, ge=0)
    entropy_coefficient: float = Field(0.0, ge=0)
    """Bonus per nat of entropy at trained tokens."""
    mask_truncated: bool = False
    """Leave truncated episodes' tokens out of the loss (they keep counting in statistics)."""
    num_threads: int = Field(1, gt=0)
    num_ranks: int = Field(1, gt=0)
    """Trainer processes, started by torchrun; how they split the model is in `megatron`."""
    rank_timeout_s: float = Field(600.0, gt=0)
    """A rank for which the others wait longer than this ends the run, with its name and phase."""
    checkpoint_every: int = Field(10, ge=0)
    """Steps between checkpoints; 0: only at the end."""
    keep_checkpoints: int = Field(2, gt=0)
    trains_while_saving: bool = True
    """A checkpoint is copied to the host's memory (weights and both moments) and written from there
    while training goes on; false: no copy, and training waits until it is written."""
    take_timeout_s: float = Field(300.0, gt=0)
    resume: bool = True
    device: str = "auto"
    """auto: CUDA where torch offers it, else the CPU. "cuda:N": the Nth device that the process
    sees, for one rank; several ranks are placed by `gpus`."""
    gpus: tuple[int, ...] = ()
    """Which of the machine's CUDA devices the ranks get, one each, in their order."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and activations. bfloat16: the optimizer keeps float32 main weights and moments,
    which checkpoints hold; gradients are summed, logprobs and losses computed in float32."""
    layers: Literal["auto", "local", "local_varlen", "transformer_engine"] = "auto"
    """auto: on a GPU Transformer Engine's layers where it is importable, else Megatron's local ones
    with torch's attention of variable length; on a CPU local ones with padded attention. Attention
    of variable length computes in bfloat16."""
    is_colocated: bool = False
    """Servers share the trainer's device: weights, gradients and optimizer state leave it while
    groups are awaited, and come back for the step."""
    dump_steps: tuple[int, ...] = ()
    """Steps that are written to dumps/step_N before their updates, for `outloop replay-step`."""
    profile_steps: tuple[int, ...] = ()
    """Steps whose updates torch.profiler follows, into profile/."""
    max_grad_spike: float = Field(0.0, ge=0)
    """An update whose gradient norm exceeds this many times the median of the last 20 is refused
    and stops the run, as one that is not finite always does; 0: no limit."""
    hang_timeout_s: float = Field(1800.0, gt=0)
    """A rank that makes no progress for so long reports its phase and stacks, and ends."""
    megatron: dict[str, Any] = {}
    """Raw Megatron-core TransformerConfig fields under their upstream names."""

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> TrainerSettings:
        limit, ramp = self.overlong_max_tokens, self.overlong_buffer_tokens
        if self.overlong_penalty and limit is None:
            raise ValueError(
                f"trainer.overlong_penalty={self.overlong_penalty} without overlong_max_tokens; "
                "say from how many drawn tokens an episode pays it"
            )
        if limit is not None and ramp > limit:
            raise ValueError(
                f"trainer.overlong_buffer_tokens={ramp} exceeds overlong_max_tokens={limit}; "
                f"0 to {limit} is allowed"
            )
        if self.correction != "none" and self.proximal == "behavior":
            raise ValueError(
                f'trainer.correction="{self.correction}" corrects from behavior to recomputed '
                'logprobs; set trainer.proximal = "recompute", or trainer.correction = "none"'
            )
        if self.correction_veto and self.correction == "none":
            raise ValueError(
                f'trainer.correction_veto={self.correction_veto} with trainer.correction="none" '
                'masks nothing; choose a correction, for example "token_mis"'
            )
        if self.loss == "gspo" and self.loss_path is None and self.denominator == "tokens":
            raise ValueError(
                'trainer.loss="gspo" gives every sequence the same weight; '
                'set trainer.denominator = "episodes" (the paper) or "constant"'
            )
        return self
