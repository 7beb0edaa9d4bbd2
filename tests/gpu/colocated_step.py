"""The row `colocation` of `make gpu-check`: two steps on a device that server and trainer share.

The trainer's own ranks, publisher and checkpoints, and a torch server in a process of its own: the
server releases its memory, the trainer trains, saves, trains on, and goes back to what it saved; it
publishes, and the server goes on, in the order of docs/publishing.md. On a GPU each
release is measured. Without one nobody's memory is on a device: storages must be empty, and the
server must refuse what it has no memory for.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import urllib.error
import urllib.request
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
from rows import DEVICE, GB, HAS_GPU, check, num_failed, tell  # noqa: E402
from speed import batch_of  # noqa: E402

from fakes.families import make_family  # noqa: E402
from fakes.one_server import OneServer  # noqa: E402
from fakes.tap import Tap  # noqa: E402
from fakes.torch_server_process import ServerProcess  # noqa: E402

SIZES: dict[str, int] = (
    {
        "vocab_size": 32768,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
    }
    if HAS_GPU
    else {}
)
"""On a GPU 0.2e9 weights, so that what is released shows beside what CUDA itself keeps."""
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
ORDER = [
    *("/pause_generation", "/flush_cache", RELEASE),
    *("/pause_generation", RESUME, "/begin_weight_update", "/update_weights_from_tensor"),
    *("/end_weight_update", "/weights_checker"),
    *("leave", RESUME, "/update_weight_version", "/continue_generation"),
]
"""Of a step; the calls of all buckets as one."""
SLACK_BYTES = 64 * 2**20
SPEED = ("train/tokens_per_s_per_rank", "train/mfu", "train/memory_peak_bytes")


class NotingTap(Tap):
    """Notes what the server is asked for."""

    def __init__(self, target: str) -> None:
        self.calls: list[str] = []
        super().__init__(target)

    def on_call(self, path: str) -> bytes | None:
        """Note it, buckets once."""
        if path != "/model_info" and self.calls[-1:] != [path]:
            self.calls.append(path)
        return None


def free_bytes() -> int:
    """Of the device, whoever holds the rest."""
    return torch.cuda.mem_get_info()[0] if HAS_GPU else 0


def ask(url: str, path: str, body: dict[str, Any]) -> int:
    """Status of the answer."""
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


class Step:
    """The parts, and one step of them."""

    def __init__(self, ranks: Any, publisher: Any, tap: NotingTap) -> None:
        self._ranks, self._publisher, self._tap = ranks, publisher, tap
        self._leave = ranks.leave

    def train(self, number: int) -> None:
        """One update."""
        from outloop.engine.train.data.batch_builder import Credit
        from outloop.engine.train.ranks.rank_worker import RankWorker

        vocab_size = SIZES.get("vocab_size", 400)
        batch = batch_of(8, 512 if HAS_GPU else 32, vocab_size)
        _, metrics = self._ranks.run(
            RankWorker.train_step,
            batch,
            [list(range(len(batch)))],
            credit=Credit(groups=(), teaches=(), rows={}),
            contexts={},
            step=number,
            policy_version=0,
        )
        told = [f"{name} {metrics[name]:.3g}" for name in SPEED if name in metrics]
        tell(f"update {number}: {', '.join(told)}")

    def resume(self, folder: Path) -> None:
        """Save, train on, and go back to what was saved."""
        from outloop.buffer.records import CheckpointMark
        from outloop.engine.train.checkpoint.checkpoint_format import latest_checkpoint
        from outloop.engine.train.ranks.rank_worker import RankWorker

        mark = CheckpointMark(fence=1, group_ids=(), next_slot=0, policy_version=0)
        saving = self._ranks.run(RankWorker.save, step=1, mark=mark, reference_hash="")
        assert saving.wait(60.0)
        saving.result()
        before = self._weights()
        self.train(2)
        checkpoint = latest_checkpoint(folder / "checkpoints")
        self._ranks.run(RankWorker.load, checkpoint)
        after = self._weights()
        is_equal = all(torch.equal(before[name], after[name]) for name in before)
        check(is_equal, "weights that come back from a checkpoint are those that were saved")

    def _weights(self) -> dict[str, torch.Tensor]:
        specs = self._ranks.specs
        read = zip(specs, self._ranks.read(specs), strict=True)
        return {spec.name: tensor.detach().cpu().clone() for spec, tensor in read}

    def publish(self, version: int) -> None:
        """The trainer's weights to the server; all else of the trainer has left before."""
        self._leave(keeps_weights=True)
        report = self._publisher.publish(self, version)
        tell(
            f"publish {version}: {report.num_bytes / GB:.3f} GB in {report.duration_s:.2f} s, "
            f"{report.num_buckets} buckets, the server paused for {report.pause_s:.2f} s"
        )

    def leave(self) -> None:
        """Called by the publisher."""
        self._tap.calls.append("leave")
        self._leave()

    def __getattr__(self, name: str) -> Any:
        """The rest of a source of tensors is the ranks'."""
        return getattr(self._ranks, name)


