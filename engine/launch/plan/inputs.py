"""What a plan is made from: a TOML file, the folder of a run, or both.

Owns: names, units and refusals of the file, and what a run's records say in their place. Does not
own: opening a run (cli). Invariant: nothing is guessed: a plan without measured or given times is
refused.
"""

from __future__ import annotations

import math
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings
from outloop.buffer.store.ledger import Ledger
from outloop.engine.launch.plan.admission import Rules
from outloop.engine.launch.plan.cost import Prices
from outloop.engine.launch.plan.lengths import Floats, Lengths, Part
from outloop.engine.launch.plan.memory import Layout, ModelShape
from outloop.engine.launch.plan.network import all_reduce_s, broadcast_s
from outloop.engine.launch.plan.serving import Servers
from outloop.engine.launch.plan.simulate import Episodes, Scenario

MIN_STEPS = 3
"""Rows of steps of a run, after the first, that a plan is made from."""
MAX_GROUPS = 32
"""Of a step that is simulated; a larger cluster is simulated as a slice."""
FORWARD_BACKWARD = 6
"""Floating-point operations for a parameter and token, forward and backward (Kaplan et al. 2020,
"Scaling Laws for Neural Language Models", section 2.1); two of them are the forward pass."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _PartOf(_Section):
    """Uniform from `low` to `high`; with `median` and `sigma` log-normal, cut to that range."""

    share: float = Field(gt=0)
    low: float = Field(0.0, ge=0)
    high: float = Field(math.inf, gt=0)
    median: float | None = Field(None, gt=0)
    sigma: float = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _refuse_endless(self) -> _PartOf:
        if self.high < self.low or (self.median is None and math.isinf(self.high)):
            raise ValueError(
                f"low={self.low:g} and high={self.high:g} are no range; give a high above low, or "
                "median and sigma"
            )
        return self


_Given = float | tuple[_PartOf, ...]


def _lengths(given: _Given) -> Lengths:
    if isinstance(given, float):
        return Lengths.constant(given)
    return Lengths.mixture([Part(**part.model_dump()) for part in given])


class LoopInputs(_Section):
    """The settings of the run that decide about time, under their own names."""

    group_size: int = Field(8, ge=1)
    groups_per_step: int = Field(32, ge=1)
    max_staleness: int = Field(1, ge=0)
    pipeline_depth: float | Literal["auto"] = "auto"
    over_provision: float = 1.0
    task_order: Literal["slot", "longest_first"] = "slot"
    """longest_first: each task was played by one group before."""
    max_refills: int = Field(0, ge=0)
    no_signal_share: float = Field(0.0, ge=0, lt=1)
    max_concurrent_episodes: int = Field(1_000_000, gt=0)
    """Over all runners."""

    def rules(self) -> Rules:
        """What the simulator follows; raises SettingsError for limits that cannot be met."""
        age = max(self.max_staleness, int(self.over_provision > 1))
        if self.pipeline_depth != "auto" and self.pipeline_depth > age:
            raise SettingsError(
                f"loop.pipeline_depth={self.pipeline_depth:g} cannot be met with "
                f"loop.max_staleness={self.max_staleness}: with one batch a step, groups that "
                f"start so far ahead are too old when their turn comes; at most {age} is, or raise "
                "max_staleness"
            )
        return Rules(
            group_size=self.group_size,
            groups_per_step=self.groups_per_step,
            max_staleness=self.max_staleness,
            pipeline_depth=self.pipeline_depth,
            over_provision=self.over_provision,
            task_order=self.task_order,
        )


class EpisodeInputs(_Section):
    """How long episodes are: a number for all, or parts of a mixture."""

    seconds: _Given
    """Outside the model: tools, sandboxes, verifiers."""
    tokens: _Given = 0.0
    """Sampled."""
    prompt_tokens: float = Field(0.0, ge=0)
    """Of prompts and tool results, which servers compute once."""
    num_turns: int = Field(1, ge=1)
    overhead_s: float = Field(0.0, ge=0)
    """What an episode takes beside: claim, router, records."""
    by_task: float = Field(0.0, ge=0, le=1)
    """Share of attempts that are as long as their task, rather than by chance."""
    lost_share: float = Field(0.0, ge=0, lt=1)
    """Share of attempts that the infrastructure loses once; they are resumed."""
    recovery_s: float = Field(0.0, ge=0)
    """Until a lost attempt goes on."""


class ServerInputs(_Section):
    """One server's speed, measured or computed, and how many there are."""

    count: int = Field(1, ge=1)
    gpus: int = Field(1, ge=1)
    """Of one server."""
    tokens_per_s_alone: float = Field(gt=0)
    tokens_per_s: float = Field(gt=0)
    max_running: int = Field(ge=1)
    prefill_tokens_per_s: float | None = Field(None, gt=0)

    def servers(self, count: int) -> Servers:
        """A pool of `count`."""
        return Servers(
            count=count,
            tokens_per_s_alone=self.tokens_per_s_alone,
            tokens_per_s=self.tokens_per_s,
            max_running=self.max_running,
        )


