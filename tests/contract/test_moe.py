"""A mixture of experts on real SGLang: its fused experts are fed and verified."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from outloop.engine.publish.verification.accounts import accounts_for

PROMPT = [5, 17, 300, 8, 9, 44, 120, 7, 61, 2]


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
    tree = {
        "model": {"path": str(folder)},
        "server": {"kind": "sglang"},
        "publish": {"fallback": "none", "bucket_mb": 0.05, "verify": "checksum"},
    }
    settings = build_settings(tree, source="test")
    registry = OneServer(url, "sglang")
    publisher = Publisher(create_run(settings, tmp_path / "run", "unix:///none"), registry)
    tensors = load_file(sent / "model.safetensors")
    report = await asyncio.to_thread(publisher.publish, LocalTensors(tensors), 5)
    publisher.close()
    assert report.quarantined == (), report.results
    assert registry.state == (5, False)

    server = server_at("sglang", url, folder)
    answer = await server.generate(PROMPT, max_new_tokens=16, ignore_eos=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(sent, dtype=torch.float32)
    ids = torch.tensor([PROMPT + answer["output_ids"]])
    with torch.inference_mode():
        table = torch.log_softmax(model(ids).logits[0], -1)
    expected = table[torch.arange(9, 25), ids[0, 10:]].tolist()
    got = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    assert got == pytest.approx(expected, abs=1e-4)

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
        await asyncio.to_thread(account.verify, client, time.monotonic() + 60)
    client.close()
