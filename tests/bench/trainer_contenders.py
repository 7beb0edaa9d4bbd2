"""What `make bench-trainer` compares: one step of ours and of a plain Hugging Face loop.

Owns: the model shapes, the samples of a step, the contenders. Does not own: processes, rounds,
figures (trainer). Invariant: contenders of one size make the same update from the same samples,
split into the same microbatches.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
from figures import OUT

from outloop.buffer.records import (
    Episode,
    Group,
    Reward,
    Sampling,
    Trajectory,
    Turn,
    VersionSpan,
)

GROUP_SIZE = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """A model shape and how much one step trains."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_groups: int
    mean_tokens: int
    """Of a sample; lengths are log-normal around it."""
    max_microbatch_tokens: int


SIZES = {
    "10m": Size(
        vocab_size=16384,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_groups=4,
        mean_tokens=160,
        max_microbatch_tokens=2048,
    ),
    # The shape of SmolLM2-135M. Several microbatches a step, as in training: in a step of one the
    # Hugging Face loop has no gradients while its activations peak.
    "135m": Size(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        num_groups=1,
        mean_tokens=96,
        max_microbatch_tokens=320,
    ),
}


def model_folder(name: str, size: Size) -> Path:
    """A random Llama of this shape, written once."""
    import torch
    import transformers

    folder = OUT / "models" / f"{name}-{size.vocab_size}"
    if (folder / "model.safetensors").is_file():
        return folder
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_hidden_layers,
        num_attention_heads=size.num_attention_heads,
        num_key_value_heads=size.num_key_value_heads,
        head_dim=size.head_dim,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def lengths_of(count: int, mean: float, *, most: int, seed: int) -> list[int]:
    """Heavy-tailed lengths: log-normal with sigma 1, one in a hundred ten times the median."""
    random = np.random.default_rng(seed)
    draws = random.lognormal(np.log(mean) - 0.5, 1.0, count)
    return [int(length) for length in np.clip(draws, 8, most)]


def groups_of(size: Size, *, seed: int) -> list[Group]:
    """Groups of two-turn episodes whose answers are about 60% of their tokens."""
    random = np.random.default_rng(seed)
    count = size.num_groups * GROUP_SIZE
    lengths = lengths_of(count, size.mean_tokens, most=size.max_microbatch_tokens, seed=seed)
    groups = []
    for slot in range(size.num_groups):
        trajectories = [
            trajectory_of(f"{slot}-{index}", lengths[slot * GROUP_SIZE + index], size, random)
            for index in range(GROUP_SIZE)
        ]
        groups.append(
            Group(
                group_id=f"g{slot}",
                slot=slot,
                task_id="t",
                group_size=GROUP_SIZE,
                trajectories=tuple(trajectories),
            )
        )
    return groups


