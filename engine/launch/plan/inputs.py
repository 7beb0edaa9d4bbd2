"""The inputs of `outloop plan`: a TOML file of times and sizes.

Nothing is guessed: a plan without measured or given times is refused.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from outloop.buffer.errors import SettingsError
from outloop.engine.launch.plan.bounds import Loop, Servers
from outloop.engine.launch.plan.lengths import Lengths, Part
from outloop.engine.launch.plan.memory import Layout, ModelShape
from outloop.engine.launch.plan.network import all_reduce_s, broadcast_s

FORWARD_BACKWARD = 6
"""Floating-point operations for a parameter and token, forward and backward (Kaplan et al. 2020,
"Scaling Laws for Neural Language Models", section 2.1); the forward pass takes two of them."""
_RUN_SECTIONS = frozenset({"run", "env", "buffer", "router", "server", "publish", "sampling"})


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


_Given = float | tuple[Part, ...]


def _lengths(given: _Given) -> Lengths:
    if isinstance(given, float):
        return Lengths.constant(given)
    return Lengths.mixture(given)


class LoopInputs(_Section):
    """Settings of the run that decide about time, under their own names."""

    group_size: int = Field(8, ge=1)
    groups_per_step: int = Field(32, ge=1)
    max_staleness: int = Field(1, ge=0)
    max_refills: int = Field(0, ge=0)
    no_signal_share: float = Field(0.0, ge=0, lt=1)
    max_concurrent_episodes: int = Field(1_000_000, gt=0)
    """Episodes at once, over all runners."""


class EpisodeInputs(_Section):
    """Lengths of episodes: a number for all, or parts of a mixture."""

    seconds: _Given
    """Time outside the model: tools, sandboxes, verifiers."""
    tokens: _Given = 0.0
    """Sampled tokens."""
    prompt_tokens: float = Field(0.0, ge=0)
    """Tokens of prompts and tool results, which servers compute once."""
    overhead_s: float = Field(0.0, ge=0)
    """Time for claim, router and records."""
    by_task: float = Field(0.0, ge=0, le=1)
    """Share of attempts that are as long as their task, rather than by chance."""


class TrainerInputs(_Section):
    """Time of the trainer: measured, or from its speed."""

    gpus: int = Field(1, ge=1)
    update_s: float | None = Field(None, gt=0)
    """Seconds of an update. None: computed from the three below and the tokens of a step."""
    gpu_tflops: float | None = Field(None, gt=0)
    """Peak of one GPU."""
    mfu: float | None = Field(None, gt=0, le=1)
    """Share of the peak in use."""
    num_forwards: int = Field(0, ge=0)
    """Further forward passes: one each for proximal and reference logprobs."""
    fixed_s: float = Field(0.0, ge=0)
    """Seconds of a step, whatever its size."""
    publish_s: float | None = Field(None, ge=0)
    """Seconds of a publish. None: computed from the model's size and the network."""
    microbatch_tokens: int = Field(16384, gt=0)


class NetworkInputs(_Section):
    """Bandwidths."""

    publish_gb_per_s: float = Field(25.0, gt=0)
    """Bandwidth into one server: 25 is a link of 200 Gbit/s."""
    gradient_gb_per_s: float = Field(25.0, gt=0)
    """Bandwidth between two ranks with the same shard."""


class LayoutInputs(_Section):
    """Shares of a model on trainer ranks."""

    tensor: int = Field(1, ge=1)
    pipeline: int = Field(1, ge=1)
    context: int = Field(1, ge=1)
    expert: int = Field(1, ge=1)
    expert_tensor: int | None = Field(None, ge=1)
    """Ranks that share an expert. None: as `tensor`."""
    recomputes: bool = False
    distributed_optimizer: bool = True
    dtype: str = Field("bfloat16", pattern="^(bfloat16|float32)$")


class GpuInputs(_Section):
    """One GPU."""

    memory_gb: float = Field(80.0, gt=0)


