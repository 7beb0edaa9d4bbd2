"""Whether a server's weights score a fixed text as the trainer's do.

A server passes only if it scored every id of every prompt and the mean difference of logprobs stays
within the tolerance. A probe is coarser than a checksum: it finds weights that change the model's
output, not one changed element. Servers fill their weights at random before an update, so that a
bucket that was acknowledged and never written changes the output too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from outloop.buffer.errors import PublishFailed
from outloop.buffer.records import Float32
from outloop.engine.publish.buckets.plan import TensorSpec
from outloop.engine.publish.server_client import ServerClient
from outloop.engine.publish.tensor_source import TensorSource

NUM_PROMPTS = 4
NUM_IDS = 32
"""Ids of each prompt."""
TOLERANCES: dict[Literal["float32", "bfloat16"], float] = {"float32": 0.03, "bfloat16": 0.25}
"""By server.dtype, nats: above what rounding costs, below what the tensor costs whose loss shows
least; docs/gpu.md has both. On GPUs float32 takes TF32: 11 bits, where bfloat16 has 8."""
UNVERIFIED = "unverified-"
"""Prefix of the version that a server has while it is probed."""
_EMBEDDING = "model.embed_tokens.weight"


class Probe:
    """The logprobs that one publish expects of servers."""

    def __init__(self, source: TensorSource, *, tolerance: float) -> None:
        """Have the trainer score the prompts.

        Raises:
            PublishFailed: the source has no embedding, or cannot score.
        """
        self._prompts = prompts_for(source.specs)
        self._tolerance = tolerance
        self._expected = [
            np.asarray(row, np.float32) for row in source.score_prompts(self._prompts)
        ]

    def verify(self, client: ServerClient, version: str, deadline: float) -> None:
        """Have the server score the prompts, and compare.

        Raises:
            PublishFailed: it scores otherwise, or under another version than `version`.
        """
        found = [self._score(client, prompt, version, deadline) for prompt in self._prompts]
        got, wanted = np.concatenate(found), np.concatenate(self._expected)
        gap = float(np.abs(got - wanted).mean())
        # Not `gap > tolerance`: NaN must fail.
        if not gap <= self._tolerance:
            raise PublishFailed(
                f"{client.server_id}: its logprobs of the probe differ from the trainer's by "
                f"mean_gap={gap:.4f}; publish.probe_tolerance={self._tolerance} is allowed. It "
                "holds other weights than were sent; the next publish loads its weights again"
            )

    def _score(
        self, client: ServerClient, prompt: tuple[int, ...], version: str, deadline: float
    ) -> Float32:
        answer = client.generate(
            {
                "input_ids": list(prompt),
                "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
                "return_logprob": True,
                "logprob_start_len": 0,
                # No other request reuses its cache.
                "extra_key": f"probe-{version}",
            },
            deadline,
        )
        try:
            meta: dict[str, Any] = answer["meta_info"]
            entries: list[list[Any]] = meta["input_token_logprobs"][1:]
            scored = [int(entry[1]) for entry in entries]
            logprobs = [float("nan") if entry[0] is None else entry[0] for entry in entries]
            held = str(meta["weight_version"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise PublishFailed(
                f"{client.server_id} gives no logprobs of a prompt ({error!r}): "
                "it needs SGLang's /generate"
            ) from error
        if scored != list(prompt[1:]) or held != version:
            raise PublishFailed(
                f"{client.server_id} scored {len(scored)} ids under weight_version={held!r}; "
                f"{len(prompt) - 1} ids of the probe under {version!r} were asked for"
            )
        return np.asarray(logprobs, np.float32)


def prompts_for(specs: Sequence[TensorSpec]) -> tuple[tuple[int, ...], ...]:
    """The prompts by which a model of these tensors is probed.

    Raises:
        PublishFailed: there is no embedding.
    """
    return probe_prompts(_vocab_size(specs))


def probe_prompts(vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """The same prompts for the same vocabulary; their ids lie evenly over all of it."""
    num = NUM_PROMPTS * NUM_IDS
    order = torch.randperm(num, generator=torch.Generator().manual_seed(0)).tolist()
    ids = [(index * vocab_size + vocab_size // 2) // num for index in order]
    return tuple(tuple(ids[at : at + NUM_IDS]) for at in range(0, num, NUM_IDS))


def _vocab_size(specs: Sequence[TensorSpec]) -> int:
    for spec in specs:
        if spec.name == _EMBEDDING:
            return spec.shape[0]
    raise PublishFailed(
        f'there is no tensor name={_EMBEDDING!r}, by which publish.verify="probe" knows the '
        'vocabulary; set publish.verify to "checksum" or "none"'
    )
