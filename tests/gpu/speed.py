"""How fast the trainer trains on this device, beside a plain loop over transformers.

    python tests/gpu/speed.py qwen3-0.6b              # bfloat16, what `make gpu-check` runs
    python tests/gpu/speed.py qwen3-0.6b --dtype float32 --alone
    python tests/gpu/speed.py qwen3-8b --layers 10    # as many layers as the memory holds
    python tests/gpu/speed.py tiny                    # anywhere

Random weights of the named model's shape, random ids, seven eighths of them trained, GRPO's update.
tokens/s counts all tokens of an update. MFU is what the model needs for them (6 operations a weight
and token, without the embedding; 12 x layers x heads x head size x tokens x mean context / 2 for
attention; recomputation does not count) over the device's peak in bfloat16.

The plain loop is what one writes without a framework: transformers' model in bfloat16 with SDPA,
torch's fused AdamW on the bfloat16 weights (no float32 copies), cross entropy over all positions of
equal rows. It does less: no logprobs, ratios, entropies or float32 main weights.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0}
"""In bfloat16 without sparsity, as NVIDIA states them."""
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
}
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
GB = 1e9


def description(shape: dict[str, Any]) -> dict[str, Any]:
    """A config.json."""
    head_dim = 16 if shape["hidden_size"] == 64 else 128
    return shape | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": head_dim,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
        "hidden_act": "silu",
    }


def operations(hf: dict[str, Any], num_tokens: int, length: int) -> float:
    """Of an update's forward and backward."""
    width = hf["num_attention_heads"] * hf["head_dim"]
    kv_width = hf["num_key_value_heads"] * hf["head_dim"]
    layer = hf["hidden_size"] * (2 * width + 2 * kv_width + 3 * hf["intermediate_size"])
    head = hf["hidden_size"] * hf["vocab_size"]
    weights = hf["num_hidden_layers"] * layer + head
    attention = 12 * hf["num_hidden_layers"] * width * length / 2
    return num_tokens * (6.0 * weights + attention)


def batch_of(num: int, length: int, vocab_size: int) -> Any:
    """Rows of equal length."""
    from outloop.engine.train.data.samples import Sample
    from outloop.engine.train.data.train_batch import TrainBatch

    random = np.random.default_rng(0)
    mask = np.arange(length) >= length // 8
    samples = [
        Sample(
            episode_id=f"e{index}",
            group_id=f"g{index // 8}",
            branch=0,
            token_ids=random.integers(0, vocab_size, length).astype(np.int32),
            loss_mask=mask,
            behavior_logprobs=np.full(length, -np.log(vocab_size), np.float32),
            policy_versions=np.where(mask, 0, -1).astype(np.int32),
            temperature=np.ones(length, np.float32),
            turns=np.zeros(length, np.int32),
            advantages=np.full(length, float(index % 2) - 0.5, np.float32),
        )
        for index in range(num)
    ]
    return TrainBatch.of(samples)


def timed(label: str, step: Callable[[], None], num_operations: float, num_tokens: int) -> float:
    """Tokens per second, best of the steps after the first; prints a line."""
    is_gpu = torch.cuda.is_available()
    times = []
    if is_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(4):
        began_at = time.perf_counter()
        step()
        if is_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began_at)
    best = min(times[1:])
    peak = f"{torch.cuda.max_memory_allocated() / GB:.1f} GB" if is_gpu else ""
    tflops = num_operations / best / 1e12
    name = torch.cuda.get_device_name() if is_gpu else ""
    limit = next((peak for key, peak in PEAK_TFLOPS.items() if key in name), None)
    mfu = f", MFU {100 * tflops / limit:.1f} %" if limit else ""
    print(
        f"INFO {label}: {best:.3f} s a step (first {times[0]:.1f} s), {num_tokens / best:.0f} "
        f"tokens/s, {tflops:.1f} TFLOP/s{mfu} {peak}",
        flush=True,
    )
    return num_tokens / best


