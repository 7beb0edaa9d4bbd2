"""Verification by a probe, on a server of each kind: what is right passes, a loss is found."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from fakes.lossy_tap import LossyTap
from fakes.one_server import OneServer
from fakes.scored_source import source_of
from outloop.buffer.errors import PublishFailed
from outloop.buffer.run import create_run
from outloop.buffer.settings import build_settings
from outloop.engine.publish.publisher import Publisher
from outloop.engine.publish.verification.logprob_probe import probe_prompts

PROMPT = [5, 17, 300, 8, 9, 44, 120, 7, 61, 2]


@pytest.fixture
def make_publisher(server: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`publisher, registry = make_publisher(url)`: in small buckets, verified by a probe."""
    made: list[Publisher] = []

    def make(url: str) -> tuple[Publisher, OneServer]:
        tree = {
            "model": {"path": str(server.folder)},
            "server": {"kind": server.kind, "tensor_parallel_size": server.num_ranks},
            "publish": {
                "verify": "probe",
                "fallback": "none",
                "bucket_mb": 0.05,
                "phase_timeout_s": 60,
            },
        }
        run = create_run(build_settings(tree, source="test"), tmp_path / "run", "unix:///none")
        registry = OneServer(url, server.kind)
        made.append(Publisher(run, registry))
        return made[-1], registry

    yield make
    for publisher in made:
        publisher.close()


@pytest.fixture
def lossy_tap(server: Any) -> Iterator[Callable[..., LossyTap]]:
    """`lossy_tap(lost=2)` in front of the server."""
    started: list[LossyTap] = []

    def start(**options: Any) -> LossyTap:
        started.append(LossyTap(server.url, num_ranks=server.num_ranks, **options))
        return started[-1]

    yield start
    for tap in started:
        tap.close()


async def test_a_prompt_is_scored_as_by_a_full_forward(server: Any) -> None:
    """logprob_start_len 0: an entry for every id of the prompt, the first without a logprob."""
    (prompt, *_) = probe_prompts(400)
    status, answer = await server.post(
        "/generate",
        input_ids=list(prompt),
        sampling_params={"temperature": 0, "max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=0,
    )
    assert status == 200
    entries = answer["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in entries] == list(prompt)
    assert entries[0][0] is None
    (expected,) = source_of(server.folder).score_prompts([prompt])
    assert np.array([entry[0] for entry in entries[1:]]) == pytest.approx(expected, abs=1e-4)


@pytest.mark.medium
async def test_right_weights_pass(
    server: Any, make_publisher: Callable[..., Any], make_model: Callable[..., Path]
) -> None:
    """No turn is sent to the server before it has been probed; then it holds the version."""
    publisher, registry = make_publisher(server.url)
    report = await asyncio.to_thread(publisher.publish, source_of(make_model(seed=1)), 7)
    assert report.quarantined == ()
    assert registry.history == [(None, True), (7, False)]
    answer = await server.generate(PROMPT, max_new_tokens=4, ignore_eos=True)
    spans = answer["meta_info"]["weight_versions"]
    assert spans == [{"version": "7", "start": 0, "end": 4}]


@pytest.mark.medium
@pytest.mark.parametrize("is_lost", [True, False])
async def test_wrong_weights_are_found_and_serve_nobody(
    server: Any,
    make_publisher: Callable[..., Any],
    make_model: Callable[..., Path],
    lossy_tap: Callable[..., LossyTap],
    is_lost: bool,
) -> None:
    """A bucket acknowledged and not written, or one layer's part from another model."""
    other = load_file(make_model(seed=2) / "model.safetensors")
    layer = {name: other[name] for name in other if name.startswith("model.layers.1.mlp.")}
    tap = lossy_tap(lost=1) if is_lost else lossy_tap(slipped_in=layer)
    publisher, registry = make_publisher(tap.url)
    source = source_of(make_model(seed=1))
    with pytest.raises(PublishFailed, match=r"phase=verify.*logprobs of the probe differ"):
        await asyncio.to_thread(publisher.publish, source, 7)
    assert registry.state == (None, True)
    assert (await server.get("/model_info"))[1]["weight_version"] == "unverified-7"
    assert tap.calls[-1] == "/pause_generation"
    publisher, registry = make_publisher(server.url)
    await asyncio.to_thread(publisher.publish, source, 8)
    assert registry.state == (8, False)


@pytest.mark.medium
async def test_turns_in_flight_end_before_the_probe(
    server: Any, make_publisher: Callable[..., Any], make_model: Callable[..., Path]
) -> None:
    """They keep the tokens of the old weights; weights that nobody has verified sample nothing."""
    publisher, _ = make_publisher(server.url)
    fields = {"max_new_tokens": 480, "ignore_eos": True}
    turns = [asyncio.create_task(server.generate(PROMPT, **fields)) for _ in range(4)]
    await server.wait_until_running(4)
    await asyncio.to_thread(publisher.publish, source_of(make_model(seed=1)), 9)
    for answer in await asyncio.gather(*turns):
        meta = answer["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        assert {span["version"] for span in meta["weight_versions"]} <= {"default"}
