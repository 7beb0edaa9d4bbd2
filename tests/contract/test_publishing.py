"""Publishing to a server of each kind: the bytes arrive, are verified, and turns go on."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outloop.buffer.errors import PublishFailed
from outloop.buffer.records import ServerEntry
from outloop.buffer.run import create_run
from outloop.buffer.settings import build_settings
from outloop.engine.publish.client import ServerClient
from outloop.engine.publish.plan import TensorSpec
from outloop.engine.publish.source import LocalTensors
from outloop.engine.publish.transaction import Publisher
from outloop.engine.publish.verify import accounts_for

PROMPT = [5, 17, 300, 8, 9, 44, 120, 7, 61, 2]


class OneServer:
    """A registry of the server under test."""

    def __init__(self, kind: str, url: str) -> None:
        self.entry = ServerEntry(
            server_id="server-0", url=url, kind=kind, policy_version=None, is_quarantined=False
        )

    def servers(self) -> tuple[ServerEntry, ...]:
        """That one."""
        return (self.entry,)

    def set_server_version(
        self, server_id: str, policy_version: int | None, *, quarantined: bool
    ) -> None:
        """Enter what it holds."""
        entry = self.entry
        self.entry = ServerEntry(
            server_id=server_id,
            url=entry.url,
            kind=entry.kind,
            policy_version=policy_version,
            is_quarantined=quarantined,
        )


@pytest.fixture(params=["shared_memory", "collective", "disk"])
def publisher(
    request: pytest.FixtureRequest, server: Any, tmp_path: Path
) -> Iterator[tuple[Publisher, OneServer]]:
    """A publisher over the server, by each transport; small buckets, so that there are several."""
    tree = {
        "model": {"path": str(server.folder)},
        "server": {"kind": server.kind},
        "publish": {
            "transport": request.param,
            "fallback": "none",
            "bucket_mb": 0.05,
            "phase_timeout_s": 60,
        },
    }
    run = create_run(build_settings(tree, source="test"), tmp_path / "run", "unix:///none")
    registry = OneServer(server.kind, server.url)
    made = Publisher(run, registry)
    yield made, registry
    made.close()


def _weights(folder: Path) -> LocalTensors:
    return LocalTensors.of(load_file(folder / "model.safetensors"))


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


async def test_published_weights_are_served(
    server: Any, publisher: tuple[Publisher, OneServer], make_model: Callable[..., Path]
) -> None:
    """The server then draws as transformers does with those weights, under the version."""
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
    client = ServerClient("server-0", server.url)
    for changed in (None, *tensors):
        (account,) = accounts_for([server.kind], num_ranks=1).values()
        for name, tensor in tensors.items():
            sent = tensor.clone()
            if name == changed:
                sent.view(-1)[-1] += 1
            spec = TensorSpec(name=name, shape=tuple(sent.shape), dtype=sent.dtype)
            account.add(spec, sent.reshape(-1).view(torch.uint8))
        deadline = time.monotonic() + 60
        if changed is None:
            await asyncio.to_thread(account.verify, client, deadline)
            continue
        with pytest.raises(PublishFailed, match="differ from what was sent"):
            await asyncio.to_thread(account.verify, client, deadline)
    client.close()


@pytest.mark.sglang
async def test_both_ranks_of_a_server_get_and_hold_what_was_sent(
    make_model: Callable[..., Path],
    start_sglang_server: Callable[..., Any],
    server_at: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """Every transport feeds both ranks of SGLang, whose shards are verified one by one."""
    folder = make_model()
    started = await asyncio.to_thread(start_sglang_server, folder, tensor_parallel_size=2)
    registry, server = OneServer("sglang", started.url), server_at("sglang", started.url, folder)
    for version, transport in enumerate(("shared_memory", "collective", "disk"), 1):
        tree = {
            "model": {"path": str(folder)},
            "server": {"kind": "sglang", "tensor_parallel_size": 2},
            "publish": {"transport": transport, "fallback": "none", "bucket_mb": 0.05},
        }
        settings = build_settings(tree, source="test")
        publish = Publisher(create_run(settings, tmp_path / transport, "unix:///none"), registry)
        sent = make_model(seed=version)
        report = await asyncio.to_thread(publish.publish, _weights(sent), version)
        publish.close()
        assert report.quarantined == (), report.results
        answer = await server.generate(
            PROMPT, temperature=0, max_new_tokens=12, ignore_eos=True, extra_key=transport
        )
        assert answer["output_ids"] == _greedy(sent, 12)
