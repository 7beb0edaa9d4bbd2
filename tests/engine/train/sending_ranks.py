"""What every rank of `test_sending_ranks` runs: rank 0 publishes, the others follow.

Started with torchrun's variables, a folder that holds runs, a server's URL and the model; rank 0
leaves results.json. Rank 3 is slow, and ends at once where a file of the folder says so.
"""

import dataclasses
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

with warnings.catch_warnings():
    # megatron-core announces at import what it falls back to without Transformer Engine.
    warnings.simplefilter("ignore")
    from safetensors.torch import load_file
    from several_ranks import batch_of, train

    from fakes.one_server import OneServer
    from outloop.buffer.errors import PartFailed
    from outloop.buffer.run import load_run
    from outloop.engine.publish.publisher import Publisher
    from outloop.engine.publish.sending.orders import Broadcast
    from outloop.engine.publish.server_client import ServerClient
    from outloop.engine.publish.verification.checksum import tensor_checksum
    from outloop.engine.train.main import join_ranks
    from outloop.engine.train.publishing import PublishingBeside
    from outloop.engine.train.ranks.controller import RankController, follow
    from outloop.engine.train.ranks.copied_weights import CopiedWeights
    from outloop.engine.train.ranks.rank_worker import RankWorker

RANK = int(os.environ["RANK"])
FOLDER = Path(sys.argv[1])
URL = sys.argv[2]
MODEL = Path(sys.argv[3])


class SlowShares:
    """Takes a while before it reads the last of all its tensors."""

    def __init__(self, shares: Any) -> None:
        self._shares = shares

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shares, name)

    def read(self, specs: Any, into: Any) -> Iterator[torch.Tensor]:
        """As the shares do."""
        tensors = self._shares.read(specs, into)
        for number in range(1, len(into) + 1):
            if number == len(self._shares.shares[RANK]):
                time.sleep(1.0)
            yield next(tensors)
        # The other ranks' tensors need this one's parts.
        yield from tensors


class SlowWorker(RankWorker):
    """Is the last to have read its share; is killed before it broadcasts its bucket while a file
    "die" lies in the folder."""

    @property
    def shares(self) -> Any:
        """Of every rank, as this one reads them."""
        return SlowShares(super().shares)

    def carry_out(self, transport: Any, order: Any) -> Any:
        if isinstance(order, Broadcast) and order.rank == RANK and (FOLDER / "die").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().carry_out(transport, order)


def scramble() -> None:
    """Fill the server's weights at random."""
    client = ServerClient("server-0", URL)
    client.scramble(time.monotonic() + 30.0)
    client.close()


def holds_the_model(folder: Path) -> bool:
    """Whether the server has the weights of the model's folder, bit for bit."""
    client = ServerClient("server-0", URL)
    (held,) = client.checksums("xxh3_128", time.monotonic() + 30.0)
    client.close()
    expected = load_file(folder / "model.safetensors")
    flat = {name: tensor.reshape(-1).view(torch.uint8) for name, tensor in expected.items()}
    return held == {name: tensor_checksum(content, "xxh3_128") for name, content in flat.items()}


def publish(ranks: RankController, publisher: Publisher, version: int) -> dict[str, Any]:
    """Within the loop; what the report says."""
    scramble()
    report = publisher.publish(ranks, version)
    return _traffic(report)


def publish_beside(
    ranks: RankController, publisher: Publisher, registry: OneServer, version: int
) -> dict[str, Any]:
    """The weights as they are, while two updates are made; what the report says."""
    copy = CopiedWeights(ranks, is_probed=False)
    beside = PublishingBeside(ranks, registry, publisher, lambda sentence: None, copy=copy)
    scramble()
    beside.begin(version, lambda: None)
    for step in (1, 2):
        train(ranks, batch_of(step), step=step)
    beside.finish()
    report: Any = beside.report()
    beside.close()
    return _traffic(report)


def _traffic(report: Any) -> dict[str, Any]:
    return {
        "ranks": [dataclasses.asdict(rank) for rank in report.ranks],
        "num_bytes": report.num_bytes,
        "quarantined": report.quarantined,
        "holds_the_model": holds_the_model(MODEL),
        "peak_extra_buckets": report.peak_extra_buckets,
    }


def lose_a_rank(ranks: RankController, publisher: Publisher, registry: OneServer) -> dict[str, Any]:
    """A publish in which rank 3 is killed."""
    (FOLDER / "die").touch()
    try:
        publisher.publish(ranks, 9)
    except PartFailed as error:
        entry = registry.entry
        return {"sentence": str(error), "is_quarantined": entry.is_quarantined}
    return {}


def run_ranks() -> None:
    """The script, or following it."""
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        for name in ("shared_memory", "disk", "collective"):
            run = load_run(FOLDER / name)
            make_worker = SlowWorker if RANK == 3 else RankWorker
            work, watchdog = join_ranks(run, stack, make_worker=make_worker)
            if RANK:
                follow(work, watchdog)
                continue
            ranks = RankController(work, watchdog, num_ranks=4, timeout_s=20.0)
            registry = OneServer(URL, "torch")
            with ranks.ending(), closing(Publisher(run, registry)) as publisher:
                ranks.run(RankWorker.build, num_updates=40)
                found: dict[str, Any] = {"within": publish(ranks, publisher, 1)}
                found["within_again"] = publish(ranks, publisher, 2)
                if name == "collective":
                    found["beside"] = publish_beside(ranks, publisher, registry, 3)
                    found["death"] = lose_a_rank(ranks, publisher, registry)
                results[name] = found
                (FOLDER / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    run_ranks()