def colocation(folder: Path) -> None:
    """Two steps."""
    from outloop.buffer.run import create_run
    from outloop.buffer.settings import build_settings
    from outloop.engine.publish.publisher import Publisher
    from outloop.engine.train.main import join_ranks
    from outloop.engine.train.ranks.controller import RankController
    from outloop.engine.train.ranks.rank_worker import RankWorker

    model = folder / "model"
    make_family("qwen3", model, is_tied=False, **SIZES)
    server = ServerProcess(model, device=DEVICE, dtype="bfloat16")
    tap = NotingTap(server.url)
    tree: dict[str, Any] = {
        "model": {"path": str(model)},
        "server": {"device": DEVICE, "dtype": "bfloat16"},
        "trainer": {"is_colocated": True, "device": DEVICE, "dtype": "bfloat16"},
        "publish": {
            "transport": "cuda_ipc" if HAS_GPU else "shared_memory",
            "fallback": "none",
            "bucket_mb": 64 if HAS_GPU else 0.05,
        },
    }
    run = create_run(build_settings(tree, source="gpu-check"), folder / "run", "unix:///none")
    registry = OneServer(tap.url)
    publisher = Publisher(run, registry)
    with ExitStack() as stack:
        stack.callback(server.kill)
        stack.callback(tap.close)
        stack.callback(publisher.close)
        worker, watchdog = join_ranks(run, stack)
        ranks = RankController(worker, watchdog, num_ranks=1, timeout_s=60.0)
        ranks.run(RankWorker.build, num_updates=10)
        num_bytes = 2 * sum(parameter.numel() for parameter in worker.policy.model.parameters())
        ranks.leave()
        step = Step(ranks, publisher, tap)
        left: list[int] = []
        for version in (1, 2):
            tap.calls.clear()
            before = free_bytes()
            publisher.take_devices()
            gained = free_bytes() - before
            if HAS_GPU:
                check(gained > 0.9 * num_bytes, f"the server gave back {gained / GB:.2f} GB")
            status = ask(tap.url, "/weights_checker", {"action": "checksum"})
            check(status == 400, "a server without memory refuses to be asked for its weights")
            tap.calls.remove("/weights_checker")
            ranks.come_back()
            step.train(version)
            if version == 1:
                step.resume(folder / "run")
            most = free_bytes()
            step.publish(version)
            left.append(free_bytes())
            check(registry.state == (version, False), f"the server serves version {version}")
            order = "" if tap.calls == ORDER else f"; it was {tap.calls}"
            check(tap.calls == ORDER, f"the order is that of docs/publishing.md{order}")
            away = worker.placement.is_away
            check(away, "the trainer holds no weights on the device while the server samples")
            if HAS_GPU:
                held = torch.cuda.memory_allocated()
                check(held < SLACK_BYTES, f"{held / GB:.3f} GB of tensors are left on the device")
                tell(f"free on the device: {most / GB:.2f} GB before, {left[-1] / GB:.2f} after")
            body = {"input_ids": [3, 9, 27], "sampling_params": {"max_new_tokens": 8}}
            check(ask(tap.url, "/generate", body) == 200, "the server samples")
        if HAS_GPU:
            grown = left[0] - left[1]
            check(grown < SLACK_BYTES, f"a second step holds {grown / GB:.3f} GB more")


if __name__ == "__main__":
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as name:
        # megatron-core announces at import what it falls back to without Transformer Engine.
        warnings.simplefilter("ignore")
        colocation(Path(name))
    sys.stdout.flush()
    os._exit(1 if num_failed() else 0)
