"""A reward model's part of a step: the scores of rows, and one update from their loss.

Owns: scores, the update, the folder. Does not own: the losses (reward_losses). Invariant: scores
come from a forward over all rows before the update, so that how rows are split over microbatches
and ranks changes nothing but rounding.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outloop.buffer.errors import SettingsError
from outloop.engine.train.algorithms.reward_losses import SCORE_LOSSES, Float64
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.megatron.export_weights import Exports
from outloop.engine.train.megatron.import_weights import load_huggingface
from outloop.engine.train.megatron.model_and_optimizer import Policy, ValueModel
from outloop.engine.train.ranks.collectives import gather_bytes
from outloop.engine.train.step.critic_update import value_update
from outloop.engine.train.step.recompute_logprobs import score

RewardLoss = Literal["bradley_terry", "regression"]
HEAD = "reward_head.safetensors"
"""Beside the layers of a reward model's folder: weight [1, H] and bias [1], float32."""


def scores_of(
    model: ValueModel, batch: TrainBatch, *, max_tokens: int, on_microbatch: Callable[[], None]
) -> Float64:
    """The score of each row of `scored_rows`, on every rank."""
    column = score(
        model,
        batch,
        max_tokens=max_tokens + 1,
        on_microbatch=on_microbatch,
        statistic=lambda head, _, hidden_NH: head.values(hidden_NH),
    )
    return column[batch.starts[1:] - 1].astype(np.float64)


def reward_update(
    model: Policy,
    batch: TrainBatch,
    targets: Sequence[float],
    sets: Sequence[int],
    *,
    loss: RewardLoss,
    max_tokens: int,
    on_microbatch: Callable[[], None],
) -> dict[str, float]:
    """One update on the rows of `scored_rows`; what was measured before it, on every rank.

    Raises:
        FloatingPointError: the gradient is not finite; weights are unchanged.
    """
    assert isinstance(model.model, ValueModel)
    scores = scores_of(model.model, batch, max_tokens=max_tokens, on_microbatch=on_microbatch)
    found = SCORE_LOSSES[loss](scores, np.asarray(targets, np.float64), sets)
    column = np.zeros(batch.token_ids.shape, np.float32)
    column[batch.starts[1:] - 1] = found.gradient
    _, grad_norm, learning_rate = value_update(
        model,
        batch.with_columns(advantages=column),
        rows=range(len(batch)),
        losses=lambda values, of_rows: values * of_rows.advantages_N,
        scale=1.0,
        max_tokens=max_tokens + 1,
        on_microbatch=on_microbatch,
    )
    return {
        "train/loss": found.loss,
        "train/grad_norm": grad_norm,
        "train/learning_rate": learning_rate,
        "reward_model/accuracy": found.accuracy,
        "reward_model/pairs": float(found.num_pairs),
    }


def load_reward_model(model: ValueModel, folder: Path) -> None:
    """Layers, and the head if the folder is a reward model's; else the head stays zero.

    Raises:
        SettingsError: the folder is of another model.
    """
    load_huggingface(model, folder)
    path = folder / HEAD
    if not model.post_process or not path.is_file():
        return
    head = load_file(path)
    own = model.output_layer
    for name, into in (("weight", own.weight), ("bias", own.bias)):
        found = head.get(name)
        if found is None or found.shape != into.shape:
            raise SettingsError(
                f"{str(path)!r}: {name} is {None if found is None else tuple(found.shape)}, "
                f"{tuple(into.shape)} is due; the folder is of another reward model"
            )
        with torch.no_grad():
            into.copy_(found)


def save_reward_model(model: ValueModel, folder: Path, *, source: Path) -> None:
    """Write the model as a folder of its own; all ranks take part, rank 0 writes.

    config.json and tokenizer are those of `source`; the head is in a file beside the layers. The
    folder appears complete or not at all.
    """
    unfinished = folder.with_name(f"{folder.name}.parts")
    Exports(model).save(unfinished, source=source)
    heads = [data for data in gather_bytes(_head_bytes(model)) if data]
    if torch.distributed.get_rank():
        return
    hidden = model.config.hidden_size
    numbers = torch.frombuffer(bytearray(heads[0]), dtype=torch.float32)
    save_file(
        {"weight": numbers[:hidden].reshape(1, -1).clone(), "bias": numbers[hidden:].clone()},
        unfinished / HEAD,
    )
    path = unfinished / "config.json"
    # There is no output layer over the vocabulary, as where it is the embedding.
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(unfinished, folder)


def _head_bytes(model: ValueModel) -> bytes:
    if not model.post_process:
        return b""
    head = model.output_layer
    both: Tensor = torch.cat([head.weight.detach().flatten(), head.bias.detach()])
    return both.float().cpu().numpy().tobytes()
