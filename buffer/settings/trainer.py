"""The settings `[trainer]`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from outloop.buffer.settings.recipes import EFFECTS, RL_ONLY, Recipe, trainer_defaults
from outloop.buffer.settings.section import Section


class CriticSettings(Section):
    """The critic of `advantage = "gae"`, and what advantages are made of its values."""

    kind: Literal["model", "head"] = "model"
    """model: a model of its own on the trainer's ranks, split as the policy is. head: a linear head
    on the policy's last hidden states."""
    path: Path | None = None
    """Of kind = "model": Hugging Face folder that its layers begin with, of the policy's
    vocabulary; left out: model.path. A head begins at zero."""
    value_coefficient: float = Field(0.0, ge=0)
    """Of kind = "head": weight of the value loss in the policy's own gradient; 0: the value loss
    trains the head alone."""
    learning_rate: float = Field(1e-5, gt=0)
    """Of its own optimizer; betas, decay and weight decay are the trainer's. A head's update moves
    a value by up to this times the hidden size."""
    warmup_steps: int = Field(0, ge=0)
    """Updates over which its learning rate rises from zero."""
    steps_alone: int = Field(0, ge=0)
    """Steps at the beginning in which it is trained and the policy is not."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Its gradients are clipped to it."""
    value_clip: float = Field(0.2, ge=0)
    """A value that went further than this from what it was when the batch was taken, towards its
    target or away, is not pulled further; 0: no limit."""
    over: Literal["tokens", "turns"] = "tokens"
    """What a step of time is: a trained token, or a turn, whose tokens share one advantage and
    whose value is that before its first trained token."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount of what is earned a step of time later."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """Of advantages: 1 trusts rewards alone, 0 the critic after one step of time."""
    value_lambda: float | None = Field(None, ge=0, le=1)
    """Of the critic's targets; left out: gae_lambda."""
    bootstrap: Literal["limits", "cut_answers", "none"] = "limits"
    """Where the critic's value stands for what an episode would have earned behind its last token.
    limits: in episodes that a limit of turns, time or tokens ended. cut_answers: in those too whose
    last answer was cut (finish_reason = "length"). none: what it earned by then is all."""
    normalizes_advantages: bool = True
    """Advantages of a take get mean 0 and deviation 1 over its trained tokens."""

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> CriticSettings:
        if self.kind == "head" and self.path is not None:
            raise ValueError(
                f"trainer.critic.path={str(self.path)!r} has no effect with trainer.critic.kind="
                '"head", whose layers are the policy\'s; leave it out, or set kind = "model"'
            )
        if self.kind == "model" and self.value_coefficient:
            raise ValueError(
                f"trainer.critic.value_coefficient={self.value_coefficient} has no effect: it "
                'needs trainer.critic.kind = "head"; leave it out, or set that'
            )
        return self


class TeacherSettings(Section):
    """Whom the policy is pulled towards on its own tokens (distillation), and how.

    The teacher is the model in `path`, the one that `urls` serve, or, with neither, the policy
    itself, which then has to see more than the policy saw: `context_key`.
    """

    path: Path | None = None
    """Hugging Face folder with the policy's tokenizer; scored by the trainer's own ranks, at the
    temperature of each token."""
    urls: tuple[str, ...] = ()
    """http://HOST:PORT of servers of one model with the policy's tokenizer, each with SGLang's
    /generate; asked in turn. They score at temperature 1, so tokens must be sampled at it."""
    api_key_file: Path | None = None
    """File with the key that these servers want as a bearer token."""
    timeout_s: float = Field(120.0, gt=0)
    """For the scores of one take, repeated requests included; then the step is refused."""
    max_concurrent_requests: int = Field(16, gt=0)
    """Rows that are scored at once, over all urls."""
    coefficient: float = Field(1.0, gt=0)
    """Weight of the pull beside the rewards."""
    top_k: int = Field(0, ge=0)
    """0: the sampled token alone is compared. Otherwise so many of the teacher's most probable
    tokens at each place, all others as one; a server may allow less."""
    divergence: Literal["reverse", "forward"] = "reverse"
    """Of top_k: reverse is KL(policy, teacher), forward KL(teacher, policy)."""
    context_key: str | None = None
    """Key of a task's payload whose text only the teacher sees, in front of all tokens: a
    solution, a hint. Episodes without it are scored without."""
    context_template: str = "{context}"
    """How that text is put, with the special tokens of the model's template; {context} is the
    text."""
    max_context_tokens: int = Field(512, gt=0)
    """Ids of the text; groups with a longer one are dropped as overlong."""