class TrainerInputs(_Section):
    """The trainer's time: measured, or from its speed."""

    gpus: int = Field(1, ge=1)
    update_s: float | None = Field(None, gt=0)
    """Of a step. Or from the three below and the tokens of a step."""
    gpu_tflops: float | None = Field(None, gt=0)
    """Peak of one GPU."""
    mfu: float | None = Field(None, gt=0, le=1)
    """Share of it that is reached."""
    num_forwards: int = Field(0, ge=0)
    """Beside that of the update: proximal and reference logprobs, one each."""
    fixed_s: float = Field(0.0, ge=0)
    """Of a step, whatever its size."""
    publish_s: float | None = Field(None, ge=0)
    """Or from the model's size and the network."""
    pause_s: float | None = Field(None, ge=0)
    """Of a publish, time in which servers stand still; left out: all of it."""
    microbatch_tokens: int = Field(16384, gt=0)


class NetworkInputs(_Section):
    """Bandwidths."""

    publish_gb_per_s: float = Field(25.0, gt=0)
    """Into one server: 25 is a link of 200 Gbit/s."""
    gradient_gb_per_s: float = Field(25.0, gt=0)
    """Between two ranks that hold the same shard."""


class LayoutInputs(_Section):
    """How trainer ranks share the model."""

    tensor: int = Field(1, ge=1)
    pipeline: int = Field(1, ge=1)
    context: int = Field(1, ge=1)
    expert: int = Field(1, ge=1)
    expert_tensor: int | None = Field(None, ge=1)
    """Ranks that share an expert; left out: `tensor`."""
    recomputes: bool = False
    distributed_optimizer: bool = True
    dtype: Literal["bfloat16", "float32"] = "bfloat16"


class ModelInputs(_Section):
    """The policy: a Hugging Face config.json, or its sizes under that file's names."""

    config: Path | None = None
    model_type: str = "qwen3"
    num_hidden_layers: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    vocab_size: int | None = None
    tie_word_embeddings: bool = False
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    n_routed_experts: int | None = None
    n_shared_experts: int | None = None
    first_k_dense_replace: int | None = None
    attention_bias: bool | None = None
    use_qk_norm: bool | None = None

    def shape(self, folder: Path) -> ModelShape:
        """Read the sizes; `config` is relative to `folder`."""
        if self.config is None:
            return ModelShape.of_config(self.model_dump(exclude_none=True), source="[model]")
        import json

        path = folder / self.config
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise SettingsError(
                f"model.config={str(self.config)!r} cannot be read ({error}); give the config.json "
                "of a Hugging Face folder"
            ) from error
        return ModelShape.of_config(found, source=str(path))


class GpuInputs(_Section):
    """One GPU."""

    memory_gb: float = Field(80.0, gt=0)


class FailureInputs(_Section):
    """How often things fail, and what it costs."""

    gpu_hours_between: float = Field(50_000.0, gt=0)
    """Hours between failures of one GPU, its machine included."""
    server_recovery_s: float = Field(120.0, ge=0)
    trainer_restart_s: float = Field(300.0, ge=0)
    checkpoint_write_s: float = Field(30.0, gt=0)
    """Of that, what the trainer waits for."""


class PriceInputs(_Section):
    """Of a GPU for an hour, in any currency."""

    on_demand: float = Field(gt=0)
    spot: float | None = Field(None, gt=0)
    spot_hours_between: float = Field(24.0, gt=0)
    """Hours until a spot GPU is taken away, on average."""

    def prices(self) -> Prices:
        """The same for the arithmetic."""
        return Prices(**self.model_dump())


class ClusterInputs(_Section):
    """Sizes to split between servers and trainer."""

    gpus: tuple[int, ...]
    gpus_per_group: float | None = Field(None, gt=0)
    """The batch grows with the cluster: a group for every so many GPUs, loop.groups_per_step at
    least. None: it does not."""


