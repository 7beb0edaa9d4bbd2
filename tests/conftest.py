"""A tiny random policy and torch servers of it, for every folder that talks to a server."""

import asyncio
import json
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import structlog

# One commit gives one verdict: `make test` draws the same examples each time, `make test-search`
# draws new ones.
hypothesis.settings.register_profile("fixed", derandomize=True)
hypothesis.settings.register_profile("search", derandomize=False, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("OUTLOOP_EXAMPLES", "fixed"))


def pytest_configure(config: pytest.Config) -> None:
    """All but `-m gpu` is about the CPU, on machines that have a GPU too."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


VOCAB_SIZE = 400
SGLANG_TIMEOUT_S = 300.0
"""It imports for half a minute on an idle machine."""


@pytest.fixture(autouse=True)
def default_logging() -> Iterator[None]:
    """Commands that a test runs in its process configure logging; undone for the next test."""
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make (once each) a random two-layer model folder: `make_model("llama", tied=False)`.

    Kinds: qwen3, qwen3_moe, glm4_moe, llama.
    """
    made: dict[tuple[str, bool, int], Path] = {}

    def make(kind: str = "qwen3", *, tied: bool = True, seed: int = 0) -> Path:
        key = (kind, tied, seed)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("model")
            _write_model(made[key], kind, tied, seed)
        return made[key]

    return make


def _write_model(folder: Path, kind: str, tied: bool, seed: int) -> None:
    import torch
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "initializer_range": 0.1,
        "eos_token_id": 1,
        "bos_token_id": 0,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any
        if kind == "llama":
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        elif kind == "qwen3_moe":
            experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
            model = transformers.Qwen3MoeForCausalLM(
                transformers.Qwen3MoeConfig(norm_topk_prob=True, **experts, **sizes)
            )
        elif kind == "glm4_moe":
            from fakes.families import GLM4_MOE

            model = transformers.Glm4MoeForCausalLM(
                transformers.Glm4MoeConfig(**(GLM4_MOE | sizes))
            )
            for name, bias in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    torch.nn.init.normal_(bias, std=0.1)
            # For this type of model SGLang asks the folder which class its tokenizer has.
            class_of = {"tokenizer_class": "PreTrainedTokenizerFast"}
            (folder / "tokenizer_config.json").write_text(json.dumps(class_of))
        else:
            model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
        # Norm weights of one would hide a missing or misplaced norm.
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    model.save_pretrained(folder)
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.save(str(folder / "tokenizer.json"))


class ServerThread:
    """A server, served from a thread of this process, whose processes end with `stop`."""

    def __init__(
        self, serve: Callable[..., Coroutine[Any, Any, None]], *, timeout_s: float
    ) -> None:
        self.url = ""
        self._serve = serve
        self._failure: BaseException | None = None
        self._is_bound = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._is_bound.wait(timeout_s), f"no server within timeout_s={timeout_s}"
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        async def on_bound(url: str) -> None:
            self.url = url
            self._is_bound.set()

        try:
            self._loop.run_until_complete(self._serve(stop=self._stop, on_bound=on_bound))
        except BaseException as error:  # noqa: BLE001 - raised in the test's thread
            self._failure = error
            self._is_bound.set()
        finally:
            self._loop.close()

    def ask_to_stop(self) -> None:
        """Ask it to end; `stop` waits."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)

    def stop(self) -> None:
        """Ask it to end and wait."""
        self.ask_to_stop()
        self._thread.join(60)
        assert not self._thread.is_alive(), "the server did not end"


@pytest.fixture(scope="session")
def start_torch_server() -> Iterator[Callable[..., ServerThread]]:
    """`start_torch_server(folder, max_context_tokens=512, ...)`; all are stopped at the end.

    `makers`: the functions that `serve_torch` makes its engine and its grammars by.
    """
    import torch

    torch.set_num_threads(1)
    started: list[ServerThread] = []

    def start(
        folder: Path,
        *,
        max_context_tokens: int = 512,
        port: int = 0,
        key: str | None = None,
        makers: Mapping[str, Callable[..., Any]] | None = None,
        **server: Any,
    ) -> ServerThread:
        tree = {
            "model": {"path": str(folder), "max_context_tokens": max_context_tokens},
            "server": server,
        }
        from outloop.buffer.settings import build_settings
        from outloop.engine.serve.torch_server.process import serve_torch

        serve = partial(
            serve_torch,
            build_settings(tree, source="test"),
            port=port,
            key=key,
            **makers or {},
        )
        thread = ServerThread(serve, timeout_s=30)
        started.append(thread)
        return thread

    yield start
    for thread in started:
        thread.stop()


@pytest.fixture(scope="session")
def start_sglang_server() -> Iterator[Callable[..., ServerThread]]:
    """`start_sglang_server(folder, max_context_tokens=512, ...)`: real SGLang on the CPU."""
    started: list[ServerThread] = []

    def start(
        folder: Path, *, max_context_tokens: int = 512, key: str | None = None, **server: Any
    ) -> ServerThread:
        from outloop.buffer.settings import build_settings
        from outloop.engine.serve.sglang.process import serve_sglang

        tree = {
            "model": {"path": str(folder), "max_context_tokens": max_context_tokens},
            "server": {"kind": "sglang", "start_timeout_s": SGLANG_TIMEOUT_S, **server},
        }
        serve = partial(serve_sglang, build_settings(tree, source="test"), key=key)
        thread = ServerThread(serve, timeout_s=SGLANG_TIMEOUT_S + 10)
        started.append(thread)
        return thread

    yield start
    # Each takes seconds to end: all at once.
    for thread in started:
        thread.ask_to_stop()
    for thread in started:
        thread.stop()


@pytest.fixture(scope="session")
def torch_server(
    make_model: Callable[..., Path], start_torch_server: Callable[..., ServerThread]
) -> ServerThread:
    """One server of the tiny Qwen3 for tests that leave it as they found it."""
    return start_torch_server(make_model())
