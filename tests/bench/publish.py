"""`make bench-publish`: what moving weights costs beside plain copies of the same bytes.

Starts torch servers of random Qwen3 models and publishes to them from this process, by turns with
the copies. Prints a table and writes runs/bench/publish.json. With `--device cuda` everything lies
on the GPU, buckets go by CUDA-IPC and the copies are device to device.

bucketed_vs_copy: rate of a whole publish (from pause to continue, checksums included) of a 1 GB
model, over that of two plain copies: every tensor into the bucket, then out of it; the best of the
bucket sizes (`bucketed_vs_copy_N_mb`). transfer_vs_copy: the same without verification.
bucketed_vs_per_tensor: a model of 1400 small tensors in buckets, over one message per tensor.
peak_extra_buckets: what staging held; peak_rss_buckets: staging and what this process grew by.
pause_*: how much longer than its usual gap between tokens a turn waited because of a publish.
linear_in_bytes: time per byte of 1 GB over that of a quarter of it. many_tensors_vs_few: time per
byte of 1400 tensors over that of 35, a quarter GB each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import torch
from figures import say, tell
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from torch import Tensor

from outloop.buffer.records import ServerEntry
from outloop.buffer.run import create_run
from outloop.buffer.settings import build_settings
from outloop.engine.publish.buckets.plan import TensorSpec, plan_buckets
from outloop.engine.publish.buckets.staging import DeviceBuffer, SharedBuffer
from outloop.engine.publish.publisher import Publisher, PublishReport

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fakes.local_tensors import LocalTensors
from fakes.torch_server_process import ServerProcess

BUCKETS_MB = (8, 32, 64, 128, 256)
NUM_REPEATS = 9
PAUSE_BUCKET_MB = 64.0
NUM_TURNS = 32
NUM_PAUSES = 8
PER_TENSOR_MB = 1e-6
VOCAB_SIZE = 16384
Shape = tuple[int, int, int]
"""hidden size, intermediate size, layers"""
LARGE: Shape = (1024, 4096, 16)
QUARTER: Shape = (1024, 4096, 3)
MANY: Shape = (192, 768, 128)
SMALL: Shape = (32, 64, 128)


def tensors_of(config: Mapping[str, Any], device: str) -> dict[str, Tensor]:
    """Random weights of a Qwen3 model under their Hugging Face names."""
    generator = torch.Generator().manual_seed(0)
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB_SIZE, hidden)}
    for index in range(config["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{index}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (hidden,),
                "self_attn.q_proj": (queries, hidden),
                "self_attn.k_proj": (keys, hidden),
                "self_attn.v_proj": (keys, hidden),
                "self_attn.o_proj": (hidden, queries),
                "self_attn.q_norm": (head,),
                "self_attn.k_norm": (head,),
                "post_attention_layernorm": (hidden,),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
            }.items()
        }
    shapes["model.norm.weight"] = (hidden,)
    return {
        name: (torch.randn(shape, generator=generator) * 0.02).to(device)
        for name, shape in shapes.items()
    }


def write_model(folder: Path, shape: Shape, device: str) -> dict[str, Tensor]:
    """A model folder that a server can load; returns its weights."""
    hidden, inner, num_layers = shape
    head = min(64, hidden // 4)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden // head,
        "num_key_value_heads": hidden // head // 2,
        "head_dim": head,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "eos_token_id": 1,
        "bos_token_id": 0,
        "torch_dtype": "float32",
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    Tokenizer(BPE({"a": 0}, [])).save(str(folder / "tokenizer.json"))
    tensors = tensors_of(config, device)
    save_file({name: t.cpu() for name, t in tensors.items()}, folder / "model.safetensors")
    return tensors


class Registry:
    """One server."""

    def __init__(self, url: str) -> None:
        self._entry = ServerEntry(
            server_id="server-0", url=url, kind="torch", policy_version=None, is_quarantined=False
        )

    def servers(self) -> tuple[ServerEntry, ...]:
        """It."""
        return (self._entry,)

    def set_server_version(
        self, server_id: str, policy_version: int | None, *, quarantined: bool
    ) -> None:
        """A publish that fails is no measurement."""
        assert not quarantined


class Bench:
    """One model, its server process, and publishers to it."""

    def __init__(self, folder: Path, shape: Shape, device: str) -> None:
        self.device = device
        self.folder = folder
        self.tensors = write_model(folder, shape, device)
        self.num_bytes = sum(t.nbytes for t in self.tensors.values())
        self.server = ServerProcess(folder, max_context_tokens=4096, device=device)
        self._version = 0

    def close(self) -> None:
        """End the server."""
        self.server.kill()

    @contextlib.contextmanager
    def publisher(self, bucket_mb: float, **publish: Any) -> Iterator[Callable[[], PublishReport]]:
        """`publish()` moves the whole model once."""
        transport = "cuda_ipc" if self.device == "cuda" else "shared_memory"
        tree = {
            "model": {"path": str(self.folder)},
            "server": {"device": self.device},
            "publish": {"bucket_mb": bucket_mb, "transport": transport, "fallback": "none"},
        }
        tree["publish"] |= publish
        run = create_run(build_settings(tree, source="bench"), self.folder / "run", "unix:///none")
        publisher = Publisher(run, Registry(self.server.url))
        source = LocalTensors(self.tensors)

        def publish_once() -> PublishReport:
            self._version += 1
            return publisher.publish(source, self._version)

        publish_once()
        gc.collect()
        yield publish_once
        publisher.close()

    @contextlib.contextmanager
    def copier(self, bucket_mb: float) -> Iterator[Callable[[], float]]:
        """`copy()`: seconds of both plain copies of every tensor."""
        specs = [
            TensorSpec(name=name, shape=tuple(t.shape), dtype=t.dtype)
            for name, t in self.tensors.items()
        ]
        buckets = list(plan_buckets(specs, int(bucket_mb * 2**20)))
        is_cuda = self.device == "cuda"
        buffer = DeviceBuffer(torch.device("cuda")) if is_cuda else SharedBuffer()
        content = buffer.reserve(max(bucket[-1].end for bucket in buckets))
        targets = {name: torch.zeros_like(t) for name, t in self.tensors.items()}
        views = [
            [
                (
                    self.tensors[place.spec.name],
                    content[place.start : place.end].view(place.spec.dtype).view(place.spec.shape),
                    targets[place.spec.name],
                )
                for place in bucket
            ]
            for bucket in buckets
        ]

        def copy() -> float:
            before = time.perf_counter()
            for bucket in views:
                for tensor, room, _ in bucket:
                    room.copy_(tensor)
                for _, room, target in bucket:
                    target.copy_(room)
            if is_cuda:
                torch.cuda.synchronize()
            return time.perf_counter() - before

        copy()
        yield copy
        views.clear()
        buffer.close()

    def ratio(self, bucket_mb: float, **publish: Any) -> tuple[float, float]:
        """Rate of a publish over that of the copies, by turns; and its median seconds."""
        ratios, seconds = [], []
        with self.copier(bucket_mb) as copy, self.publisher(bucket_mb, **publish) as publish_once:
            for _ in range(NUM_REPEATS):
                copied_s = (copy() + copy()) / 2
                seconds.append(publish_once().duration_s)
                ratios.append((copied_s + copy()) / 2 / seconds[-1])
        return statistics.median(ratios), statistics.median(seconds)


def measure_large(bench: Bench) -> dict[str, float]:
    """The sweep, memory and bytes per second of a large model."""
    figures: dict[str, float] = {"large_gb": bench.num_bytes / 1e9}
    sweep: dict[int, float] = {}
    for bucket_mb in BUCKETS_MB:
        sweep[bucket_mb], seconds = bench.ratio(bucket_mb)
        figures[f"bucketed_vs_copy_{bucket_mb}_mb"] = sweep[bucket_mb]
        figures[f"publish_{bucket_mb}_mb_s"] = seconds
    best = max(sweep, key=lambda size: sweep[size])
    figures["bucketed_vs_copy"] = sweep[best]
    figures["best_bucket_mb"] = best
    figures["publish_gb_per_s"] = bench.num_bytes / 1e9 / figures[f"publish_{best}_mb_s"]
    figures["transfer_vs_copy"], _ = bench.ratio(best, verify="none")
    return figures | measure_memory(bench)


def measure_memory(bench: Bench) -> dict[str, float]:
    """What a publish holds beside the model, as staging counts it and as the kernel does."""
    bucket_mb = 64.0
    with bench.publisher(bucket_mb) as publish_once:
        before = resident_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        report = publish_once()
        grown = resident_bytes("VmHWM") - before
    # The buffers are kept from publish to publish and were resident before.
    held = report.peak_extra_bytes + max(0, grown)
    return {
        "peak_extra_buckets": report.peak_extra_buckets,
        "peak_rss_buckets": held / report.bucket_bytes,
    }


def resident_bytes(name: str) -> int:
    """A figure of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def seconds_of(bench: Bench, bucket_mb: float, num_repeats: int) -> float:
    """Median seconds of a publish."""
    with bench.publisher(bucket_mb) as publish_once:
        return statistics.median(publish_once().duration_s for _ in range(num_repeats))