class SourceSettings(Section):
    """What is different for the groups of one of several lists of env.tasks."""

    advantage: Literal["grpo", "dr_grpo", "rloo", "best_of_n", "reward_to_go"] | None = None
    """How their rewards become advantages; left out: trainer.advantage."""
    loss: Literal["sft"] | None = None
    """sft: their episodes are imitated, by the cross-entropy of their trained tokens, whatever
    policy sampled them; left out: the run's loss."""
    min_reward: float | None = None
    """Of loss = "sft": episodes that earned less are not imitated; left out: all are."""
    weight: float = Field(1.0, gt=0)
    """Their advantages, or their cross-entropy, are multiplied by it."""

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> SourceSettings:
        if self.loss == "sft" and self.advantage is not None:
            raise ValueError(
                f'trainer.sources: loss="sft" with advantage="{self.advantage}": imitation '
                "compares no rewards; leave one of them out (min_reward says whom it leaves out)"
            )
        if self.loss is None and self.min_reward is not None:
            raise ValueError(
                f"trainer.sources: min_reward={self.min_reward} has no effect: it needs loss = "
                '"sft"; leave it out, or set that'
            )
        return self


class CurriculumSettings(Section):
    """Weights of the lists of env.tasks that follow how often each is solved."""

    every: int = Field(0, ge=0)
    """Steps between changes of the weights; 0: they stay."""
    pass_reward: float = 1.0
    """An episode with this reward or more has solved its task."""
    floor: float = Field(0.1, gt=0, le=1)
    """Share of its weight in env.tasks that a list keeps when all of it is solved, or nothing."""
    smoothing: float = Field(0.9, ge=0, lt=1)
    """Of the measured rate, from take to take; 0: the newest take alone."""


