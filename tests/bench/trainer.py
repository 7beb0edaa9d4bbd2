"""`make bench-trainer`: a full trainer step against a plain Hugging Face + PyTorch loop.

Each contender is a process of its own with one thread. In each round every one of them makes one
step on the same samples, split into the same microbatches; figures are medians over the rounds of
ratios within a round. The Hugging Face loop runs on packed rows (position_ids that restart) and,
at 10M, on padded rows too; the faster one is the reference (padded rows at 135M would need 6 GiB).
Losses and gradient norms of all must agree, or nothing is written. Prints a table and writes
runs/bench/trainer.json; with `--size` one size alone, beside what is there of the other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
from figures import known, say, tell
from trainer_contenders import (
    SIZES,
    HuggingFace,
    Outloop,
    Size,
    groups_of,
    lengths_of,
    model_folder,
)

ROOT = Path(__file__).resolve().parents[2]
NUM_ROUNDS = 5
CONTENDERS = {
    "10m": ("outloop", "hf_packed", "hf_padded"),
    "135m": ("outloop", "hf_packed"),
}


LOSS_VOCABS = (32_768, 131_072, 524_288)
"""One to sixteen times what a chunk of the loss's tokens needs."""


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
    answers = sys.stdout
    with redirect_stdout(sys.stderr):  # Logs go there, so that answers are all that is read.
        folder = model_folder(size_name, size)
        contender: Outloop | HuggingFace
        if kind == "outloop":
            contender = Outloop(folder, size)
        else:
            contender = HuggingFace(folder, size, is_packed=kind == "hf_packed")
        for line in sys.stdin:
            groups = groups_of(size, seed=int(line))
            answer = contender.step(groups) | {"peak_bytes": peak_bytes()}
            print(json.dumps(answer), file=answers, flush=True)


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
    say(f"{name}: a first step of {', '.join(CONTENDERS[name])}, which must agree")
    model_folder(name, size)
    workers = {kind: Worker(kind, name) for kind in CONTENDERS[name]}
    try:
        first = {kind: worker.step(0) for kind, worker in workers.items()}
        for kind, answer in first.items():
            for field in ("loss", "grad_norm"):
                if not np.isclose(answer[field], first["outloop"][field], rtol=1e-3, atol=1e-6):
                    raise RuntimeError(f"{name}: {field} of {kind} differs: {first}")
        rounds = []
        for seed in range(1, NUM_ROUNDS + 1):
            rounds.append({kind: worker.step(seed) for kind, worker in workers.items()})
            speeds = ", ".join(f"{kind} {speed:.0f}" for kind, speed in _speeds(rounds[-1]).items())
            say(f"{name}, round {seed} of {NUM_ROUNDS}, tokens per CPU-second: {speeds}")
    finally:
        for worker in workers.values():
            worker.close()
    by_round = [_speeds(answers) for answers in rounds]
    reference = max(CONTENDERS[name][1:], key=lambda kind: _median(by_round, kind))
    ratios = [row["outloop"] / row[reference] for row in by_round]
    return {
        f"tokens_vs_hf_{name}": statistics.median(ratios),
        f"tokens_vs_hf_{name}_least": min(ratios),
        f"tokens_vs_hf_{name}_most": max(ratios),
        f"peak_memory_vs_hf_{name}": rounds[-1]["outloop"]["peak_bytes"]
        / rounds[-1][reference]["peak_bytes"],
        f"batch_build_share_{name}": statistics.median(
            row["outloop"]["build_s"] / row["outloop"]["cpu_s"] for row in rounds
        ),
        **{f"tokens_per_cpu_s_{kind}_{name}": _median(by_round, kind) for kind in CONTENDERS[name]},
        **{
            f"peak_mib_{kind}_{name}": rounds[-1][kind]["peak_bytes"] / 2**20
            for kind in CONTENDERS[name]
        },
    }


def _speeds(answers: dict[str, dict[str, float]]) -> dict[str, float]:
    return {kind: answer["num_tokens"] / answer["cpu_s"] for kind, answer in answers.items()}


def _median(rows: list[dict[str, float]], kind: str) -> float:
    return statistics.median(row[kind] for row in rows)


def real_token_share() -> float:
    """Share of the tokens that layers and attention compute which are no padding."""
    import torch

    warnings.simplefilter("ignore")
    from outloop.engine.train.data.packing import pack
    from outloop.engine.train.megatron.layers import pack_row

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
        hidden_size=2,
        intermediate_size=2,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=2,
        num_groups=1,
        mean_tokens=300,
        max_microbatch_tokens=2048,
    )
    contender = Outloop(model_folder(f"loss_h{size.hidden_size}", size), size)
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
        say(f"memory of the loss at a vocabulary of {vocab_size}")
        answer = subprocess.run(
            [sys.executable, __file__, "--loss-memory", str(vocab_size)],
            check=True,
            capture_output=True,
            text=True,
            # Else freed blocks of 2 MB leave holes in glibc's heap, others in every run.
            env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"},
        )
        needs[vocab_size] = json.loads(answer.stdout.splitlines()[-1])["peak_bytes"]
    figures = {f"loss_peak_mib_v{vocab}": need / 2**20 for vocab, need in needs.items()}
    figures["loss_memory_growth"] = needs[LOSS_VOCABS[-1]] / needs[LOSS_VOCABS[0]]
    return figures


def main(sizes: list[str]) -> None:
    """Measure, print, write; the figures of a size that is left out stay as they were."""
    figures = known("trainer") | {"real_token_share": real_token_share()}
    if sizes != ["135m"]:
        figures |= loss_memory()
    for size in sizes:
        figures |= compare(size)
    for name in ("peak_memory_vs_hf", "batch_build_share"):
        figures[name] = max(value for key, value in figures.items() if key.startswith(f"{name}_"))
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
