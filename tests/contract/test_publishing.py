"""Publishing to a server of each kind: the bytes arrive, are verified, and turns go on."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fakes.local_tensors import LocalTensors
from fakes.one_server import OneServer
from fakes.sharing_ranks import SharingRanks
from outloop.buffer.errors import PublishFailed
from outloop.buffer.run import Run, create_run
from outloop.buffer.settings import build_settings
from outloop.engine.publish.buckets.plan import Place, TensorSpec
from outloop.engine.publish.publisher import Publisher
from outloop.engine.publish.sending.orders import Join
from outloop.engine.publish.server_client import ServerClient
from outloop.engine.publish.verification.accounts import accounts_for, verify

PROMPT = [5, 17, 300, 8, 9, 44, 120, 7, 61, 2]
CACHED = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True, "extra_key": "before"}
"""How a turn is asked for before a publish, and by a router that has not heard of it."""


def run_on(server: Any, folder: Path, **publish: Any) -> Run:
    """A run that publishes to the server alone."""
    tree = {
        "model": {"path": str(server.folder)},
        "server": {"kind": server.kind, "tensor_parallel_size": server.num_ranks},
        "publish": {"fallback": "none", "phase_timeout_s": 60, **publish},
    }
    return create_run(build_settings(tree, source="test"), folder / "run", "unix:///none")


@pytest.fixture(params=["shared_memory", "collective", "disk"])
def publisher(
    request: pytest.FixtureRequest, server: Any, tmp_path: Path
) -> Iterator[tuple[Publisher, OneServer]]:
    """A publisher over the server, by each transport; small buckets, so that there are several."""
    run = run_on(server, tmp_path, transport=request.param, bucket_mb=0.05)
    registry = OneServer(server.url, server.kind)
    made = Publisher(run, registry)
    yield made, registry
    made.close()


def _weights(folder: Path) -> LocalTensors:
    return LocalTensors(load_file(folder / "model.safetensors"))


def _greedy(folder: Path, num: int) -> list[int]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([PROMPT])
    answer = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return answer[0, len(PROMPT) :].tolist()


def _logprobs(answer: dict[str, Any]) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


async def _require_nothing_of_before(server: Any) -> None:
    """A turn that names the last version is computed as one that can reuse nothing."""
    late = await server.generate(PROMPT * 4, **CACHED)
    alone = await server.generate(PROMPT * 4, **{**CACHED, "extra_key": "after"})
    assert late["output_ids"] == alone["output_ids"]
    assert _logprobs(late) == pytest.approx(_logprobs(alone), abs=1e-4)


@pytest.mark.medium
async def test_published_weights_are_served(
    server: Any, publisher: tuple[Publisher, OneServer], make_model: Callable[..., Path]
) -> None:
    """The server then samples as transformers does with those weights, under the version."""
    publish, registry = publisher
    for version, seed in ((7, 1), (8, 0)):
        folder = make_model(seed=seed)
        report = await asyncio.to_thread(publish.publish, _weights(folder), version)
        assert report.quarantined == ()
        assert registry.entry.policy_version == version
        answer = await server.generate(
            PROMPT, temperature=0, max_new_tokens=16, ignore_eos=True, extra_key=str(version)
        )
        assert answer["output_ids"] == _greedy(folder, 16)
        spans = answer["meta_info"]["weight_versions"]
        assert spans == [{"version": str(version), "start": 0, "end": 16}]


async def test_prefixes_of_the_version_before_are_not_used(
    server: Any, publisher: tuple[Publisher, OneServer], make_model: Callable[..., Path]
) -> None:
    """A turn that still names the last version, as a router sends it that has not heard of the
    publish, is computed by the new weights alone."""
    publish, _ = publisher
    await server.generate(PROMPT * 4, **CACHED)
    await asyncio.to_thread(publish.publish, _weights(make_model(seed=1)), 3)
    await _require_nothing_of_before(server)


@pytest.mark.medium
@pytest.mark.parametrize("mode", ["retract", "abort"])
async def test_a_turn_that_waits_uses_no_prefix_of_the_version_before(
    server: Any, make_model: Callable[..., Path], tmp_path: Path, mode: str
) -> None:
    """It goes on after the publish by keys and values of the new weights, beside turns in flight
    too."""
    publisher = Publisher(run_on(server, tmp_path, mode=mode), OneServer(server.url, server.kind))
    await server.generate(PROMPT * 4, **CACHED)
    running = asyncio.create_task(server.generate(PROMPT, max_new_tokens=480, ignore_eos=True))
    await server.wait_until_running(1)
    await asyncio.to_thread(publisher.publish, _weights(make_model(seed=1)), 4)
    await _require_nothing_of_before(server)
    await running
    publisher.close()


@pytest.mark.medium
async def test_two_ranks_send_over_groups_of_their_own(
    server: Any, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """The server is a member of both, takes their buckets in turn, and then samples by the weights
    of both shares; twice over the same groups."""
    run = run_on(server, tmp_path, transport="collective", bucket_mb=0.05)
    registry = OneServer(server.url, server.kind)
    publisher = Publisher(run, registry)
    tensors = load_file(server.folder / "model.safetensors")
    ranks = SharingRanks(tensors, run.settings)
    for version, seed in ((5, 1), (6, 0)):
        folder = make_model(seed=seed)
        tensors |= load_file(folder / "model.safetensors")
        report = await asyncio.to_thread(publisher.publish, ranks, version)
        assert report.quarantined == ()
        assert min(rank.sent_bytes for rank in report.ranks) > 0
        answer = await server.generate(
            PROMPT, temperature=0, max_new_tokens=16, ignore_eos=True, extra_key=f"two-{version}"
        )
        assert answer["output_ids"] == _greedy(folder, 16)
    assert [order.rank for order in ranks.orders if isinstance(order, Join)] == [0, 1]
    await asyncio.to_thread(publisher.close)
    ranks.close()


@pytest.mark.medium
async def test_turns_in_flight_go_on_and_carry_both_versions(
    server: Any, publisher: tuple[Publisher, OneServer], make_model: Callable[..., Path]
) -> None:
    """What runs during a publish is held, continued by the new weights, and stamped with both."""
    publish, _ = publisher
    fields = {"max_new_tokens": 480, "ignore_eos": True}
    turns = [asyncio.create_task(server.generate(PROMPT, **fields)) for _ in range(4)]
    await server.wait_until_running(4)
    await asyncio.to_thread(publish.publish, _weights(make_model(seed=1)), 9)
    for answer in await asyncio.gather(*turns):
        meta = answer["meta_info"]
        assert [span["version"] for span in meta["weight_versions"]] == ["default", "9"]
        assert meta["weight_versions"][-1]["end"] == len(answer["output_ids"]) == 480


async def test_weights_that_were_not_sent_are_found(
    server: Any, make_model: Callable[..., Path]
) -> None:
    """One changed element in one tensor is a mismatch that names the parameter."""
    tensors = load_file(make_model() / "model.safetensors")
    source = LocalTensors(tensors)
    client = ServerClient("server-0", server.url)
    for changed in (None, *tensors):
        (account,) = accounts_for(
            [server.kind], num_ranks=server.num_ranks, specs=source.specs
        ).values()
        for name, tensor in tensors.items():
            sent = tensor.clone()
            if name == changed:
                sent.view(-1)[-1] += 1
            spec = TensorSpec(name=name, shape=tuple(sent.shape), dtype=sent.dtype)
            place = Place(spec=spec, start=0, end=spec.num_bytes)
            account.add(sent.reshape(-1).view(torch.uint8), (place,))
        deadline = time.monotonic() + 60
        if changed is None:
            await asyncio.to_thread(verify, server.kind, account.sums(), client, deadline)
            continue
        with pytest.raises(PublishFailed, match="differ from what was sent"):
            await asyncio.to_thread(verify, server.kind, account.sums(), client, deadline)
    client.close()


@pytest.mark.medium
async def test_memory_is_given_away_and_taken_again(
    server: Any, make_model: Callable[..., Path]
) -> None:
    """In the order of a colocated step: turns in flight are held over it and go on by new weights.

    SGLang on a CPU runs all of its own steps and assertions, and keeps the memory.
    """
    client, deadline = ServerClient("server-0", server.url), time.monotonic() + 120
    fields = {"max_new_tokens": 300, "ignore_eos": True}
    turns = [asyncio.create_task(server.generate(PROMPT, **fields)) for _ in range(3)]
    await server.wait_until_running(3)
    await asyncio.to_thread(client.pause, "retract", deadline)
    await asyncio.to_thread(client.flush_cache, deadline)
    everything = ("kv_cache", "cuda_graph", "weights")
    await asyncio.to_thread(client.release_memory, everything, deadline)
    assert (await asyncio.to_thread(client.model_info, deadline))["weight_version"]
    await asyncio.to_thread(client.resume_memory, ["weights"], deadline)
    await asyncio.to_thread(client.begin_update, deadline)
    await asyncio.to_thread(client.end_update, deadline)
    folder = str(make_model(seed=1))
    await asyncio.to_thread(client.update_from_disk, folder, deadline)
    await asyncio.to_thread(client.resume_memory, ["kv_cache", "cuda_graph"], deadline)
    await asyncio.to_thread(client.set_version, "11", deadline)
    assert not any(turn.done() for turn in turns)
    await asyncio.to_thread(client.resume, deadline)
    for answer in await asyncio.gather(*turns):
        assert len(answer["output_ids"]) == 300
        assert answer["meta_info"]["weight_versions"][-1]["version"] == "11"
    answer = await server.generate(
        PROMPT, temperature=0, max_new_tokens=16, ignore_eos=True, extra_key="11"
    )
    assert answer["output_ids"] == _greedy(make_model(seed=1), 16)
    client.close()