def ours(
    hf: dict[str, Any], folder: Path, options: argparse.Namespace, num_operations: float
) -> float:
    """This repository's update."""
    from outloop.buffer.settings.trainer import TrainerSettings
    from outloop.engine.train.megatron import model_and_optimizer
    from outloop.engine.train.megatron.device import device_of, set_precision
    from outloop.engine.train.megatron.layer_kind import layers_of
    from outloop.engine.train.step.policy_update import rl_update

    settings = TrainerSettings(
        dtype=options.dtype, learning_rate=1e-6, max_microbatch_tokens=options.microbatch_tokens
    )
    set_precision(device_of(settings))
    model_and_optimizer.join_process_group(seed=1)
    config = model_and_optimizer.read_config(
        folder,
        RECOMPUTE if options.recompute else {},
        has_tensors=False,
        layers=layers_of(settings),
        dtype=settings.dtype,
    )
    began_at = time.perf_counter()
    policy = model_and_optimizer.build_policy(config, settings, num_updates=10)
    print(
        f"INFO built in {time.perf_counter() - began_at:.0f} s, "
        f"{sum(p.numel() for p in policy.model.parameters()) / 1e9:.2f}e9 weights, "
        f"layers={config.layers}",
        flush=True,
    )
    batch = batch_of(options.rows, options.length, hf["vocab_size"])

    def step() -> None:
        rl_update(policy, batch, settings, policy_version=0, on_microbatch=lambda: None)

    num_tokens = options.rows * options.length
    label = f"outloop {options.shape} {options.dtype}"
    rate = timed(label, step, num_operations, num_tokens)
    if options.profile:
        profile(step, options.profile)
    model_and_optimizer.leave_process_group()
    return rate


def profile(step: Callable[[], None], path: Path) -> None:
    """Write which kernels a step spends its time in."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as found:
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    path.write_text(found.key_averages().table(sort_by=order, row_limit=40))


def plain(hf: dict[str, Any], options: argparse.Namespace, num_operations: float) -> float:
    """transformers, SDPA and AdamW."""
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = transformers.Qwen3Config(**{k: v for k, v in hf.items() if k != "architectures"})
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    if options.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    batch = batch_of(options.rows, options.length, hf["vocab_size"])
    rows_of_ids = batch.token_ids.reshape(options.rows, options.length).astype(np.int64)
    ids = torch.from_numpy(rows_of_ids).to(device)
    labels = ids.clone()
    labels[:, : options.length // 8] = -100
    rows = max(1, options.plain_tokens // options.length)

    def step() -> None:
        for start in range(0, len(ids), rows):
            part = slice(start, start + rows)
            loss = model(input_ids=ids[part], labels=labels[part], use_cache=False).loss
            (loss * (rows / len(ids))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    num_tokens = options.rows * options.length
    return timed(f"transformers {options.shape} bfloat16", step, num_operations, num_tokens)


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--layers", type=int, help="instead of the shape's")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--microbatch-tokens", type=int, default=8192)
    parser.add_argument("--plain-tokens", type=int, default=8192, help="of its microbatches")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--alone", action="store_true", help="without the plain loop")
    parser.add_argument("--profile", type=Path, help="where to write a step's kernels")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    shape = dict(SHAPES[options.shape])
    if options.shape == "tiny":
        options.length = min(options.length, 64)
    if options.layers:
        shape["num_hidden_layers"] = options.layers
    hf = description(shape)
    num_operations = operations(hf, options.rows * options.length, options.length)
    print(
        f"INFO {options.shape}: {shape['num_hidden_layers']} layers, {options.rows} rows of "
        f"{options.length} tokens, recompute={options.recompute}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(hf))
        rate = ours(hf, folder, options, num_operations)
    if not options.alone:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        other = plain(hf, options, num_operations)
        print(f"INFO outloop over transformers: {rate / other:.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
