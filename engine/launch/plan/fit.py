"""Whether a run's settings fit the GPUs that it would get, and about how long its steps would take.

Owns: what a plan's inputs are where nothing was measured: sizes by the settings, speeds by data
sheets. Invariant: every number that was assumed is in the table, under the name of its option.

* Memory of a rank and of a server: `memory`. A reference has the policy's weights once more, a
  critic all that the policy has. Servers that share the trainer's GPUs release theirs while it
  works, and it leaves while they sample; each keeps KEPT_BYTES there, which is assumed. For a
  checkpoint servers keep their weights beside everything of the trainer but activations
  (docs/publishing.md).
* Episodes: one turn that fills model.max_context_tokens, with an answer of sampling.max_new_tokens.
* A server reads its weights and, on average, half a full context for each turn at the memory's
  bandwidth (`bounds`); prompts and updates take their operations at the GPU's peak times mfu.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from outloop.buffer.settings import Settings
from outloop.engine.launch.plan.bounds import binding
from outloop.engine.launch.plan.inputs import Plan, plan_of
from outloop.engine.launch.plan.memory import (
    KEPT_BYTES,
    RESERVE,
    SERVER_SHARE,
    Layout,
    ModelShape,
    RankMemory,
    rank_memory,
    server_memory,
)

_GIB = 2.0**30
_MAX_TENSOR = 8
"""Ranks that share a layer; more do not fit into a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """What is assumed of each GPU and of the network; the defaults are an H100's data sheet."""

    memory_gib: float = 80.0
    tflops: float = 989.0
    """Peak in bfloat16."""
    mfu: float = 0.3
    """Share of it that is reached; docs/gpu.md has 0.18 for 0.6B and 0.40 for layers of 8B."""
    tb_per_s: float = 2.0
    """Of the memory; six tenths of 3.35."""
    publish_gb_per_s: float = 25.0
    """Into one server."""

    @property
    def bytes(self) -> float:
        """Of one."""
        return self.memory_gib * _GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFit:
    """Bytes on each GPU of a server."""

    weights: float
    cache: float
    """What is left for keys and values."""
    cache_tokens: float
    """Over all GPUs of the server; negative where the weights do not fit."""
    reserved: float
    """What the server keeps of the GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What a run takes, and why it does not fit."""

    shape: ModelShape
    num_gpus: int
    layout: Layout
    rank: RankMemory
    reference: float
    """Bytes of a frozen reference; 0: there is none."""
    critic: float
    """Bytes of a critic and its optimizer; 0: there is none, or it is a head on the policy."""
    rank_limit: float
    """Bytes that a rank may take."""
    checkpoint: float
    """Bytes on a GPU that servers share with the trainer, while it writes a checkpoint; 0: none
    is shared."""
    server: ServerFit | None
    """None: the run starts no servers."""
    running: int
    """Full turns that one server holds at once."""
    generate_s: float
    update_s: float
    publish_s: float
    step_s: float
    bound: str
    """What a step waits for."""
    refusals: tuple[str, ...]
    """Sentences, each with a number and what to do; empty: it fits."""

    @property
    def rank_total(self) -> float:
        """Bytes on the fullest rank."""
        return self.rank.total + self.reference + self.critic


