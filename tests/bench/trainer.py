"""`make bench-trainer`: a full trainer step against a plain Hugging Face + PyTorch loop.

Each contender is a process of its own with one thread. In each round every one of them makes one
step on the same samples, split into the same microbatches; figures are medians over the rounds of
ratios within a round. The Hugging Face loop runs on packed rows (position_ids that start anew) and,
at 10M, on padded rows too; the faster one is the reference (padded rows at 135M would need 6 GiB).
Losses and gradient norms of all must agree, or nothing is written. Prints a table and writes
runs/bench/trainer.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from figures import OUT, tell

from outloop.buffer.records import (
    Episode,
    Group,
    Reward,
    Sampling,
    Trajectory,
    Turn,
    VersionSpan,
)

ROOT = Path(__file__).resolve().parents[2]
NUM_ROUNDS = 5
GROUP_SIZE = 8
CONTENDERS = {
    "10m": ("outloop", "hf_packed", "hf_padded"),
    "135m": ("outloop", "hf_packed"),
}


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
    # The shape of SmolLM2-135M. Two or more microbatches a step, as in training: in a step of one
    # the Hugging Face loop has no gradients while its activations peak, and needs less memory.
    "135m": Size(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        num_groups=1,
        mean_tokens=64,
        max_microbatch_tokens=320,
    ),
}
LOSS_VOCABS = (32_768, 131_072, 524_288)
"""One to sixteen times what a chunk of the loss's tokens needs."""


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
        from outloop.engine.train import mcore, weights

        self._settings = Settings(
            model={"path": folder, "max_context_tokens": size.max_microbatch_tokens},
            trainer={"learning_rate": 1e-4, "max_microbatch_tokens": size.max_microbatch_tokens},
        )
        mcore.join_process_group(seed=0)
        config = mcore.read_config(folder, {})
        self._policy = mcore.build_policy(config, self._settings.trainer, num_updates=100)
        weights.load_huggingface(self._policy.model, folder)

    def step(self, groups: list[Group]) -> dict[str, float]:
        """One update; what is built before the first forward is timed beside it."""
        import torch

        from outloop.engine.train.batch import build_batch
        from outloop.engine.train.microbatch import build_microbatch
        from outloop.engine.train.pack import pack
        from outloop.engine.train.update import rl_update

        trainer = self._settings.trainer
        before = time.process_time()
        batch = build_batch(
            groups, self._settings, policy_version=0, vocab_size=self._policy.config.vocab_size
        )
        (samples,) = batch.updates(1)
        built = time.process_time()
        report = rl_update(
            self._policy, samples, trainer, policy_version=0, on_microbatch=lambda: None
        )
        done = time.process_time()
        # A second time and alone: inside the update it cannot be told from the first forward.
        lengths = [sample.num_tokens for sample in samples]
        for members in pack(lengths, max_tokens=trainer.max_microbatch_tokens):
            build_microbatch([samples[index] for index in members], torch.device("cpu"))
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
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, weight_decay=0.0)
        self._is_packed = is_packed
        self._limit = size.max_microbatch_tokens

    def step(self, groups: list[Group]) -> dict[str, float]:
        """One update on the samples that outloop makes of the groups; making them is not timed."""
        import torch

        from outloop.buffer.settings import Settings
        from outloop.engine.train.batch import build_batch
        from outloop.engine.train.pack import pack

        settings = Settings(
            model={"path": Path("."), "max_context_tokens": self._limit},
            trainer={"max_microbatch_tokens": self._limit},
        )
        batch = build_batch(groups, settings, policy_version=0, vocab_size=10**9)
        (samples,) = batch.updates(1)
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
        drawn = logprobs.gather(-1, ids[:, 1:, None])[..., 0][mask[:, 1:]]
        ratio = torch.exp(drawn - behavior[:, 1:][mask[:, 1:]])
        weight = advantages[:, 1:][mask[:, 1:]].float()
        return -torch.minimum(ratio * weight, ratio.clamp(0.8, 1.28) * weight).sum()