class PriceInputs(_Section):
    """Prices of a GPU for an hour, in any currency."""

    on_demand: float = Field(gt=0)
    spot: float | None = Field(None, gt=0)
    spot_hours_between: float = Field(24.0, gt=0)
    """Hours until a spot GPU is taken away, on average."""
    spot_recovery_s: float = Field(120.0, ge=0)
    """Seconds until another GPU serves in its place."""


class ClusterInputs(_Section):
    """Numbers of GPUs to split between servers and trainer."""

    gpus: tuple[int, ...]
    gpus_per_group: float | None = Field(None, gt=0)
    """GPUs for each group of a step, from loop.groups_per_step on. None: the batch is fixed."""


class Inputs(_Section):
    """A whole plan."""

    loop: LoopInputs = LoopInputs()  # type: ignore[call-arg]
    episodes: EpisodeInputs
    trainer: TrainerInputs = TrainerInputs()  # type: ignore[call-arg]
    servers: Servers | None = None
    """None: the seconds of episodes contain the model's."""
    network: NetworkInputs = NetworkInputs()  # type: ignore[call-arg]
    layout: LayoutInputs = LayoutInputs()  # type: ignore[call-arg]
    model: dict[str, Any] | None = None
    """Sizes of the policy under the names of a Hugging Face config.json, or `config`: its path."""
    gpu: GpuInputs = GpuInputs()  # type: ignore[call-arg]
    prices: PriceInputs | None = None
    cluster: ClusterInputs | None = None

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Inputs:
        trainer = self.trainer
        by_speed = trainer.gpu_tflops is not None and trainer.mfu is not None
        if trainer.update_s is None and not (by_speed and self.model is not None):
            raise ValueError(
                "trainer.update_s is missing: a plan needs the measured seconds of an update; or "
                "[model] with trainer.gpu_tflops and trainer.mfu"
            )
        if self.cluster is not None and self.servers is None:
            raise ValueError(
                "cluster.gpus without [servers]: how GPUs are split depends on a server's speed; "
                "give servers.tokens_per_s_alone, servers.tokens_per_s and servers.max_running"
            )
        return self