class Inputs(_Section):
    """A whole plan."""

    loop: LoopInputs = LoopInputs()  # type: ignore[call-arg]
    episodes: EpisodeInputs
    trainer: TrainerInputs = TrainerInputs()  # type: ignore[call-arg]
    servers: ServerInputs | None = None
    """None: the seconds of episodes contain the model's."""
    network: NetworkInputs = NetworkInputs()  # type: ignore[call-arg]
    layout: LayoutInputs = LayoutInputs()  # type: ignore[call-arg]
    model: ModelInputs | None = None
    gpu: GpuInputs = GpuInputs()  # type: ignore[call-arg]
    failures: FailureInputs = FailureInputs()  # type: ignore[call-arg]
    prices: PriceInputs | None = None
    cluster: ClusterInputs | None = None
    num_steps: int = Field(40, ge=2)
    """Simulated and counted."""
    seed: int = 0

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Inputs:
        trainer = self.trainer
        by_speed = trainer.gpu_tflops is not None and trainer.mfu is not None
        if trainer.update_s is None and not (by_speed and self.model is not None):
            raise ValueError(
                "trainer.update_s is missing: a plan needs the seconds of an update, measured; or "
                "[model] with trainer.gpu_tflops and trainer.mfu; or --run with a run that made "
                f"{MIN_STEPS + 1} steps"
            )
        if self.cluster is not None and self.servers is None:
            raise ValueError(
                "cluster.gpus without [servers]: how GPUs are split depends on a server's speed; "
                "give servers.tokens_per_s_alone, servers.tokens_per_s and servers.max_running"
            )
        self.loop.rules()
        return self