def fit(settings: Settings, config: Mapping[str, Any], gpus: Gpus, *, source: str) -> Fit:
    """What the settings take with the model of a config.json.

    Args:
        source: of `config`, for errors.

    Raises:
        SettingsError: sizes are missing in `config`.
    """
    shape = ModelShape.of_config(config, source=source)
    layout = _layout(settings)
    rank = _rank(settings, shape, layout)
    server = _server(settings, shape, gpus) if settings.server.num_servers else None
    reference = rank.weights if settings.trainer.kl != "none" else 0.0
    trainer = settings.trainer
    has_own_critic = trainer.advantage == "gae" and trainer.critic.kind == "model"
    critic = rank.total - rank.loss if has_own_critic else 0.0
    limit = (1.0 - RESERVE) * gpus.bytes
    checkpoint = 0.0
    if server is not None and settings.trainer.is_colocated:
        limit -= KEPT_BYTES
        state = rank.weights + rank.gradients + rank.optimizer
        checkpoint = state + reference + critic + server.weights
    context = settings.model.max_context_tokens
    running = 1
    if server is not None:
        most = settings.server.max_running_requests
        running = max(1, min(most, int(server.cache_tokens // context)))
    plan = _plan(settings, config, gpus, shape, running=running, source=source)
    loop = plan.loop()
    name, per_hour = binding(loop)
    step_s = 3600.0 / per_hour
    if settings.trainer.is_colocated:
        together = loop.generate_s + loop.update_s + loop.publish_s
        step_s, name = max(step_s, together), "everything in turn, on the same GPUs"
    of_servers = settings.server.num_servers * settings.server.tensor_parallel_size
    ranks = settings.trainer.num_ranks
    num_gpus = max(of_servers, ranks) if settings.trainer.is_colocated else of_servers + ranks
    found = Fit(
        shape=shape,
        num_gpus=num_gpus,
        layout=layout,
        rank=rank,
        reference=reference,
        critic=critic,
        rank_limit=limit,
        checkpoint=checkpoint,
        server=server,
        running=running,
        generate_s=loop.generate_s,
        update_s=loop.update_s,
        publish_s=loop.publish_s,
        step_s=step_s,
        bound=name,
        refusals=(),
    )
    refusals = (
        _refused_server(settings, found, gpus),
        _refused_rank(settings, found, gpus),
        _refused_checkpoint(settings, found, gpus),
        _refused_share(settings, found, gpus),
    )
    return replace(found, refusals=tuple(sentence for sentence in refusals if sentence))


def _layout(settings: Settings) -> Layout:
    trainer = settings.trainer
    raw = trainer.megatron
    sizes = {
        name: int(raw.get(f"{key}_parallel_size", 1))
        for name, key in (
            ("tensor", "tensor_model"),
            ("pipeline", "pipeline_model"),
            ("context", "context"),
            ("expert", "expert_model"),
        )
    }
    expert_tensor = raw.get("expert_tensor_parallel_size")
    ranks = sizes["tensor"] * sizes["pipeline"] * sizes["context"]
    data = max(1, trainer.num_ranks // ranks)
    is_shared = raw.get("use_distributed_optimizer", data * sizes["context"] > 1)
    return Layout(
        **sizes,
        expert_tensor=None if expert_tensor is None else int(expert_tensor),
        data=data,
        distributed_optimizer=bool(is_shared),
        dtype=trainer.dtype,
        recomputes=raw.get("recompute_granularity") == "full",
    )


def _rank(settings: Settings, shape: ModelShape, layout: Layout) -> RankMemory:
    return rank_memory(shape, layout, microbatch_tokens=settings.trainer.max_microbatch_tokens)


def _server(settings: Settings, shape: ModelShape, gpus: Gpus) -> ServerFit:
    server = settings.server
    size = server.tensor_parallel_size
    width = 2 if server.dtype == "bfloat16" else 4
    table = {key.replace("-", "_"): value for key, value in server.sglang.items()}
    share = float(table.get("mem_fraction_static", SERVER_SHARE))
    weights, cache = server_memory(shape, gpus=size, gpu_bytes=gpus.bytes, share=share, width=width)
    a_token = shape.cache_bytes_per_token * width / 2
    reserved = share * gpus.bytes
    if server.kind == "torch":
        # It takes what its turns need, and no share.
        needed = server.max_running_requests * settings.model.max_context_tokens * a_token
        cache = min(cache, needed)
        reserved = weights + max(cache, 0.0)
    return ServerFit(
        weights=weights / size,
        cache=cache / size,
        cache_tokens=cache / a_token,
        reserved=reserved,
    )


def _plan(
    settings: Settings,
    config: Mapping[str, Any],
    gpus: Gpus,
    shape: ModelShape,
    *,
    running: int,
    source: str,
) -> Plan:
    """The plan of these settings, with speeds by the data sheet."""
    trainer, server = settings.trainer, settings.server
    layout = _layout(settings)
    context = settings.model.max_context_tokens
    answer = min(settings.sampling.max_new_tokens, context)
    sizes = {
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "context": layout.context,
        "expert": layout.expert,
        "expert_tensor": layout.ranks_per_expert,
        "recomputes": layout.recomputes,
        "dtype": layout.dtype,
    }
    tree: dict[str, Any] = {
        "loop": {
            "group_size": settings.buffer.group_size,
            "groups_per_step": trainer.groups_per_step,
            "max_staleness": settings.buffer.max_staleness,
            "max_concurrent_episodes": settings.env.max_concurrent_episodes
            * max(1, settings.env.num_runners),
        },
        "episodes": {"seconds": 0.0, "tokens": answer, "prompt_tokens": context - answer},
        "trainer": {
            "gpus": trainer.num_ranks,
            "gpu_tflops": gpus.tflops,
            "mfu": gpus.mfu,
            "num_forwards": int(trainer.proximal == "recompute") + int(trainer.kl != "none"),
            "microbatch_tokens": trainer.max_microbatch_tokens,
        },
        "network": {"publish_gb_per_s": gpus.publish_gb_per_s},
        "layout": sizes,
        "gpu": {"memory_gb": gpus.bytes / 1e9},
        "model": dict(config),
    }
    if server.num_servers:
        width = 2 if server.dtype == "bfloat16" else 4
        speed = server.tensor_parallel_size * gpus.tb_per_s * 1e12
        weights_s = width * shape.num_params / speed
        turn_s = 0.5 * context * shape.cache_bytes_per_token * width / 2 / speed
        operations = 2.0 * shape.num_active_params
        flops = server.tensor_parallel_size * gpus.tflops * 1e12 * gpus.mfu
        tree["servers"] = {
            "count": server.num_servers,
            "gpus": server.tensor_parallel_size,
            "tokens_per_s_alone": 1.0 / (weights_s + turn_s),
            "tokens_per_s": running / (weights_s + running * turn_s),
            "max_running": running,
            "prefill_tokens_per_s": flops / operations,
        }
    return plan_of(tree, source=source)


def _refused_server(settings: Settings, found: Fit, gpus: Gpus) -> str:
    server, context = found.server, settings.model.max_context_tokens
    if server is None or server.cache_tokens >= context:
        return ""
    size = settings.server.tensor_parallel_size
    remedies: list[str] = []
    larger = 2 * size
    while larger <= _MAX_TENSOR and not remedies:
        wider = _server(
            _changed(settings, "server", tensor_parallel_size=larger), found.shape, gpus
        )
        if wider.cache_tokens >= context:
            remedies.append(f"set server.tensor_parallel_size = {larger}")
        larger *= 2
    if settings.server.dtype == "float32":
        remedies.insert(0, 'set server.dtype = "bfloat16"')
    if server.cache_tokens > 0:
        remedies.append(f"lower model.max_context_tokens to {int(server.cache_tokens)}")
    elif not remedies:
        remedies.append("take GPUs with more memory")
    return (
        f"a server does not fit: with server.tensor_parallel_size={size} it holds "
        f"{gib(server.weights)} of weights on each GPU, and what is left of "
        f"{gib(server.reserved)} holds {max(0, int(server.cache_tokens))} tokens of "
        f"model.max_context_tokens={context}; {', or '.join(remedies)}"
    )


def _refused_rank(settings: Settings, found: Fit, gpus: Gpus) -> str:
    if found.rank_total <= found.rank_limit:
        return ""
    where = f"of {gpus.memory_gib:g} GiB"
    if settings.trainer.is_colocated and found.server is not None:
        where += f" beside {gib(KEPT_BYTES)} that the server keeps"
    remedies = _rank_remedies(settings, found)
    return (
        f"a trainer rank does not fit: it takes {gib(found.rank_total)}, and may take "
        f"{gib(max(0.0, found.rank_limit))} {where}; {', or '.join(remedies)}"
    )


def _refused_checkpoint(settings: Settings, found: Fit, gpus: Gpus) -> str:
    server = found.server
    if server is None or found.checkpoint <= found.rank_limit:
        return ""
    state = found.checkpoint - server.weights
    remedies: list[str] = []
    size = settings.server.tensor_parallel_size
    for wider in (2 * size, 4 * size, 8 * size):
        if wider <= _MAX_TENSOR and state + server.weights * size / wider <= found.rank_limit:
            remedies.append(f"set server.tensor_parallel_size = {wider}")
            break
    for factor in (2, 4, 8, 16):
        num_ranks = settings.trainer.num_ranks * factor
        other = _changed(settings, "trainer", num_ranks=num_ranks)
        rank = _rank(other, found.shape, replace(_layout(other), distributed_optimizer=True))
        less = rank.optimizer - found.rank.optimizer
        if found.checkpoint + less * (2 if found.critic else 1) <= found.rank_limit:
            remedies.append(f"set trainer.num_ranks = {num_ranks}")
            break
    return (
        f"a checkpoint does not fit on shared GPUs: {gib(state)} of a trainer rank beside "
        f"{gib(server.weights)} of the server's weights, which it keeps meanwhile, may take "
        f"{gib(max(0.0, found.rank_limit))} of {gpus.memory_gib:g} GiB; "
        f"{', or '.join(remedies or ['take more GPUs, or GPUs of their own for the servers'])}"
    )


def _refused_share(settings: Settings, found: Fit, gpus: Gpus) -> str:
    """Where a server takes what the trainer cannot leave."""
    server = found.server
    if server is None or not settings.trainer.is_colocated:
        return ""
    most = (gpus.bytes - KEPT_BYTES) / gpus.bytes
    if server.reserved <= most * gpus.bytes:
        return ""
    return (
        f"a server that takes {gib(server.reserved)} of {gpus.memory_gib:g} GiB leaves no "
        f"{gib(KEPT_BYTES)} for what the trainer keeps on a shared GPU; set server.sglang."
        f"mem_fraction_static = {int(most * 100) / 100:g}"
    )


def _rank_remedies(settings: Settings, found: Fit) -> list[str]:
    """Changes of one kind that are enough by the same formulas."""
    trainer, shape, layout = settings.trainer, found.shape, found.layout
    more = found.reference > 0, found.critic > 0

    def fits(other: Layout, tokens: int) -> bool:
        rank = rank_memory(shape, other, microbatch_tokens=tokens)
        total = rank.total + more[0] * rank.weights + more[1] * (rank.total - rank.loss)
        return total <= found.rank_limit

    remedies: list[str] = []
    tokens = trainer.max_microbatch_tokens
    narrow = replace(layout, dtype="bfloat16")
    if layout.dtype == "float32" and fits(narrow, tokens):
        remedies.append('set trainer.dtype = "bfloat16"')
    again = replace(layout, recomputes=True)
    if not layout.recomputes and fits(again, tokens):
        remedies.append(
            'set trainer.megatron.recompute_granularity = "full", trainer.megatron.'
            'recompute_method = "uniform" and trainer.megatron.recompute_num_layers = 1'
        )
    least = settings.model.max_context_tokens
    if tokens > least and fits(layout, least):
        remedies.append(f"lower trainer.max_microbatch_tokens to {least}")
    for factor in (2, 4, 8, 16):
        wide = replace(layout, data=layout.data * factor)
        if fits(replace(wide, distributed_optimizer=True), tokens):
            remedies.append(f"set trainer.num_ranks = {trainer.num_ranks * factor}")
            break
    tensor = 2 * layout.tensor
    while tensor <= _MAX_TENSOR:
        split = tensor * layout.pipeline * max(layout.context, layout.expert)
        ranks = max(trainer.num_ranks, split)
        data = ranks // (tensor * layout.pipeline * layout.context)
        if fits(replace(layout, tensor=tensor, data=data, distributed_optimizer=True), tokens):
            remedies.append(
                f"set trainer.megatron.tensor_model_parallel_size = {tensor}, "
                "trainer.megatron.sequence_parallel = true and "
                f"trainer.num_ranks = {ranks}"
            )
            break
        tensor *= 2
    return remedies or ["no single change is enough: take a smaller model or more GPUs"]


def _changed(settings: Settings, section: str, **values: Any) -> Settings:
    part = getattr(settings, section).model_copy(update=values)
    return settings.model_copy(update={section: part})


def gib(num_bytes: float) -> str:
    """For a person."""
    return f"{num_bytes / _GIB:.1f} GiB"
