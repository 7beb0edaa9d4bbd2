"""What only a GPU can show: `make gpu-check` runs this, `make test` leaves it out.

The torch server and Megatron-core on CUDA beside transformers, and weights that go from one process
to another by CUDA-IPC.
"""

import json
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fakes.local_tensors import LocalTensors
from fakes.one_server import OneServer
from fakes.torch_server_process import ServerProcess
from outloop.buffer.run import create_run
from outloop.buffer.settings import build_settings
from outloop.engine.publish.publisher import Publisher

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
PROMPT = [3, 99, 250, 4, 18, 31, 7, 300, 2, 45, 11]
NUM_GENERATED = 64
MAX_LOGIT_DIFFERENCE = 1e-3
"""Two layers of about 12 sums, of 128 products at most and values up to 3.5, rounded to 2^-24 in
two orders: 6e-4 if all point one way. TF32, which rounds to 2^-11, is far above it."""
MAX_LOGPROB_GAP = 1e-3
"""The same: the normalizer is a mean over the vocabulary, in which roundings cancel."""


@pytest.fixture
def server(make_model: Callable[..., Path]) -> Iterator[ServerProcess]:
    """A torch server of the tiny model on the GPU, in a process of its own."""
    process = ServerProcess(make_model(), device="cuda")
    yield process
    process.kill()


@pytest.fixture(autouse=True)
def full_precision() -> None:
    """Parity is asked for in float32, not in TF32."""
    torch.set_float32_matmul_precision("highest")


def _generate(url: str, temperature: float) -> tuple[list[int], list[float]]:
    params = {"temperature": temperature, "max_new_tokens": NUM_GENERATED, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True}
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer = json.loads(response.read())
    logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    return answer["output_ids"], logprobs


def _reference(folder: Path) -> Any:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to("cuda").eval()


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: t.to("cuda") for name, t in load_file(folder / "model.safetensors").items()}


def test_the_server_agrees_with_transformers_on_the_gpu(
    server: ServerProcess, make_model: Callable[..., Path]
) -> None:
    """Logprobs of sampled tokens are those of one full forward on the same device."""
    ids, logprobs = _generate(server.url, 1.0)
    with torch.inference_mode():
        logits = _reference(make_model())(torch.tensor([PROMPT + ids], device="cuda")).logits[0]
    table = torch.log_softmax(logits.float(), -1).cpu()
    start = len(PROMPT)
    expected = [float(table[start + i - 1, token]) for i, token in enumerate(ids)]
    assert logprobs == pytest.approx(expected, abs=MAX_LOGPROB_GAP)


def test_weights_go_by_cuda_ipc_from_process_to_process(
    server: ServerProcess, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Every checksum agrees, and the server generates what the new weights generate; twice."""
    tree = {
        "model": {"path": str(make_model())},
        "server": {"device": "cuda"},
        "publish": {"transport": "cuda_ipc", "bucket_mb": 0.05, "fallback": "none"},
    }
    run = create_run(build_settings(tree, source="test"), tmp_path / "run", "unix:///none")
    registry = OneServer(server.url)
    publisher = Publisher(run, registry)
    folder = make_model(seed=1)
    source = LocalTensors(_weights(folder))
    for version in (1, 2):
        report = publisher.publish(source, version)
        assert report.num_buckets > 3
        assert report.peak_extra_buckets <= 2
        assert registry.state == (version, False)
    publisher.close()
    ids, _ = _generate(server.url, 0.0)
    prompt = torch.tensor([PROMPT], device="cuda")
    expected = _reference(folder).generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NUM_GENERATED,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert ids == expected[0, len(PROMPT) :].tolist()


def test_megatron_core_on_the_gpu_agrees_with_transformers_and_the_server(
    server: ServerProcess, make_model: Callable[..., Path]
) -> None:
    """Logits of the trainer's model beside transformers', and its logprobs beside the server's."""
    with warnings.catch_warnings():
        # megatron-core announces at import what it falls back to without Transformer Engine.
        warnings.simplefilter("ignore")
        from outloop.engine.train.megatron import import_weights, model_and_optimizer
        from outloop.engine.train.megatron.layers import pack_row
    model_and_optimizer.join_process_group(seed=1)
    folder = make_model()
    ids, logprobs = _generate(server.url, 1.0)
    tokens = torch.tensor(PROMPT + ids, device="cuda")
    with torch.no_grad():
        model = model_and_optimizer.PolicyModel(model_and_optimizer.read_config(folder, {})).to(
            "cuda"
        )
        import_weights.load_huggingface(model, folder)
        row = pack_row([len(tokens)], torch.device("cuda"))
        positions = torch.arange(len(tokens), device="cuda")
        ours = model.logits(model(tokens, row, positions)).float()
        theirs = _reference(folder)(tokens[None]).logits[0].float()
    model_and_optimizer.leave_process_group()
    difference = float((ours - theirs).abs().max())
    assert difference <= MAX_LOGIT_DIFFERENCE
    table = torch.log_softmax(ours, -1).cpu().numpy()
    start = len(PROMPT)
    of_trainer = np.array([table[start + i - 1, token] for i, token in enumerate(ids)])
    assert np.abs(of_trainer - np.array(logprobs)).max() <= MAX_LOGPROB_GAP