def trajectory_of(
    episode_id: str, num_tokens: int, size: Size, random: np.random.Generator
) -> Trajectory:
    """An episode of two turns over `num_tokens` tokens."""
    turns: list[Turn] = []
    for index, length in enumerate((num_tokens // 2, num_tokens - num_tokens // 2)):
        num_prompt = max(1, int(0.4 * length))
        output = random.integers(0, size.vocab_size, length - num_prompt).astype(np.int32)
        logprobs = random.normal(-np.log(size.vocab_size), 0.1, len(output)).astype(np.float32)
        turns.append(
            Turn(
                turn_id=f"{episode_id}-{index}",
                episode_id=episode_id,
                parent_turn_id=turns[-1].turn_id if turns else None,
                prompt_ids=random.integers(0, size.vocab_size, num_prompt).astype(np.int32),
                output_ids=output,
                behavior_logprobs=logprobs,
                version_spans=(VersionSpan(policy_version=0, start=0, end=len(output)),),
                loss_spans=((0, len(output)),),
                sampling=Sampling(temperature=1.0),
                finish_reason="stop",
                started_at=0.0,
                finished_at=0.0,
            )
        )
    episode = Episode(
        episode_id=episode_id,
        task_id="t",
        group_id=f"g{episode_id.split('-')[0]}",
        attempt=0,
        purpose="train",
        outcome="completed",
        failure_kind=None,
        reward=Reward(value=float(random.normal())),
        metadata={},
        opened_at=0.0,
        closed_at=0.0,
    )
    return Trajectory(episode=episode, turns=tuple(turns))


class Outloop:
    """This repository's trainer, from groups to the optimizer's step."""

    def __init__(self, folder: Path, size: Size) -> None:
        from outloop.buffer.settings import Settings
        from outloop.engine.train.megatron import import_weights, model_and_optimizer

        self._settings = Settings(
            model={"path": folder, "max_context_tokens": size.max_microbatch_tokens},
            trainer={
                "learning_rate": 1e-4,
                "max_microbatch_tokens": size.max_microbatch_tokens,
                # The plain loop has no second bound either.
                "dual_clip": 0,
            },
        )
        model_and_optimizer.join_process_group(seed=0)
        config = model_and_optimizer.read_config(folder, {})
        self._policy = model_and_optimizer.build_policy(
            config, self._settings.trainer, num_updates=100
        )
        import_weights.load_huggingface(self._policy.model, folder)

    def step(self, groups: list[Group]) -> dict[str, float]:
        """One update; what is built before the first forward is timed beside it."""
        import torch

        from outloop.engine.train.data.batch_builder import build_batch
        from outloop.engine.train.data.microbatch import build_microbatch
        from outloop.engine.train.data.packing import pack
        from outloop.engine.train.step.policy_update import rl_update

        trainer = self._settings.trainer
        before = time.process_time()
        batch = build_batch(
            groups, self._settings, policy_version=0, vocab_size=self._policy.config.vocab_size
        )
        (rows,) = batch.updates(1)
        built = time.process_time()
        report = rl_update(
            self._policy,
            batch.rows,
            trainer,
            rows=rows,
            policy_version=0,
            on_microbatch=lambda: None,
        )
        done = time.process_time()
        # A second time and alone: inside the update it cannot be told from the first forward.
        lengths = [batch.rows.lengths[row] for row in rows]
        for members in pack(lengths, max_tokens=trainer.max_microbatch_tokens):
            build_microbatch(batch.rows, [rows[index] for index in members], torch.device("cpu"))
        rows_s = time.process_time() - done
        return {
            "cpu_s": done - before,
            "build_s": built - before + rows_s,
            "num_tokens": report.num_tokens,
            "loss": report.loss,
            "grad_norm": report.grad_norm,
        }


class HuggingFace:
    """What one writes without a framework: transformers, AdamW, PPO-clip over the same samples."""

    def __init__(self, folder: Path, size: Size, *, is_packed: bool) -> None:
        import torch
        import transformers

        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="sdpa"
        )
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=1e-4, weight_decay=0.0, fused=True
        )
        self._is_packed = is_packed
        self._limit = size.max_microbatch_tokens

    def step(self, groups: list[Group]) -> dict[str, float]:
        """One update on the samples that outloop makes of the groups; making them is not timed."""
        import torch

        from outloop.buffer.settings import Settings
        from outloop.engine.train.data.batch_builder import build_batch
        from outloop.engine.train.data.packing import pack

        settings = Settings(
            model={"path": Path("."), "max_context_tokens": self._limit},
            trainer={"max_microbatch_tokens": self._limit},
        )
        batch = build_batch(groups, settings, policy_version=0, vocab_size=10**9)
        (rows,) = batch.updates(1)
        samples = [batch.rows.row(row) for row in rows]
        total = sum(sample.num_trained_tokens for sample in samples)
        before = time.process_time()
        self._optimizer.zero_grad(set_to_none=True)
        loss_sum = 0.0
        for members in pack([sample.num_tokens for sample in samples], max_tokens=self._limit):
            loss = self._loss([samples[index] for index in members]) / total
            loss.backward()
            loss_sum += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        return {
            "cpu_s": time.process_time() - before,
            "num_tokens": sum(sample.num_tokens for sample in samples),
            "loss": loss_sum,
            "grad_norm": float(norm),
        }

    def _loss(self, samples: list[Any]) -> Any:
        import torch
        from torch.nn.utils.rnn import pad_sequence

        def tensor(values: Any) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(values))

        rows = [
            [tensor(values) for values in (s.token_ids.astype(np.int64), s.loss_mask)]
            + [tensor(s.behavior_logprobs), torch.full((s.num_tokens,), s.advantage)]
            for s in samples
        ]
        fields = list(zip(*rows, strict=True))
        if self._is_packed:
            ids, mask, behavior, advantages = (torch.cat(field)[None] for field in fields)
            positions = torch.cat([torch.arange(s.num_tokens) for s in samples])[None]
            output = self._model(input_ids=ids, position_ids=positions, use_cache=False)
        else:
            ids, mask, behavior, advantages = (
                pad_sequence(list(field), batch_first=True) for field in fields
            )
            lengths = torch.tensor([s.num_tokens for s in samples])
            is_real = torch.arange(ids.shape[1])[None] < lengths[:, None]
            output = self._model(input_ids=ids, attention_mask=is_real.long(), use_cache=False)
        logprobs = torch.log_softmax(output.logits[:, :-1].float(), -1)
        sampled = logprobs.gather(-1, ids[:, 1:, None])[..., 0][mask[:, 1:]]
        ratio = torch.exp(sampled - behavior[:, 1:][mask[:, 1:]])
        weight = advantages[:, 1:][mask[:, 1:]].float()
        return -torch.minimum(ratio * weight, ratio.clamp(0.8, 1.28) * weight).sum()