class Turns:
    """Streamed turns in flight on a server, and when each of their tokens came."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self.arrivals: list[list[float]] = [[] for _ in range(NUM_TURNS)]
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Turns:
        self._thread.start()
        deadline = time.monotonic() + 120
        while not all(len(times) > 8 for times in self.arrivals):
            assert time.monotonic() < deadline, "turns did not start"
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    async def _run(self) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            await asyncio.gather(*(self._turn(session, times) for times in self.arrivals))

    async def _turn(self, session: aiohttp.ClientSession, times: list[float]) -> None:
        body = {
            "input_ids": list(range(2, 18)),
            "sampling_params": {"max_new_tokens": 3900, "ignore_eos": True},
            "return_logprob": False,
            "stream": True,
        }
        while not self._stop.is_set():
            async with session.post(f"{self._url}/generate", json=body) as response:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        times.append(time.monotonic())
                    if self._stop.is_set():
                        return


def measure_pauses(bench: Bench, mode: str) -> dict[str, float]:
    """Milliseconds that turns waited for a publish beyond their usual gap."""
    waits: list[float] = []
    with (
        bench.publisher(PAUSE_BUCKET_MB, mode=mode) as publish_once,
        Turns(bench.server.url) as turns,
    ):
        spans = []
        for _ in range(NUM_PAUSES):
            began_at = time.monotonic()
            publish_once()
            spans.append((began_at, time.monotonic()))
            time.sleep(0.5)
        arrivals = [list(times) for times in turns.arrivals]
    for times in arrivals:
        gaps = [(after - before, before, after) for before, after in itertools.pairwise(times)]
        usual = statistics.median(gap for gap, _, _ in gaps)
        for began_at, ended_at in spans:
            hit = [gap for gap, before, after in gaps if before < ended_at and after > began_at]
            if hit:
                waits.append(1000 * max(0.0, max(hit) - usual))
    waits.sort()
    suffix = "" if mode == "in_place" else f"_{mode}"
    return {
        f"pause_p50_ms{suffix}": waits[len(waits) // 2],
        f"pause_p99_ms{suffix}": waits[int(len(waits) * 0.99)],
    }


def measure(folder: Path, device: str) -> dict[str, float]:
    """Everything."""
    figures: dict[str, float] = {}
    with contextlib.closing(Bench(folder / "large", LARGE, device)) as large:
        say("a large model, by the size of buckets")
        figures |= measure_large(large)
        large_s_per_gb = 1 / figures["publish_gb_per_s"]
    with contextlib.closing(Bench(folder / "quarter", QUARTER, device)) as quarter:
        say("a quarter of it, beside servers that generate")
        few_s = seconds_of(quarter, figures["best_bucket_mb"], 2 * NUM_REPEATS)
        few_gb = quarter.num_bytes / 1e9
        figures["linear_in_bytes"] = large_s_per_gb / (few_s / few_gb)
        figures |= measure_pauses(quarter, "in_place") | measure_pauses(quarter, "retract")
        figures["pause_model_gb"] = few_gb
    with contextlib.closing(Bench(folder / "many", MANY, device)) as many:
        say("as much in many tensors")
        many_s = seconds_of(many, figures["best_bucket_mb"], 2 * NUM_REPEATS)
        figures["many_tensors_vs_few"] = many_s / (many.num_bytes / 1e9) / (few_s / few_gb)
    with contextlib.closing(Bench(folder / "small", SMALL, device)) as small:
        say("small tensors, bucketed and one by one")
        figures["small_tensors"] = len(small.tensors)
        bucketed_s = seconds_of(small, 64.0, NUM_REPEATS)
        per_tensor_s = seconds_of(small, PER_TENSOR_MB, 2)
        figures["bucketed_vs_per_tensor"] = per_tensor_s / bucketed_s
        figures["us_per_tensor"] = 1e6 * bucketed_s / len(small.tensors)
    return figures


def main() -> None:
    """Measure and tell."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    device = parser.parse_args().device
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        figures = measure(Path(name), device)
    on = torch.cuda.get_device_name() if device == "cuda" else ""
    tell("publish" if device == "cpu" else "publish-cuda", figures, on=on)


if __name__ == "__main__":
    main()