class Plan:
    """Inputs with everything computed from them that does not need a simulation."""

    def __init__(self, inputs: Inputs, *, folder: Path = Path(), lengths: Episodes | None = None):
        """`lengths`: of a run, in place of [episodes]; `folder`: of a relative model.config."""
        self.inputs = inputs
        self._folder = folder
        self.model = inputs.model.shape(folder) if inputs.model else None
        self.episodes = lengths or self._episodes()
        self._sampled_tokens = _lengths(inputs.episodes.tokens).mean()
        if inputs.servers is not None:
            inputs.servers.servers(1)

    def _episodes(self) -> Episodes:
        given, servers = self.inputs.episodes, self.inputs.servers
        tokens = _lengths(given.tokens)
        if servers is not None and given.prompt_tokens and servers.prefill_tokens_per_s:
            # A prompt occupies a server for prompt / prefill seconds, in which it samples so many.
            each = servers.tokens_per_s / servers.prefill_tokens_per_s
            tokens = Lengths(tokens.values + given.prompt_tokens * each)
        return Episodes(
            seconds=_lengths(given.seconds),
            tokens=tokens,
            num_turns=given.num_turns,
            overhead_s=given.overhead_s,
            by_task=given.by_task,
            lost_share=given.lost_share,
            recovery_s=given.recovery_s,
        )

    def with_places(self, places: int) -> Plan:
        """The same with so many episodes at once, over all runners."""
        loop = self.inputs.loop.model_copy(update={"max_concurrent_episodes": places})
        inputs = self.inputs.model_copy(update={"loop": loop})
        return Plan(inputs, folder=self._folder, lengths=self.episodes)

    def layout(self, trainer_gpus: int) -> Layout:
        """How so many ranks share the model."""
        given = self.inputs.layout
        ranks = given.tensor * given.pipeline * given.context
        return Layout(**given.model_dump(), data=max(1, trainer_gpus // ranks))

    @property
    def weight_bytes(self) -> float:
        """What a publish moves."""
        width = 2 if self.inputs.layout.dtype == "bfloat16" else 4
        return width * self.model.num_params if self.model else 0.0

    def tokens_per_step(self, groups_per_step: int) -> float:
        """What the trainer computes, prompts included."""
        given = self.inputs.episodes
        each = self._sampled_tokens + given.prompt_tokens
        return groups_per_step * self.inputs.loop.group_size * each

    def update_s(self, *, trainer_gpus: int, groups_per_step: int) -> float:
        """Seconds of an update: measured, or from operations and the gradients' all-reduce."""
        trainer = self.inputs.trainer
        if trainer.update_s is not None or self.model is None:
            assert trainer.update_s is not None
            return trainer.update_s
        assert trainer.gpu_tflops is not None
        assert trainer.mfu is not None
        layout = self.layout(trainer_gpus)
        operations = (FORWARD_BACKWARD + 2 * trainer.num_forwards) * self.model.num_active_params
        if layout.recomputes:
            operations += 2 * self.model.num_active_params
        work = operations * self.tokens_per_step(groups_per_step)
        compute_s = work / (trainer_gpus * trainer.gpu_tflops * 1e12 * trainer.mfu)
        gradients = 4.0 * self.model.num_params / (layout.tensor * layout.pipeline)
        reduce_s = all_reduce_s(
            gradients,
            ranks=layout.data * layout.context,
            bandwidth=self.inputs.network.gradient_gb_per_s * 1e9,
        )
        return compute_s + reduce_s + trainer.fixed_s

    def publish_s(self, num_servers: int) -> float:
        """Seconds of a publish: measured, or a broadcast of the weights."""
        if self.inputs.trainer.publish_s is not None:
            return self.inputs.trainer.publish_s
        bandwidth = self.inputs.network.publish_gb_per_s * 1e9
        return broadcast_s(self.weight_bytes, servers=num_servers, bandwidth=bandwidth)

    def slice(self, *, num_servers: int, trainer_gpus: int, groups_per_step: int) -> Scenario:
        """The run of a cluster, or of an n-th of it with an n-th of the batch.

        So that no more than MAX_GROUPS groups a step are simulated: the trainer's and the publish's
        seconds are those of the whole, and a batch that is large anyway has the same tail.
        """
        parts = -(-groups_per_step // MAX_GROUPS)
        whole = self.scenario(
            num_servers=num_servers, trainer_gpus=trainer_gpus, groups_per_step=groups_per_step
        )
        if parts == 1 or whole.servers is None:
            return whole
        rules = replace(whole.rules, groups_per_step=round(groups_per_step / parts))
        servers = replace(whole.servers, count=max(1, round(whole.servers.count / parts)))
        places = max(rules.group_size, whole.places // parts)
        return replace(whole, rules=rules, servers=servers, places=places)

    def scenario(
        self,
        *,
        num_servers: int | None = None,
        trainer_gpus: int | None = None,
        groups_per_step: int | None = None,
        rules: Rules | None = None,
        num_steps: int | None = None,
    ) -> Scenario:
        """The run of the inputs, with other sizes where they are given."""
        inputs = self.inputs
        rules = rules or inputs.loop.rules()
        if groups_per_step is not None:
            rules = replace(rules, groups_per_step=groups_per_step)
        servers = (
            inputs.servers.servers(num_servers or inputs.servers.count) if inputs.servers else None
        )
        publish_s = self.publish_s(servers.count if servers else 1)
        pause_s = inputs.trainer.pause_s
        warmup = rules.max_age + 2
        return Scenario(
            rules=rules,
            episodes=self.episodes,
            servers=servers,
            places=inputs.loop.max_concurrent_episodes,
            update_s=self.update_s(
                trainer_gpus=trainer_gpus or inputs.trainer.gpus,
                groups_per_step=rules.groups_per_step,
            ),
            publish_s=publish_s,
            pause_s=publish_s if pause_s is None else min(pause_s, publish_s),
            no_signal_share=inputs.loop.no_signal_share,
            max_refills=inputs.loop.max_refills,
            num_steps=warmup + (num_steps or inputs.num_steps),
            num_warmup_steps=warmup,
            seed=inputs.seed,
        )


def load_plan(path: Path) -> Plan:
    """The plan of a TOML file.

    Raises:
        SettingsError: the file, a name in it or a number is wrong, or measurements are missing.
    """
    try:
        tree = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(
            f"plan path={str(path)!r} cannot be read ({error}); give a TOML file such as the one "
            "in docs/scaling.md"
        ) from error
    return plan_of(tree, source=str(path), folder=path.parent)


def plan_of(
    tree: Mapping[str, Any], *, source: str, folder: Path = Path(), lengths: Episodes | None = None
) -> Plan:
    """The plan of a tree of values; raises as load_plan."""
    try:
        return Plan(Inputs(**tree), folder=folder, lengths=lengths)
    except ValidationError as error:
        raise SettingsError(f"{source}: {_sentence(error)}") from error


def _sentence(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        # A union's alternatives are no names of the file.
        name = ".".join(str(p) for p in item["loc"] if p not in ("float", "literal['auto']"))
        if item["type"] == "extra_forbidden":
            lines.append(f"{name} is no input of a plan; docs/scaling.md lists them")
        elif item["type"] == "missing":
            lines.append(
                f"{name} is missing: a plan is made from measurements; give it, or --run with the "
                "folder of a run"
            )
        elif item["type"] == "value_error":
            lines.append(str(item["msg"]).removeprefix("Value error, "))
        else:
            lines.append(f"{name}={item['input']!r}: {item['msg'][0].lower()}{item['msg'][1:]}")
    return "; ".join(lines)


def measured_tree(
    settings: Settings, rows: Sequence[Mapping[str, Any]], ledger: Ledger, *, source: str
) -> dict[str, Any]:
    """The tree of inputs that a run's settings, metrics and ledger give.

    Episodes' seconds contain the model's, as they were under that run's load: servers are not
    simulated. The first step is left out: it waits for the parts to start.

    Raises:
        SettingsError: too little was measured.
    """
    steps = [row for row in rows if row.get("train/step_s") is not None][1:]
    ended = [column for name, column in ledger.training.items() if name != "open"]
    number = sum(column.num_attempts for column in ended)
    if len(steps) < MIN_STEPS or number == 0:
        raise SettingsError(
            f"{source} made {len(steps)} steps after its first and ended {number} training "
            f"attempts; a plan needs {MIN_STEPS} and 1: let it go on, or give the times in a file"
        )

    def median(name: str) -> float:
        return statistics.median(row.get(name) or 0.0 for row in steps)

    counted = ("train/wait_s", "train/update_s", "train/evaluation_wait_s")
    buffer = settings.buffer
    with_signal = statistics.mean(row.get("train/groups_with_signal_share", 1.0) for row in steps)
    return {
        "loop": {
            "group_size": buffer.group_size,
            "groups_per_step": settings.trainer.groups_per_step,
            "max_staleness": buffer.max_staleness,
            "pipeline_depth": "auto"
            if buffer.pipeline_depth == "auto"
            else min(buffer.pipeline_depth, buffer.max_age),
            "over_provision": buffer.over_provision,
            "task_order": buffer.task_order,
            "max_refills": buffer.max_refills,
            "no_signal_share": min(0.99, 1.0 - with_signal) if buffer.drop_zero_signal else 0.0,
            "max_concurrent_episodes": settings.env.max_concurrent_episodes
            * max(1, settings.env.num_runners),
        },
        "episodes": {"seconds": sum(column.duration_s for column in ended) / number},
        "trainer": {
            "update_s": max(1e-3, median("train/update_s")),
            # What a step takes beside: publish, checkpoint, records.
            "publish_s": max(0.0, median("train/step_s") - sum(median(name) for name in counted)),
            "pause_s": median("publish/pause_s"),
        },
    }


def recorded_lengths(groups: Sequence[str], seconds: Floats, tokens: Floats) -> Episodes:
    """The lengths of a run's archived attempts, and how alike those of one group are.

    With `by_task` = b two attempts of a group have the same rank with probability b^2, and
    independent ones otherwise, so that the correlation of their ranks is b^2.

    Args:
        groups: the group of each attempt; seconds, tokens: of each, float64 [attempts].
    """
    ranks = np.argsort(np.argsort(seconds)) / len(seconds) - 0.5
    by_group: dict[str, list[float]] = {}
    for group, rank in zip(groups, ranks, strict=True):
        by_group.setdefault(group, []).append(float(rank))
    # Over all pairs of a group: (sum)^2 - sum of squares is twice the sum of products.
    products = sum(sum(own) ** 2 - sum(r * r for r in own) for own in by_group.values())
    pairs = sum(len(own) * (len(own) - 1) for own in by_group.values())
    alike = products / pairs / float(np.mean(ranks**2)) if pairs and len(seconds) > 1 else 0.0
    return Episodes(
        seconds=Lengths.sample(seconds),
        tokens=Lengths.sample(tokens),
        by_task=math.sqrt(min(1.0, max(0.0, alike))),
    )


def measured_lengths(ledger: Ledger, *, source: str) -> Episodes:
    """The lengths of a run's attempts, whatever became of them, by the buckets of its ledger."""
    counts: dict[float, int] = {}
    tokens: dict[float, int] = {}
    seconds = sampled = number = 0.0
    for name, column in ledger.training.items():
        if name == "open":
            continue
        for into, buckets in ((counts, column.by_duration), (tokens, column.by_tokens)):
            for bound, count in buckets.items():
                into[bound] = into.get(bound, 0) + count
        seconds, sampled = seconds + column.duration_s, sampled + column.num_tokens
        number += column.num_attempts
    if not number:
        raise SettingsError(
            f"{source} has no attempt that ended; a plan is made from measurements: let it go on"
        )
    return Episodes(
        seconds=Lengths.histogram(counts, mean=seconds / number),
        tokens=Lengths.histogram(tokens, mean=sampled / number),
    )