class Plan:
    """Inputs, and the quantities that follow from them."""

    def __init__(self, inputs: Inputs, shape: ModelShape | None) -> None:
        """`shape`: of `inputs.model`."""
        self.inputs = inputs
        self.model = shape

    def layout(self, trainer_gpus: int) -> Layout:
        """Share the model over `trainer_gpus` ranks."""
        given = self.inputs.layout
        ranks = given.tensor * given.pipeline * given.context
        return Layout(**given.model_dump(), data=max(1, trainer_gpus // ranks))

    @property
    def weight_bytes(self) -> float:
        """Bytes of a publish."""
        width = 2 if self.inputs.layout.dtype == "bfloat16" else 4
        return width * self.model.num_params if self.model else 0.0

    def _update_s(self, *, trainer_gpus: int, groups_per_step: int) -> float:
        trainer = self.inputs.trainer
        if trainer.update_s is not None or self.model is None:
            assert trainer.update_s is not None
            return trainer.update_s
        assert trainer.gpu_tflops is not None
        assert trainer.mfu is not None
        layout, episodes = self.layout(trainer_gpus), self.inputs.episodes
        operations = (FORWARD_BACKWARD + 2 * trainer.num_forwards) * self.model.num_active_params
        if layout.recomputes:
            operations += 2 * self.model.num_active_params
        each = _lengths(episodes.tokens).mean() + episodes.prompt_tokens
        work = operations * groups_per_step * self.inputs.loop.group_size * each
        compute_s = work / (trainer_gpus * trainer.gpu_tflops * 1e12 * trainer.mfu)
        reduce_s = all_reduce_s(
            4.0 * self.model.num_params / (layout.tensor * layout.pipeline),
            ranks=layout.data * layout.context,
            bandwidth=self.inputs.network.gradient_gb_per_s * 1e9,
        )
        return compute_s + reduce_s + trainer.fixed_s

    def _publish_s(self, num_servers: int) -> float:
        if self.inputs.trainer.publish_s is not None:
            return self.inputs.trainer.publish_s
        bandwidth = self.inputs.network.publish_gb_per_s * 1e9
        return broadcast_s(self.weight_bytes, servers=num_servers, bandwidth=bandwidth)

    def loop(
        self,
        *,
        num_servers: int | None = None,
        trainer_gpus: int | None = None,
        groups_per_step: int | None = None,
    ) -> Loop:
        """Return the loop of the inputs, with other sizes where they are given."""
        given, episodes, servers = self.inputs.loop, self.inputs.episodes, self.inputs.servers
        groups = groups_per_step or given.groups_per_step
        tokens, pool = _lengths(episodes.tokens), None
        if servers is not None:
            pool = servers.model_copy(update={"count": num_servers or servers.count})
            if servers.prefill_tokens_per_s:
                # In the time of a prompt's prefill a server samples so many tokens.
                each = servers.tokens_per_s / servers.prefill_tokens_per_s
                tokens = Lengths(tokens.values + episodes.prompt_tokens * each)
        return Loop(
            group_size=given.group_size,
            groups_per_step=groups,
            max_staleness=given.max_staleness,
            slots=given.max_concurrent_episodes,
            update_s=self._update_s(
                trainer_gpus=trainer_gpus or self.inputs.trainer.gpus, groups_per_step=groups
            ),
            publish_s=self._publish_s(pool.count if pool else 1),
            seconds=_lengths(episodes.seconds),
            tokens=tokens,
            servers=pool,
            by_task=episodes.by_task,
            overhead_s=episodes.overhead_s,
            no_signal_share=given.no_signal_share,
            max_refills=given.max_refills,
        )


def load_plan(path: Path) -> Plan:
    """Read the plan of a TOML file.

    Raises:
        SettingsError: the file, a name in it or a number is wrong, or measurements are missing.
    """
    try:
        tree = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"plan path={str(path)!r} cannot be read ({error}); give a TOML file such as "
            "docs/scaling.toml"
        ) from error
    if _RUN_SECTIONS & tree.keys():
        raise SettingsError(
            f"plan path={str(path)!r} has the settings of a run; `outloop check {path}` says what "
            "that run takes, and docs/scaling.toml is the form of a plan"
        )
    return plan_of(tree, source=str(path), folder=path.parent)


def plan_of(tree: Mapping[str, Any], *, source: str, folder: Path = Path()) -> Plan:
    """Make the plan of a tree of values; `folder`: of a relative model.config.

    Raises:
        SettingsError: a name or a number is wrong, or measurements are missing.
    """
    try:
        inputs = Inputs(**tree)
    except ValidationError as error:
        raise SettingsError(f"{source}: {_sentence(error)}") from error
    plan = Plan(inputs, _shape(inputs.model, folder) if inputs.model is not None else None)
    plan.loop()
    return plan


def _shape(model: Mapping[str, Any], folder: Path) -> ModelShape:
    if "config" not in model:
        return ModelShape.of_config(model, source="[model]")
    path = folder / str(model["config"])
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"model.config={str(model['config'])!r} cannot be read ({error}); give the config.json "
            "of a Hugging Face folder"
        ) from error
    return ModelShape.of_config(found, source=str(path))


def _sentence(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        # The alternatives of a union are no names of the file.
        name = ".".join(str(part) for part in item["loc"] if part != "float")
        if item["type"] == "extra_forbidden":
            lines.append(f"{name} is no input of a plan; docs/scaling.md lists them")
        elif item["type"] == "missing":
            lines.append(f"{name} is missing: a plan is made from measurements; give it")
        elif item["type"] == "value_error":
            lines.append(str(item["msg"]).removeprefix("Value error, "))
        else:
            lines.append(f"{name}={item['input']!r}: {item['msg'][0].lower()}{item['msg'][1:]}")
    return "; ".join(lines)
