"""How much memory a policy takes: on a rank of the trainer, and on a server.

Owns: counts of parameters and bytes by formula. Invariant: bytes of tensors that must exist; no
allocator, no workspace, no fragmentation. Leave a tenth of a device for those.

* Parameters of a decoder with gated feed-forward and grouped heads: per layer h q + 2 h k + q h for
  attention (q = heads d, k = kv_heads d), 3 h f for the feed-forward, two norms; one embedding, and
  one head where it is not tied. Of a mixture each expert, chosen or shared, has 3 h f of its own f,
  and its router h a choice; GLM-4.5's first layers are dense. A rank has 1 / expert_model_parallel
  of the chosen experts, and of each 1 / expert_tensor_parallel.
* Weights, gradients, optimizer (Megatron-LM's page on the distributed optimizer): bfloat16 weights
  2, float32 gradients 4, float32 main weights 4 and Adam's two moments 8 bytes a parameter: 18. The
  distributed optimizer divides the last 12 by the number of ranks that hold the same parameters:
  the data-parallel size, and for experts that size over the expert-parallel one. float32: 4, 4, 8.
* Activations of a layer for one token, bfloat16 (derived here as Korthikanti et al. 2022, "Reducing
  Activation Recomputation in Large Transformer Models", section 4, for RMS norms, gated
  feed-forward and attention that keeps no scores): what backward reads is the inputs of two norms
  and their outputs, 4 h; query, key, value and the attention's output, 2 q + 2 k; gate, up and
  their product, 3 f; two bytes each: 8 h + 4 q + 4 k + 6 f. With h = q = k and f = 8 h / 3 that is
  32 h, where the paper has 34 h with dropout's masks. Recomputation keeps a layer's input, 2 h, and
  one layer whole.
* Sequence parallelism divides all of it by the tensor-parallel size (the paper, equation 4),
  context parallelism by its size. A pipeline's first stage holds as many microbatches as there are
  stages (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training", section 2.2).
* The loss takes its logits in pieces: LOSS_BYTES, whatever the vocabulary (`make bench-trainer`).
* A server's cache holds keys and values: 2 k bytes-per-value a token and layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outloop.buffer.errors import SettingsError

LOSS_BYTES = 128 * 2**20
RESERVE = 0.1
"""Share of a device for what no formula counts: allocator, workspace, fragmentation."""
SERVER_SHARE = 0.85
"""Share of a device that a server takes for weights and cache, about SGLang's own choice."""
KEPT_BYTES = 2.0 * 2**30
"""What a server that released its memory, or a trainer that left the device, keeps there: CUDA's
context, NCCL's buffers, loaded kernels. Assumed, not measured."""
_CONFIG_KEYS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
_OTHER_KINDS = ("num_local_experts", "kv_lora_rank")
"""Of gpt-oss and Mixtral, and of DeepSeek: other experts, or other attention."""
_GLM = "glm4_moe"
"""GLM-4.5, its Air, GLM-4.6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the sizes of a policy follow from."""

    num_layers: int
    hidden: int
    ffn: int
    """Of a dense layer, or of one expert."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    is_tied: bool = False
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    num_experts: int = 0
    """0: dense."""
    num_active_experts: int = 0
    num_shared_experts: int = 0
    """Beside the chosen ones, in every layer with experts."""
    num_dense_layers: int = 0
    """The first ones, which have no experts though the others do."""
    dense_ffn: int = 0
    """Of these."""
    has_router_bias: bool = False

    @classmethod
    def of_config(cls, config: Mapping[str, Any], *, source: str) -> ModelShape:
        """From a Hugging Face config.json of a Llama, Qwen2, Qwen3, Qwen3-MoE or GLM-4.5 policy.
        Layers that predict further tokens (GLM-4.5's last) are neither trained nor counted.

        Raises:
            SettingsError: a size is missing, or its layers are of another kind.
        """
        missing = [key for key in (*_CONFIG_KEYS, "vocab_size") if key not in config]
        if missing:
            raise SettingsError(
                f"{source} has no {missing[0]}; give the config.json of a Llama, Qwen2 or Qwen3 "
                "policy, or its sizes in [model]"
            )
        kind = str(config.get("model_type", ""))
        is_glm = kind == _GLM
        others = _OTHER_KINDS if is_glm else (*_OTHER_KINDS, "n_routed_experts", "n_shared_experts")
        unknown = [key for key in others if config.get(key)]
        if unknown:
            raise SettingsError(
                f"{source} has {unknown[0]}={config[unknown[0]]!r}: parameters of model_type="
                f"{kind!r} are not counted; give the config.json of a Llama, Qwen2, Qwen3, "
                "Qwen3-MoE or GLM-4.5 policy"
            )
        heads = config["num_attention_heads"]
        num_experts = int(config.get("n_routed_experts" if is_glm else "num_experts") or 0)
        return cls(
            num_layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            ffn=config["moe_intermediate_size"] if num_experts else config["intermediate_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
            is_tied=bool(config.get("tie_word_embeddings", False)),
            has_qk_norm=bool(config.get("use_qk_norm")) if is_glm else kind.startswith("qwen3"),
            has_qkv_bias=bool(config.get("attention_bias")) if is_glm else kind == "qwen2",
            num_experts=num_experts,
            num_active_experts=int(config.get("num_experts_per_tok") or 0),
            num_shared_experts=int(config.get("n_shared_experts") or 0) if is_glm else 0,
            num_dense_layers=int(config.get("first_k_dense_replace") or 0) if is_glm else 0,
            dense_ffn=config["intermediate_size"],
            has_router_bias=is_glm,
        )

    @property
    def query(self) -> int:
        """Width of all queries."""
        return self.num_heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all keys."""
        return self.num_kv_heads * self.head_dim

    @property
    def attention_params(self) -> int:
        """Of one layer, its norms included."""
        weights = 2 * self.hidden * self.query + 2 * self.hidden * self.key
        norms = 2 * self.hidden + (2 * self.head_dim if self.has_qk_norm else 0)
        return weights + norms + (self.query + 2 * self.key if self.has_qkv_bias else 0)

    @property
    def expert_params(self) -> int:
        """Of one feed-forward."""
        return 3 * self.hidden * self.ffn

    @property
    def router_params(self) -> int:
        """Of one layer's choice of experts."""
        return (self.hidden + self.has_router_bias) * self.num_experts

    @property
    def embedding_params(self) -> int:
        """Of the embedding; the head has as many where it is not tied."""
        return self.vocab * self.hidden

    @property
    def dense_layer_params(self) -> int:
        """Of one of the first layers of a mixture."""
        return self.attention_params + 3 * self.hidden * self.dense_ffn

    def _params(self, num_experts: int) -> int:
        layer = self.attention_params + self.router_params
        layer += (num_experts + self.num_shared_experts) * self.expert_params
        ends = self.embedding_params * (1 if self.is_tied else 2) + self.hidden
        others = self.num_layers - self.num_dense_layers
        return others * layer + self.num_dense_layers * self.dense_layer_params + ends

    @property
    def num_params(self) -> int:
        """All of them."""
        return self._params(max(1, self.num_experts))

    @property
    def num_active_params(self) -> int:
        """Those that one token meets."""
        return self._params(self.num_active_experts or 1)

    @property
    def cache_bytes_per_token(self) -> int:
        """Keys and values of all layers, bfloat16."""
        return 2 * 2 * self.num_layers * self.key


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How trainer ranks share a model."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    """Ranks that share an expert; None: `tensor`."""
    data: int = 1
    distributed_optimizer: bool = True
    dtype: str = "bfloat16"
    recomputes: bool = False

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that hold one copy of the weights."""
        return self.tensor * self.pipeline * self.context

    @property
    def ranks_per_expert(self) -> int:
        """Ranks that share an expert."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes on the fullest rank."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    loss: float = LOSS_BYTES

    @property
    def total(self) -> float:
        """Their sum."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.loss


def layer_activation_bytes(shape: ModelShape, *, dtype: str, is_dense: bool = False) -> float:
    """What backward reads of one layer for one token; see the module's docstring.

    Args:
        is_dense: of one of a mixture's first layers.
    """
    ffn = shape.ffn * max(1, shape.num_active_experts + shape.num_shared_experts)
    if is_dense:
        ffn = shape.dense_ffn
    values = 4 * shape.hidden + 2 * shape.query + 2 * shape.key + 3 * ffn
    return (2 if dtype == "bfloat16" else 4) * values


def rank_memory(shape: ModelShape, layout: Layout, *, microbatch_tokens: int) -> RankMemory:
    """Bytes on the fullest rank of the trainer, for microbatches of `microbatch_tokens`.

    Of pipeline stages that is the first, or one that has none of a mixture's first layers.
    """
    layers = -(-shape.num_layers // layout.pipeline)
    first = min(shape.num_dense_layers, layers)
    stages = {first, 0} if layout.pipeline > 1 else {first}
    found = [_stage(shape, layout, layers, dense, microbatch_tokens) for dense in stages]
    return max(found, key=lambda memory: memory.total)


def _stage(
    shape: ModelShape, layout: Layout, num_layers: int, num_dense: int, microbatch_tokens: int
) -> RankMemory:
    """Of a stage with the embedding or the head, of whose layers `num_dense` have no experts
    though the others do."""
    mixed = num_layers - num_dense
    layer = shape.attention_params + shape.router_params
    layer += (shape.num_shared_experts if shape.num_experts else 1) * shape.expert_params
    ends = shape.embedding_params
    if layout.pipeline == 1 and not shape.is_tied:
        ends *= 2
    dense = (mixed * layer + num_dense * shape.dense_layer_params + ends) / layout.tensor
    experts = mixed * shape.num_experts / layout.expert * shape.expert_params
    experts /= layout.ranks_per_expert
    params = dense + experts
    shards = layout.data * layout.context if layout.distributed_optimizer else 1
    expert_shards = shards * layout.tensor / (layout.expert * layout.ranks_per_expert)
    width = 2 if layout.dtype == "bfloat16" else 4
    state = 12 if layout.dtype == "bfloat16" else 8
    of_mixed = layer_activation_bytes(shape, dtype=layout.dtype)
    of_dense = layer_activation_bytes(shape, dtype=layout.dtype, is_dense=True)
    a_token = (mixed * of_mixed + num_dense * of_dense) * layout.pipeline
    if layout.recomputes:
        whole = max(of_mixed if mixed else 0, of_dense if num_dense else 0)
        a_token = num_layers * width * shape.hidden * layout.pipeline + whole
    return RankMemory(
        weights=width * params,
        gradients=4 * params,
        optimizer=state * (dense / shards + experts / max(1.0, expert_shards)),
        activations=a_token * microbatch_tokens / (layout.tensor * layout.context),
    )


def server_memory(
    shape: ModelShape, *, gpus: int, gpu_bytes: float, share: float = SERVER_SHARE, width: int = 2
) -> tuple[float, float]:
    """Bytes of weights on a server of `gpus`, and what is left for keys and values; it may be less
    than nothing.

    Args:
        width: bytes of a weight.
    """
    weights = float(width * shape.num_params)
    return weights, gpus * gpu_bytes * share - weights


def cached_tokens(
    shape: ModelShape, *, gpus: int, gpu_bytes: float, share: float = SERVER_SHARE
) -> float:
    """Tokens whose keys and values fit beside bfloat16 weights on a server of `gpus`.

    Raises:
        SettingsError: not even the weights fit.
    """
    weights, left = server_memory(shape, gpus=gpus, gpu_bytes=gpu_bytes, share=share)
    if left <= 0:
        raise SettingsError(
            f"servers.gpus={gpus} with gpu.memory_gb={gpu_bytes / 1e9:g} cannot hold "
            f"{weights / 1e9:.3g} GB of weights; at least "
            f"{int(weights // (gpu_bytes * share)) + 1} are needed"
        )
    return left / shape.cache_bytes_per_token
