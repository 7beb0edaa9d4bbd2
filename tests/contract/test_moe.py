"""A mixture of experts on real SGLang: its fused experts are fed and verified."""

import asyncio
import base64
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fakes.local_tensors import LocalTensors
from fakes.one_server import OneServer
from outloop.buffer.errors import PublishFailed
from outloop.buffer.run import create_run
from outloop.buffer.settings import build_settings
from outloop.engine.publish.buckets.plan import Place
from outloop.engine.publish.publisher import Publisher
from outloop.engine.publish.server_client import ServerClient
from outloop.engine.publish.verification.accounts import accounts_for, verify

PROMPT = [5, 17, 300, 8, 9, 44, 120, 7, 61, 2]


NUM_LAYERS, TOP_K = 2, 2


async def assert_routes_are_transformers(server: Any, model: Any, *, start: int = 4) -> None:
    """Each token from `start` on was sent where transformers would send it, in any order."""
    status, answer = await server.post(
        "/generate",
        input_ids=PROMPT,
        sampling_params={"max_new_tokens": 16, "ignore_eos": True},
        return_logprob=True,
        return_routed_experts=True,
        routed_experts_start_len=start,
    )
    assert status == 200, answer
    flat = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), np.int32)
    ids = PROMPT + answer["output_ids"]
    routes = flat.reshape(len(ids) - 1 - start, NUM_LAYERS, TOP_K)
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    for layer in range(NUM_LAYERS):
        expected = logits[layer][start:-1].topk(TOP_K, dim=-1).indices.sort(dim=-1).values
        np.testing.assert_array_equal(np.sort(routes[:, layer]), expected)


@pytest.mark.medium
async def test_the_torch_server_reports_experts_as_sglang_does(
    make_model: Callable[..., Path],
    start_torch_server: Callable[..., Any],
    server_at: Callable[..., Any],
) -> None:
    """The same fields, encoding and rows; a dense model's answer has none."""
    import transformers

    folder = make_model("qwen3_moe", tied=False)
    server = server_at("torch", start_torch_server(folder).url, folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    await assert_routes_are_transformers(server, model)
    await assert_routes_are_transformers(server, model, start=9)
    status, answer = await server.post(
        "/generate",
        input_ids=PROMPT,
        return_routed_experts=True,
        routed_experts_start_len=len(PROMPT) + 1,
    )
    assert status == 400, answer
    dense = make_model()
    server = server_at("torch", start_torch_server(dense).url, dense)
    status, answer = await server.post("/generate", input_ids=PROMPT, return_routed_experts=True)
    assert status == 200
    assert "routed_experts" not in answer["meta_info"]


async def publish(url: str, folder: Path, tensors: dict[str, torch.Tensor], run_dir: Path) -> None:
    """Feed a server of the model in `folder`, and compare the checksums of what it holds."""
    tree = {
        "model": {"path": str(folder)},
        "server": {"kind": "sglang"},
        "publish": {"fallback": "none", "bucket_mb": 0.05, "verify": "checksum"},
    }
    settings = build_settings(tree, source="test")
    registry = OneServer(url, "sglang")
    publisher = Publisher(create_run(settings, run_dir, "unix:///none"), registry)
    report = await asyncio.to_thread(publisher.publish, LocalTensors(tensors), 5)
    publisher.close()
    assert report.quarantined == (), report.results
    assert registry.state == (5, False)


async def assert_logprobs_are_transformers(server: Any, model: Any) -> list[int]:
    """Of sampled ids; gives them, the prompt's before."""
    answer = await server.generate(PROMPT, max_new_tokens=16, ignore_eos=True)
    ids = torch.tensor([PROMPT + answer["output_ids"]])
    with torch.inference_mode():
        table = torch.log_softmax(model(ids).logits[0], -1)
    expected = table[torch.arange(9, 25), ids[0, 10:]].tolist()
    got = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    assert got == pytest.approx(expected, abs=1e-4)
    found: list[int] = ids[0].tolist()
    return found


@pytest.mark.sglang
async def test_experts_are_fed_and_verified(
    make_model: Callable[..., Path],
    start_sglang_server: Callable[..., Any],
    server_at: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """Checksums of w13 and w2 agree, a changed expert is found, logprobs are the trainer's."""
    import transformers

    # SGLang has a head of its own for these, tied or not, and fills it from `lm_head.weight` alone.
    folder, sent = (make_model("qwen3_moe", tied=False, seed=seed) for seed in (0, 1))
    url = (await asyncio.to_thread(start_sglang_server, folder)).url
    tensors = load_file(sent / "model.safetensors")
    await publish(url, folder, tensors, tmp_path / "run")
    server = server_at("sglang", url, folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(sent, dtype=torch.float32)
    await assert_logprobs_are_transformers(server, model)
    await assert_routes_are_transformers(server, model)

    changed = dict(tensors)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    changed[name] = tensors[name].clone()
    changed[name][0, 0] += 1
    source = LocalTensors(changed)
    (account,) = accounts_for(["sglang"], num_ranks=1, specs=source.specs).values()
    for spec in source.specs:
        place = Place(spec=spec, start=0, end=spec.num_bytes)
        account.add(changed[spec.name].reshape(-1).view(torch.uint8), (place,))
    client = ServerClient("server-0", url)
    with pytest.raises(PublishFailed, match=r"layers\.1\.mlp\.experts\.w13_weight"):
        await asyncio.to_thread(verify, "sglang", account.sums(), client, time.monotonic() + 60)
    client.close()


async def routes_of(server: Any, ids: list[int]) -> np.ndarray:
    """[tokens, TOP_K of GLM-4.5's tiny shape]: where the last layer sent each of the ids."""
    status, answer = await server.post(
        "/generate",
        input_ids=ids,
        sampling_params={"max_new_tokens": 1, "ignore_eos": True},
        return_routed_experts=True,
    )
    assert status == 200, answer
    flat = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), np.int32)
    return np.sort(flat.reshape(len(ids), NUM_LAYERS, -1)[:, -1])


@pytest.mark.sglang
async def test_glm_with_shared_experts_is_fed_and_verified(
    make_model: Callable[..., Path],
    start_sglang_server: Callable[..., Any],
    start_torch_server: Callable[..., Any],
    server_at: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """A dense layer, sigmoid routers with bias and groups, shared experts: checksums agree,
    logprobs are transformers', and tokens go where the torch server sends them."""
    import transformers

    folder, sent = (make_model("glm4_moe", tied=False, seed=seed) for seed in (0, 1))
    url = (await asyncio.to_thread(start_sglang_server, folder)).url
    await publish(url, folder, load_file(sent / "model.safetensors"), tmp_path / "run")
    server = server_at("sglang", url, folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(sent, dtype=torch.float32)
    ids = await assert_logprobs_are_transformers(server, model)
    ours = server_at("torch", start_torch_server(sent).url, sent)
    found, expected = await routes_of(server, ids), await routes_of(ours, ids)
    assert found.shape == (len(ids), 4)
    np.testing.assert_array_equal(found, expected)
