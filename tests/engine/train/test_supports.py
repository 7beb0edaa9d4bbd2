"""Tokens that a server sampled among some ids: the trainer's logprobs are those of the server."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outloop.buffer.records import Sampling, Trajectory, Turn, VersionSpan
from outloop.buffer.sampling_support import SamplingSupport
from outloop.engine.train.data.samples import build_samples
from outloop.engine.train.data.supports import Supports, joined_supports
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.megatron import import_weights, model_and_optimizer
from outloop.engine.train.step.recompute_logprobs import score

MakeTrajectory = Callable[..., Trajectory]
SCHEMA = json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 9, "maxItems": 9})
CUTS: list[dict[str, Any]] = [
    {"top_p": 0.3},
    {"top_k": 7, "temperature": 0.7},
    {"min_p": 0.5, "top_p": 0.9},
    {"json_schema": SCHEMA},
]


@given(st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=1, max_size=8), st.data())
def test_parts_of_a_ragged_column_are_its_tokens(ids: list[list[int]], data: st.DataObject) -> None:
    """Slices, single tokens in any order, joined parts with one in between that has none."""
    counts = np.array([len(some) for some in ids])
    column = Supports.of(counts, np.array([one for some in ids for one in some], np.int32))

    def lists(of: Supports) -> list[list[int]]:
        return [of[place : place + 1].ids.tolist() for place in range(len(of))]

    assert lists(column) == ids
    first, last = sorted(data.draw(st.tuples(st.integers(0, 8), st.integers(0, 8))))
    assert lists(column[first:last]) == ids[first:last]
    places = data.draw(st.lists(st.integers(0, len(ids) - 1)))
    chosen = column.at(np.array(places, np.int64))
    assert lists(chosen) == [ids[place] for place in places]
    joined = joined_supports([column, None, chosen], [len(ids), 2, len(places)])
    assert joined is not None
    assert lists(joined) == [*ids, [], [], *lists(chosen)]
    assert joined_supports([None, None], [1, 1]) is None


def play(url: str, cut: dict[str, Any], name: str, parent: Turn | None = None) -> Turn:
    """A turn as the server samples it, and tells of it."""
    prompt = [5, 17, 30, 8]
    before = [] if parent is None else [*parent.prompt_ids.tolist(), *parent.output_ids.tolist()]
    answer = httpx.post(
        url + "/generate",
        json={
            "input_ids": before + prompt,
            # A random model may sample the end at once; a schema says itself when it ends.
            "sampling_params": {
                "max_new_tokens": 24,
                "ignore_eos": "json_schema" not in cut,
                **cut,
            },
            "return_logprob": True,
            "return_sampling_mask": True,
        },
    ).json()
    meta, ids = answer["meta_info"], answer["output_ids"]
    asked = {key: value for key, value in cut.items() if key != "json_schema"}
    sampling = Sampling(**{"temperature": 1.0} | asked, constraint=cut.get("json_schema", ""))
    return Turn(
        turn_id=name,
        episode_id="e",
        parent_turn_id=None if parent is None else parent.turn_id,
        prompt_ids=np.array(prompt, np.int32),
        output_ids=np.array(ids, np.int32),
        behavior_logprobs=np.array(meta["output_token_sampling_logprobs"], np.float32),
        version_spans=(VersionSpan(0, 0, len(ids)),),
        # In the middle what no client received.
        loss_spans=((0, 3), (5, len(ids))),
        sampling=sampling,
        finish_reason="length",
        started_at=0.0,
        finished_at=0.0,
        support=SamplingSupport.of(meta["output_token_sampling_mask"]),
    )


@pytest.mark.medium
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: next(iter(cut)))
def test_the_trainer_computes_what_the_server_sampled_from(
    cut: dict[str, Any],
    make_model: Callable[..., Path],
    start_torch_server: Callable[..., Any],
    make_trajectory: MakeTrajectory,
) -> None:
    """To rounding, beside a turn that was sampled among all ids, and after a trip to another rank;
    over the whole vocabulary the gap is wide."""
    folder = make_model()
    url = start_torch_server(folder).url
    model = model_and_optimizer.PolicyModel(model_and_optimizer.read_config(folder, {}))
    import_weights.load_huggingface(model, folder)
    first = play(url, cut, "a")
    second = make_trajectory([first, play(url, cut, "b", parent=first)])
    batch = TrainBatch.of([*build_samples(second), *build_samples(make_trajectory([first]))])
    batch = TrainBatch.decode(batch.encode()).select([1, 0])

    def gap(rows: TrainBatch) -> float:
        found = score(model, rows, max_tokens=64, on_microbatch=lambda: None)
        assert rows.behavior_logprobs is not None
        return float(np.abs(found - rows.behavior_logprobs)[rows.loss_mask].max())

    assert batch.loss_mask.sum() >= 20
    assert gap(batch) <= 1e-4
    assert gap(dataclasses.replace(batch, supports=None)) > 0.5
    assert build_samples(second, has_supports=False) == ()