def peak_bytes() -> int:
    """Highest resident memory of this process so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM; this benchmark needs Linux")


def work(kind: str, size_name: str) -> None:
    """A contender: one step for every line on stdin, one JSON line each on stdout."""
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    size = SIZES[size_name]
    folder = model_folder(size_name, size)
    contender: Outloop | HuggingFace
    if kind == "outloop":
        contender = Outloop(folder, size)
    else:
        contender = HuggingFace(folder, size, is_packed=kind == "hf_packed")
    for line in sys.stdin:
        groups = groups_of(size, seed=int(line))
        answer = contender.step(groups) | {"peak_bytes": peak_bytes()}
        print(json.dumps(answer), flush=True)


class Worker:
    """A contender's process."""

    def __init__(self, kind: str, size_name: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--work", kind, size_name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        )

    def step(self, seed: int) -> dict[str, float]:
        """One step on the samples of `seed`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a contender ended with code {self._process.wait()}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def compare(name: str) -> dict[str, float]:
    """Speed and memory of one size, after a step that warms up and must agree."""
    size = SIZES[name]
    model_folder(name, size)
    workers = {kind: Worker(kind, name) for kind in CONTENDERS[name]}
    try:
        first = {kind: worker.step(0) for kind, worker in workers.items()}
        for kind, answer in first.items():
            for field in ("loss", "grad_norm"):
                if not np.isclose(answer[field], first["outloop"][field], rtol=1e-3, atol=1e-6):
                    raise RuntimeError(f"{name}: {field} of {kind} differs: {first}")
        rounds = [
            {kind: worker.step(seed) for kind, worker in workers.items()}
            for seed in range(1, NUM_ROUNDS + 1)
        ]
    finally:
        for worker in workers.values():
            worker.close()
    speeds = [
        {kind: answer["num_tokens"] / answer["cpu_s"] for kind, answer in answers.items()}
        for answers in rounds
    ]
    reference = max(CONTENDERS[name][1:], key=lambda kind: _median(speeds, kind))
    return {
        f"tokens_vs_hf_{name}": statistics.median(
            row["outloop"] / row[reference] for row in speeds
        ),
        f"peak_memory_vs_hf_{name}": rounds[-1]["outloop"]["peak_bytes"]
        / rounds[-1][reference]["peak_bytes"],
        f"batch_build_share_{name}": statistics.median(
            row["outloop"]["build_s"] / row["outloop"]["cpu_s"] for row in rounds
        ),
        **{f"tokens_per_cpu_s_{kind}_{name}": _median(speeds, kind) for kind in CONTENDERS[name]},
        **{
            f"peak_mib_{kind}_{name}": rounds[-1][kind]["peak_bytes"] / 2**20
            for kind in CONTENDERS[name]
        },
    }


def _median(rows: list[dict[str, float]], kind: str) -> float:
    return statistics.median(row[kind] for row in rows)


def real_token_share() -> float:
    """Share of the tokens that layers and attention compute which are no padding."""
    import torch

    warnings.simplefilter("ignore")
    from outloop.engine.train.layers import pack_row
    from outloop.engine.train.pack import pack

    lengths = lengths_of(512, 400, most=8192, seed=1)
    computed = 0
    for members in pack(lengths, max_tokens=8192):
        row = pack_row([lengths[index] for index in members], torch.device("cpu"))
        computed += sum(index.numel() for index in row.classes)
    return sum(lengths) / computed


def measure_loss_memory(vocab_size: int) -> None:
    """Print by how many bytes an update of a model without layers to speak of goes up."""
    warnings.simplefilter("ignore")
    import gc

    import torch

    torch.set_num_threads(1)
    size = Size(
        vocab_size=vocab_size,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        num_groups=1,
        mean_tokens=300,
        max_microbatch_tokens=2048,
    )
    contender = Outloop(model_folder("loss", size), size)
    groups = groups_of(size, seed=1)
    contender.step(groups)
    gc.collect()
    before = resident_bytes()
    Path("/proc/self/clear_refs").write_text("5")
    contender.step(groups)
    print(json.dumps({"peak_bytes": peak_bytes() - before}))


def resident_bytes() -> int:
    """Resident memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def loss_memory() -> dict[str, float]:
    """What the loss needs at several vocabulary sizes, each in a process of its own."""
    needs = {}
    for vocab_size in LOSS_VOCABS:
        answer = subprocess.run(
            [sys.executable, __file__, "--loss-memory", str(vocab_size)],
            check=True,
            capture_output=True,
            text=True,
        )
        needs[vocab_size] = json.loads(answer.stdout.splitlines()[-1])["peak_bytes"]
    figures = {f"loss_peak_mib_v{vocab}": need / 2**20 for vocab, need in needs.items()}
    figures["loss_memory_growth"] = needs[LOSS_VOCABS[-1]] / needs[LOSS_VOCABS[0]]
    return figures


def main(sizes: list[str]) -> None:
    """Measure, print, write."""
    figures: dict[str, float] = {"real_token_share": real_token_share()} | loss_memory()
    for name in sizes:
        figures |= compare(name)
    for name in ("peak_memory_vs_hf", "batch_build_share"):
        figures[name] = max(figures[f"{name}_{size}"] for size in sizes)
    tell("trainer", figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", nargs=2, metavar=("KIND", "SIZE"))
    parser.add_argument("--loss-memory", type=int, metavar="VOCAB_SIZE")
    parser.add_argument("--size", action="append", choices=list(SIZES))
    arguments = parser.parse_args()
    if arguments.work:
        work(*arguments.work)
    elif arguments.loss_memory:
        measure_loss_memory(arguments.loss_memory)
    else:
        main(arguments.size or list(SIZES))
