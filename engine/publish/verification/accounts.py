"""Whether a server holds what was sent.

An account keeps the checksums of what was sent in the form in which one kind of server reports its
own. A server passes only if it names exactly the parameters that were sent, each with the checksum
of the bytes that were sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from outloop.buffer.errors import OutloopError, PublishFailed
from outloop.engine.publish.buckets.plan import Bucket, TensorSpec
from outloop.engine.publish.server_client import ServerClient
from outloop.engine.publish.verification.checksum import Algorithm, tensor_checksum
from outloop.engine.publish.verification.sglang_layout import FusedChecksums

_ALGORITHM: Algorithm = "xxh3_128"


class Account(Protocol):
    """What was sent, in the form in which one kind of server reports it."""

    def add(self, content: Tensor, places: Bucket) -> None:
        """A bucket's bytes as sent (uint8), and which tensors lie where."""

    def sums(self) -> list[dict[str, str]]:
        """For each of a server's ranks, the checksum of every parameter.

        Raises:
            PublishFailed: a parameter was not sent whole.
        """


class TorchAccount:
    """Checksums under Hugging Face names: what the torch server holds."""

    def __init__(self) -> None:
        self._sums: dict[str, str] = {}

    def add(self, content: Tensor, places: Bucket) -> None:
        """Keep the checksum of every tensor."""
        for place in places:
            sent = content[place.start : place.end]
            self._sums[place.spec.name] = tensor_checksum(sent, _ALGORITHM)

    def sums(self) -> list[dict[str, str]]:
        """By tensor; its ranks report the same."""
        return [self._sums]


class SGLangAccount:
    """Checksums of SGLang's fused parameters, rank by rank."""

    def __init__(self, num_ranks: int, specs: Sequence[TensorSpec], *, is_gpu: bool) -> None:
        self._sums = FusedChecksums(num_ranks, specs, is_gpu=is_gpu)

    def add(self, content: Tensor, places: Bucket) -> None:
        """Add every tensor to the parameter that it is part of."""
        for place in places:
            self._sums.add(place.spec, content[place.start : place.end])

    def sums(self) -> list[dict[str, str]]:
        """By parameter, rank by rank."""
        return self._sums.result()


def verify(
    kind: str, sums: Sequence[dict[str, str]], client: ServerClient, deadline: float
) -> None:
    """Ask a server of that kind what it holds, and compare it with the `sums` of an account.

    Raises:
        PublishFailed: a parameter differs, is missing, or was never sent.
    """
    if kind == "sglang":
        _verify_sglang(sums, client, deadline)
    else:
        (held,) = client.checksums(_ALGORITHM, deadline)
        compare_checksums(client.server_id, sums[0], held)


def _verify_sglang(sums: Sequence[dict[str, str]], client: ServerClient, deadline: float) -> None:
    """A server whose experts are spread over its ranks is distinguished from one that holds wrong
    weights."""
    try:
        _compare_ranks(sums, client, deadline)
    except PublishFailed as error:
        num_expert_ranks = _expert_ranks_of(client, deadline)
        if num_expert_ranks == 1:
            raise
        raise PublishFailed(
            f"{client.server_id} has ep_size={num_expert_ranks}: checksums of experts that are "
            'spread over ranks are not known; set publish.verify to "probe" or "none", or '
            "start it with ep_size=1"
        ) from error


def _compare_ranks(sums: Sequence[dict[str, str]], client: ServerClient, deadline: float) -> None:
    held = client.checksums(None, deadline)
    if len(held) != len(sums):
        raise PublishFailed(
            f"{client.server_id} has num_ranks={len(held)}; "
            f"server.tensor_parallel_size={len(sums)} is expected"
        )
    for sent, of_rank in zip(sums, held, strict=True):
        compare_checksums(client.server_id, sent, of_rank)


def accounts_for(
    kinds: Iterable[str], *, num_ranks: int, specs: Sequence[TensorSpec], is_gpu: bool = False
) -> dict[str, Account]:
    """An empty account for each of the servers' kinds; SGLang's have `num_ranks` ranks.

    `specs` are all that will be sent; `is_gpu`: the servers hold their weights on GPUs.
    """
    accounts: dict[str, Account] = {}
    for kind in sorted(set(kinds)):
        if kind == "sglang":
            accounts[kind] = SGLangAccount(num_ranks, specs, is_gpu=is_gpu)
        else:
            accounts[kind] = TorchAccount()
    return accounts


def _expert_ranks_of(client: ServerClient, deadline: float) -> int:
    """Over how many ranks the server spreads experts; 1 if it does not report it."""
    try:
        size = client.server_info(deadline).get("ep_size")
    except OutloopError:
        return 1
    return size if isinstance(size, int) else 1


def compare_checksums(server_id: str, sent: dict[str, str], held: dict[str, str]) -> None:
    """Refuse a server whose weights are not what was sent; both by the server's names.

    Raises:
        PublishFailed: a parameter differs, is missing, or was never sent.
    """
    wrong = sorted(name for name, value in sent.items() if held.get(name, value) != value)
    missing = sorted(sent.keys() - held.keys())
    unsent = sorted(held.keys() - sent.keys())
    for names, what in (
        (wrong, "differ from what was sent"),
        (missing, "were sent but are not there"),
        (unsent, "were never sent"),
    ):
        if names:
            raise PublishFailed(
                f"{server_id}: {len(names)} tensors {what}, the first is {names[0]!r}; "
                "the next publish loads its weights again"
            )
