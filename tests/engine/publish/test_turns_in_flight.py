"""Turns in flight while weights are published: none is lost, tokens stay under their version."""

import asyncio
import json
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from fakes.local_tensors import LocalTensors
from outloop.buffer.records import PolicyState, Sampling
from outloop.router.servers.generate_api import Prompt
from outloop.router.servers.generation import Generator
from outloop.router.servers.pool import ServerPool

NUM_TURNS = 3
NUM_TOKENS = 300
PROMPT = [3, 99, 250, 4, 18]


class PolicyBuffer:
    """The registry as a router's buffer shows it."""

    def __init__(self, registry: Any) -> None:
        self._registry = registry
        self.announced_version = 0
        self.acknowledged_version = 0

    async def policy_state(self) -> PolicyState:
        """As the trainer entered it."""
        return PolicyState(
            announced_version=self.announced_version,
            acknowledged_version=self.acknowledged_version,
            servers=self._registry.servers(),
            run_state="running",
        )


@pytest.fixture
async def stage(registry: Any) -> AsyncIterator[tuple[Generator, PolicyBuffer]]:
    """A router's way of sampling turns, over the registry."""
    buffer = PolicyBuffer(registry)
    pool = ServerPool(buffer)  # type: ignore[arg-type]
    following = asyncio.create_task(pool.run())
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        yield Generator(session, pool, tasks, timeout_s=60.0, may_mix_versions=True), buffer
    following.cancel()


@pytest.fixture
def endless_model(make_model: Callable[..., Path], tmp_path: Path) -> Path:
    """The tiny model without an end-of-text id, so that every turn runs to its limit."""
    folder = tmp_path / "endless"
    shutil.copytree(make_model(), folder)
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    return folder


def _logprobs(folder: Path, ids: list[int]) -> list[float]:
    """Of every generated id under the weights of `folder`, from one full forward."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        table = torch.log_softmax(model(torch.tensor([PROMPT + ids])).logits[0], -1)
    start = len(PROMPT)
    return [float(table[start + i - 1, token]) for i, token in enumerate(ids)]


async def _wait_for_tokens(session: aiohttp.ClientSession, url: str, num_tokens: int) -> None:
    deadline = asyncio.get_running_loop().time() + 60
    while asyncio.get_running_loop().time() < deadline:
        async with session.get(f"{url}/v1/loads") as answer:
            if (await answer.json())["loads"][0]["num_sampled_tokens"] > num_tokens:
                return
    pytest.fail("no token was sampled")


@pytest.mark.medium
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
async def test_a_turn_goes_on_across_a_publish_with_both_versions(
    stage: tuple[Generator, PolicyBuffer],
    make_model: Callable[..., Path],
    server_process: Callable[..., Any],
    endless_model: Path,
    make_publisher: Callable[..., Any],
    registry: Any,
    other_weights: dict[str, torch.Tensor],
    mode: str,
    is_streamed: bool,
) -> None:
    """Every token is sampled once, under the version that its span names, streamed or not.

    Where the cache was computed again, each logprob is that of a full forward of the version's
    weights; kept in place, those before the publish are.
    """
    generator, buffer = stage
    server = server_process(endless_model)
    registry.add("server-0", server.url)
    publisher = make_publisher(mode=mode)
    publisher.publish(LocalTensors(_weights(make_model())), 0)
    handed_on: list[list[int]] = [[] for _ in range(NUM_TURNS)]

    async def generate(index: int) -> Any:
        generated, _ = await generator.generate(
            Prompt().followed_by(PROMPT),
            Sampling(temperature=1.0, max_new_tokens=NUM_TOKENS),
            (),
            rid=f"turn-{index}",
            on_tokens=handed_on[index].extend if is_streamed else None,
        )
        return generated

    turns = [asyncio.create_task(generate(index)) for index in range(NUM_TURNS)]
    async with aiohttp.ClientSession() as session:
        await _wait_for_tokens(session, server.url, NUM_TURNS * 10)
    buffer.announced_version = 1
    await asyncio.to_thread(publisher.publish, LocalTensors(other_weights), 1)
    buffer.acknowledged_version = 1
    for generated, seen in zip(await asyncio.gather(*turns), handed_on, strict=True):
        assert len(generated.ids) == len(generated.logprobs) == NUM_TOKENS
        assert generated.finish == "length"
        assert not is_streamed or seen == generated.ids
        first, second = generated.spans
        assert (first.policy_version, first.start) == (0, 0)
        assert (second.policy_version, second.start, second.end) == (1, first.end, NUM_TOKENS)
        before = _logprobs(make_model(), generated.ids)[: first.end]
        assert generated.logprobs[: first.end] == pytest.approx(before, abs=1e-3)
        after = _logprobs(make_model(seed=1), generated.ids)[first.end :]
        if mode == "in_place":
            assert generated.logprobs[first.end :] != pytest.approx(after, abs=1e-3)
        else:
            assert generated.logprobs[first.end :] == pytest.approx(after, abs=1e-3)


@pytest.mark.medium
async def test_a_turn_leaves_a_server_that_is_quarantined(
    stage: tuple[Generator, PolicyBuffer],
    server_process: Callable[..., Any],
    endless_model: Path,
    make_publisher: Callable[..., Any],
    registry: Any,
    other_weights: dict[str, torch.Tensor],
) -> None:
    """Its server dies in a publish, another takes the weights: the turn goes on there."""
    generator, buffer = stage
    servers = {f"server-{index}": server_process(endless_model) for index in range(2)}
    for server_id, server in servers.items():
        registry.add(server_id, server.url)
    publisher = make_publisher(num_servers=2)
    publisher.publish(LocalTensors(other_weights), 0)
    turn = asyncio.create_task(
        generator.generate(
            Prompt().followed_by(PROMPT),
            Sampling(temperature=1.0, max_new_tokens=NUM_TOKENS),
            (),
            rid="turn",
            preferred="server-0",
            on_tokens=lambda ids: None,
        )
    )
    async with aiohttp.ClientSession() as session:
        await _wait_for_tokens(session, servers["server-0"].url, 10)
    buffer.announced_version = 1
    publishing = threading.Thread(target=publisher.publish, args=(LocalTensors(other_weights), 1))
    servers["server-0"].kill()
    publishing.start()
    await asyncio.to_thread(publishing.join)
    buffer.acknowledged_version = 1
    generated, server_id = await turn
    assert server_id == "server-1"
    assert registry.state("server-0") == (None, True)
    assert len(generated.ids) == len(generated.logprobs) == NUM_TOKENS
    assert generated.spans[0].policy_version == 0


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")