class TrainerSettings(Section):
    """The algorithm, the optimizer, and where the trainer runs."""

    mode: Literal["rl", "sft"] = "rl"
    """rl, or sft: supervised training on env.conversations, for a warm start."""
    recipe: Recipe | None = None
    """An algorithm by name. It sets the defaults that its paper's objective needs, here and in
    [buffer]; explicit settings win. See docs/algorithms.md."""
    num_steps: int = Field(40, ge=0)
    """Optimizer steps; a finished run goes on when it is raised. SFT: at most so many of num_epochs
    passes; left out, or 0: all of them."""
    groups_per_step: int = Field(32, gt=0)
    """Groups (RL) or conversations (SFT) that one step consumes."""
    num_updates_per_take: int = Field(1, gt=0)
    """Optimizer updates made from one pass over a taken batch; one publish per take."""
    num_epochs_per_take: int = Field(1, gt=0)
    """Passes over a taken batch. In all but the first its groups are dealt to the updates again."""
    num_epochs: int = Field(1, gt=0)
    """SFT: passes over the conversations."""
    min_reward: float | None = None
    """SFT on recorded episodes (`outloop train-recorded`): those scored below it are left out."""
    reward_model: Literal["bradley_terry", "regression"] | None = None
    """SFT: train a reward model in place of the policy, from rows {"chosen", "rejected"} or
    {"messages", "reward"} of env.conversations, or from recorded episodes. bradley_terry: which of
    a pair, or of a group's episodes, is better; regression: the reward itself."""
    held_out_share: float = Field(0.1, ge=0, lt=1)
    """Of a reward model's pairs or groups, chosen by hash; never trained, but measured."""
    max_microbatch_tokens: int = Field(16384, gt=0)
    """Packed into one forward and backward; at least model.max_context_tokens."""
    learning_rate: float = Field(1e-6, ge=0)
    """For a pretrained model of some billion parameters; one of a million takes 1e-3."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises from zero."""
    lr_decay: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """What the learning rate does after the warm-up; wsd: it stays, and falls linearly over the
    last wsd_decay_updates."""
    wsd_decay_updates: int | None = Field(None, gt=0)
    """Required by lr_decay = "wsd": its last updates, in which the learning rate falls."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Share of the learning rate that is left when it has decayed."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled, on matrices."""
    optimizer: Literal["adam", "muon"] = "adam"
    """muon: Muon (torch.optim.Muon) for the matrices of the layers, at Adam's learning rate, and
    Adam for embeddings, norms and the head; without tensor parallelism and experts. A critic and a
    reward model have Adam."""
    muon_momentum: float = Field(0.95, ge=0, lt=1)
    """Of Muon."""
    adam_beta1: float = 0.9
    """Of Adam."""
    adam_beta2: float = 0.999
    """Of Adam."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to it."""
    advantage: Literal[
        "grpo",
        "dr_grpo",
        "rloo",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "pass_at_k",
        "best_of_n",
        "reward_to_go",
        "gae",
        "none",
    ] = "grpo"
    """How rewards of a group become advantages; see algorithms.md. reward_to_go: of single turns
    and tokens, by what was earned from there on (env.turn_scores = "train"). gae: by a critic.
    pass_at_k: by the best of pass_k attempts. best_of_n: the best attempts are imitated. none:
    rewards are measured only, a teacher trains."""
    turn_discount: float = Field(1.0, ge=0, le=1)
    """Of advantage = "reward_to_go": how much what is earned a turn later counts; 0: a turn answers
    for its own reward alone."""
    pass_k: int | None = Field(None, gt=1)
    """Required by advantage = "pass_at_k": of how many attempts the best counts."""
    critic: CriticSettings = CriticSettings()  # type: ignore[call-arg]
    """Of advantage = "gae"."""
    teacher: TeacherSettings | None = None
    """Left out: no distillation."""
    advantage_path: str | None = None
    """package.module:function, `def advantage(group: ScoredGroup) -> advantages`: for each episode
    a number, one for each of its turns, or for each turn one for each token; takes the place of
    `advantage`."""
    sources: dict[str, SourceSettings] = {}
    """What is different for single lists of env.tasks, by their names."""
    curriculum: CurriculumSettings = CurriculumSettings()  # type: ignore[call-arg]
    """Weights of several lists of env.tasks by how often each is solved."""
    overlong_penalty: float = Field(0.0, ge=0)
    """Taken off the reward of an episode that samples more than overlong_max_tokens; 0: nothing."""
    overlong_max_tokens: int | None = Field(None, gt=0)
    """Tokens sampled in an episode, over all its turns, from which the whole penalty is due."""
    overlong_buffer_tokens: int = Field(0, ge=0)
    """The penalty grows linearly over this many tokens below overlong_max_tokens."""
    loss: Literal["ppo_clip", "gspo", "cispo", "reinforce"] = "ppo_clip"
    """The objective; see algorithms.md."""
    loss_path: str | None = None
    """package.module:function, `def loss(inputs: LossInputs) -> losses`, float32 [N]; takes the
    place of `loss`."""
    loss_options: dict[str, Any] = {}
    """`inputs.options` of your own loss."""
    clip_low: float = Field(0.2, gt=0)
    """Ratios are clipped below 1 - clip_low; 1 or more: no lower bound. Left out: 0.2 for ppo_clip,
    3e-4 for gspo, 1.0 for cispo."""
    clip_high: float = Field(0.28, gt=0)
    """Ratios are clipped above 1 + clip_high. Left out: 0.28 for ppo_clip, 4e-4 for gspo, 4.0 for
    cispo."""
    dual_clip: float = Field(3.0, ge=0)
    """Where the advantage is negative, ppo_clip's and gspo's loss is at most this times
    |advantage|; more than 1, or 0: no bound but that of the log-ratio, exp(20)."""
    denominator: Literal["tokens", "episodes", "episode_means", "budget", "constant"] = "tokens"
    """What an update's summed loss is divided by: trained tokens; episodes; episodes, with each
    one's sum divided by its trained tokens first; episodes times token_budget; a constant."""
    denominator_constant: float | None = Field(None, gt=0)
    """Required by denominator = "constant"."""
    token_budget: int | None = Field(None, gt=0)
    """Tokens that an episode may generate; required by denominator = "budget"."""
    proximal: Literal["behavior", "recompute"] = "behavior"
    """What the ratio of the loss is taken to: the logprobs recorded when tokens were sampled, or
    those of the trainer's weights before the first update of a take (one forward more)."""
    correction: Literal[
        "none",
        "token_tis",
        "sequence_tis",
        "geometric_tis",
        "token_mis",
        "sequence_mis",
        "geometric_mis",
    ] = "none"
    """Weight of a token for the step from behavior to proximal logprobs: its own ratio, the product
    over its sequence, or their geometric mean, which does not depend on length; truncated (tis) at
    correction_cap, or masked (mis) outside correction_floor..correction_cap. A masked token adds
    nothing to the loss, KL and entropy included."""
    correction_cap: float = Field(2.0, ge=1)
    """Largest importance weight."""
    correction_floor: float = Field(0.0, ge=0, le=1)
    """Masked corrections: ratios below are masked too."""
    correction_veto: float = Field(0.0, ge=0, lt=1)
    """A sequence with a token whose ratio proximal / behavior is below is masked whole; 0: none."""
    opsm_delta: float = Field(0.0, ge=0)
    """Off-policy sequence masking: tokens with a negative advantage are left out of the policy's
    term where the mean of behavior - policy logprobs over their sequence exceeds this, in nats;
    0: none are."""
    kl: Literal["none", "k1", "k2", "k3"] = "none"
    """Pull towards the reference model: k1 in the reward, k2 or k3 in the loss."""
    reference_path: Path | None = None
    """Hugging Face folder of the reference, of the policy's vocabulary; left out: model.path as
    it was when the run began."""
    reference_refresh_every: int = Field(0, ge=0)
    """Steps after which the policy becomes the reference, again and again; 0: never."""
    reference_decay: float | None = Field(None, gt=0, lt=1)
    """The reference is a moving average: after each step this share of it is kept, and the rest is
    the policy; left out: it stays."""
    kl_coefficient: float = Field(1e-3, ge=0)
    """Weight of the pull towards the reference; without effect with kl = "none"."""
    kl_target: float | None = Field(None, gt=0)
    """Mean behavior - reference logprob of a trained token, in nats, that kl_coefficient is moved
    towards, by at most 2% a step; left out: it stays."""
    kl_ratio_cap: float = Field(2.0, ge=1)
    """Largest weight policy / behavior of k2 and k3 in the loss."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Bonus per nat of entropy at trained tokens."""
    entropy_target: float | None = Field(None, gt=0)
    """Mean entropy of a trained token, in nats, that entropy_coefficient is moved towards, by at
    most 2% a step; left out: it stays."""
    mask_truncated: bool = False
    """Leave the tokens of truncated episodes out of the loss; they still count in statistics.
    Truncated: a limit of turns, time or tokens ended the episode, or the limit of one answer ended
    a branch (finish_reason "length" of its last turn)."""
    routing_replay: bool | None = None
    """Mixtures of experts: servers report which experts each token went to, and the trainer sends
    it there too; see trainer.md. Left out: on where the model has experts."""
    num_threads: int = Field(1, gt=0)
    """Of each trainer process."""
    num_ranks: int = Field(1, gt=0)
    """Trainer processes, started by torchrun; how they split the model is in `megatron`."""
    rank_timeout_s: float = Field(600.0, gt=0)
    """A rank for which the others wait longer than this ends the run, with its name and phase."""
    checkpoint_every: int = Field(10, ge=0)
    """Steps between checkpoints; 0: only at the end."""
    keep_checkpoints: int = Field(2, gt=0)
    """How many of the newest checkpoints are kept."""
    trains_while_saving: bool = True
    """A checkpoint is copied to the host's memory (weights and both moments) and written from there
    while training goes on; false: no copy, and training waits until it is written."""
    take_timeout_s: float = Field(300.0, gt=0)
    """For a batch of groups; then the run fails with what it waited for."""
    resume: bool = True
    """Go on from the newest checkpoint of the run's folder."""
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """auto: CUDA where torch offers it, else the CPU. "cuda:N": the Nth device that the process
    sees, for one rank; several ranks are placed by `gpus`."""
    gpus: tuple[int, ...] = ()
    """Which of the machine's CUDA devices the ranks get, one each, in their order; empty: the
    first that servers do not have, or with is_colocated the first."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and activations. bfloat16: the optimizer keeps float32 main weights and moments,
    which checkpoints hold; gradients are summed, logprobs and losses computed in float32."""
    layers: Literal["auto", "local", "local_varlen", "transformer_engine"] = "auto"
    """auto: on a GPU Transformer Engine's layers where it is importable, else Megatron's local ones
    with torch's attention of variable length; on a CPU local ones with padded attention. Attention
    of variable length computes in bfloat16."""
    is_colocated: bool = False
    """Servers share the trainer's devices: while they sample, its weights and optimizer state are
    in the host's memory; for a step they pause and give up their cache and weights. Turns in flight
    wait meanwhile, without ageing by router.turn_timeout_s; env.episode_deadline_s goes on."""
    profile_steps: tuple[int, ...] = ()
    """Steps to profile with torch.profiler; the traces are in profile/."""
    max_grad_spike: float = Field(0.0, ge=0)
    """An update whose gradient norm exceeds this many times the median of the last 20 is refused
    and stops the run, as one that is not finite always does; 0: no limit."""
    hang_timeout_s: float = Field(1800.0, gt=0)
    """A rank that makes no progress for so long reports its phase and stacks, and ends."""
    megatron: dict[str, Any] = {}
    """Raw Megatron-core TransformerConfig fields under their upstream names."""

    @property
    def num_updates(self) -> int:
        """Optimizer updates of an RL run."""
        return self.num_steps * self.num_updates_per_take * self.num_epochs_per_take

    @model_validator(mode="before")
    @classmethod
    def _apply_defaults(cls, tree: Any) -> Any:
        """A recipe and a loss bring their own defaults."""
        return trainer_defaults(tree) if isinstance(tree, dict) else tree

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> TrainerSettings:
        self._refuse_what_has_no_effect()
        limit, ramp = self.overlong_max_tokens, self.overlong_buffer_tokens
        if self.overlong_penalty and limit is None:
            raise ValueError(
                f"trainer.overlong_penalty={self.overlong_penalty} without overlong_max_tokens; "
                "say from how many generated tokens an episode pays it"
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
        if 0 < self.dual_clip <= 1:
            raise ValueError(
                f"trainer.dual_clip={self.dual_clip} would bound the loss on policy too; more than "
                "1 is allowed, 3 is usual, and 0 turns it off"
            )
        if (self.lr_decay == "wsd") and self.wsd_decay_updates is None:
            raise ValueError(
                'trainer.lr_decay="wsd" needs trainer.wsd_decay_updates: over how many of the last '
                "updates the learning rate falls, for example a tenth of them"
            )
        self._refuse_wrong_teacher()
        if self.advantage == "pass_at_k" and self.advantage_path is None and self.pass_k is None:
            raise ValueError(
                'trainer.advantage="pass_at_k" needs trainer.pass_k: of how many attempts the best '
                "counts, less than buffer.group_size"
            )
        if self.denominator == "constant" and self.denominator_constant is None:
            raise ValueError(
                'trainer.denominator="constant" needs trainer.denominator_constant: the number by '
                'which an update\'s summed loss is divided; or set trainer.denominator = "budget"'
            )
        if self.denominator == "budget" and self.token_budget is None:
            raise ValueError(
                'trainer.denominator="budget" needs trainer.token_budget: the tokens that an '
                "episode may generate, for example sampling.max_new_tokens"
            )
        if self.loss == "gspo" and self.loss_path is None:
            self._refuse_wrong_gspo()
        self._refuse_wrong_reference()
        imitated = [name for name, one in self.sources.items() if one.loss == "sft"]
        if self.kl == "k1" and imitated:
            raise ValueError(
                f'trainer.kl="k1" with trainer.sources.{imitated[0]}.loss="sft": k1 is taken off '
                'rewards, which are not trained there; set trainer.kl = "k3"'
            )
        if self.sources and (
            self.advantage_path is not None or self.advantage not in _OF_ONE_GROUP
        ):
            raise ValueError(
                f"trainer.sources={sorted(self.sources)} with trainer.advantage={self.advantage!r}"
                f", advantage_path={self.advantage_path!r}: what differs by source is an advantage "
                f"of one group; set trainer.advantage to one of {', '.join(_OF_ONE_GROUP)}"
            )
        return self

    def _refuse_wrong_teacher(self) -> None:
        teacher = self.teacher
        if teacher is None:
            if self.recipe == "distill":
                raise ValueError(
                    'trainer.recipe="distill" without a teacher trains nothing; set '
                    "trainer.teacher.path or urls, or, for the policy itself with more "
                    "to see, trainer.teacher.context_key"
                )
            if self.advantage == "none" and self.advantage_path is None and self.mode == "rl":
                raise ValueError(
                    'trainer.advantage="none" without trainer.teacher trains nothing; set an '
                    "advantage, or a teacher"
                )
            return
        if self.kl == "k1" and self.advantage == "none" and self.advantage_path is None:
            raise ValueError(
                'trainer.kl="k1" with trainer.advantage="none": k1 is taken off rewards, which are '
                'not trained; set trainer.kl = "k3"'
            )
        if teacher.path is not None and teacher.urls:
            raise ValueError(
                f"trainer.teacher.path={str(teacher.path)!r} with trainer.teacher.urls="
                f"{list(teacher.urls)}: one teacher is allowed; leave one of them out"
            )
        if teacher.path is None and not teacher.urls and teacher.context_key is None:
            raise ValueError(
                "trainer.teacher names no model and no context_key: the policy would be its own "
                "teacher and learn nothing; set trainer.teacher.path or urls, or context_key"
            )
        self._refuse_idle_teacher(teacher)

    def _refuse_idle_teacher(self, teacher: TeacherSettings) -> None:
        for name, has_effect, needed in (
            ("divergence", teacher.top_k > 0, "trainer.teacher.top_k above 0"),
            ("context_template", teacher.context_key is not None, "trainer.teacher.context_key"),
            ("max_context_tokens", teacher.context_key is not None, "trainer.teacher.context_key"),
            ("api_key_file", bool(teacher.urls), "trainer.teacher.urls"),
            ("timeout_s", bool(teacher.urls), "trainer.teacher.urls"),
            ("max_concurrent_requests", bool(teacher.urls), "trainer.teacher.urls"),
        ):
            value = getattr(teacher, name)
            if not has_effect and value != TeacherSettings.model_fields[name].default:
                raise ValueError(
                    f"trainer.teacher.{name}={value!r} has no effect: it needs {needed}; leave it "
                    "out, or set that"
                )
        if "{context}" not in teacher.context_template:
            raise ValueError(
                f"trainer.teacher.context_template={teacher.context_template!r} lacks {{context}}, "
                "the place of the text"
            )

    def _refuse_wrong_reference(self) -> None:
        moves = self.reference_refresh_every or self.reference_decay is not None
        if moves and self.reference_path is not None:
            raise ValueError(
                f"trainer.reference_path={str(self.reference_path)!r} with a reference that "
                "follows the policy (reference_refresh_every, reference_decay): leave one out"
            )
        if self.reference_refresh_every and self.reference_decay is not None:
            raise ValueError(
                f"trainer.reference_refresh_every={self.reference_refresh_every} and "
                f"reference_decay={self.reference_decay} are both set; leave one out"
            )
        if self.reference_decay is not None and self.dtype == "bfloat16":
            raise ValueError(
                f'trainer.reference_decay={self.reference_decay} with trainer.dtype="bfloat16": '
                "bfloat16 drops the small part that a step adds to an average; set "
                "trainer.reference_refresh_every instead"
            )

    def _refuse_wrong_gspo(self) -> None:
        if self.denominator != "episode_means":
            raise ValueError(
                f'trainer.loss="gspo" with trainer.denominator="{self.denominator}": in GSPO every '
                'sequence weighs the same; set trainer.denominator = "episode_means", or leave it '
                "out"
            )
        if min(self.clip_low, self.clip_high) >= _WIDE_FOR_GSPO:
            raise ValueError(
                f'trainer.loss="gspo" with trainer.clip_low={self.clip_low}, clip_high='
                f"{self.clip_high}: the mean ratio of a sequence never goes so far, so nothing "
                "would be clipped; below 0.2 is allowed, the paper's 3e-4 and 4e-4 are the default"
            )

    def _refuse_what_has_no_effect(self) -> None:
        if self.mode == "rl" and not self.num_steps:
            raise ValueError(
                "trainer.num_steps=0: 1 or more is allowed; 0 is for supervised training"
            )
        values = {name: getattr(self, name) for name in type(self).model_fields}
        fields = type(self).model_fields
        changed = [n for n in fields if values[n] != fields[n].default]
        for name in changed:
            has_effect, needed = EFFECTS.get(name, _ALWAYS)
            if not has_effect(values):
                raise ValueError(
                    f"trainer.{name}={values[name]!r} has no effect: it needs {needed}; "
                    "leave it out, or set that"
                )
        idle = [name for name in changed if name in RL_ONLY]
        if self.mode == "sft" and idle:
            raise ValueError(
                f'trainer.{idle[0]}={values[idle[0]]!r} has no effect with trainer.mode="sft"; '
                "leave it out"
            )


_OF_ONE_GROUP = ("grpo", "dr_grpo", "rloo", "best_of_n", "reward_to_go")
_WIDE_FOR_GSPO = 0.2
"""The usual range of a token's ratio."""
_ALWAYS: tuple[Callable[[Any], bool], str] = (lambda values: True, "")
