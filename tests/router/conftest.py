"""A tiny tokenizer, a router over a twin and a fake server, and an OpenAI client."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from fakes.fake_server import FakeServer, Script, serving
from fakes.twin_run import TwinRun, WatchedWriter
from outloop.buffer.records import Turn
from outloop.buffer.run import Run, RunKeys
from outloop.buffer.settings import build_settings
from outloop.router.app import create_app
from outloop.router.http.protocol import ClientConnection
from outloop.router.rendering.renderer import PolicyRenderer
from outloop.router.timings import DEFAULT_TIMINGS, Timings

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
CORPUS = (
    '\n{"name": "calculator", "arguments": {"expression": "12 * 7"}}\n',
    "user\nWhat is 12 * 7?",
    "system\nYou are a helpful assistant. Use the calculator.",
    "assistant\nThe answer is 84.",
    "# Tools\n\nYou may call one or more functions to assist with the user query.",
)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer with Qwen3's markers, and a config.json."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL[:3]])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in SPECIAL[3:]])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return folder


@pytest.fixture
def make_run(model_folder: Path, tmp_path: Path) -> Callable[..., Run]:
    """A run handle over the tiny model; keyword arguments are settings sections."""

    def make(**sections: dict) -> Run:
        tree = {
            "run": {"name": "test", "dir": str(tmp_path)},
            "model": {
                "path": str(model_folder),
                "renderer": "qwen3",
                "renderer_options": {"enable_thinking": False},
                "max_context_tokens": 4096,
            },
        }
        for name, section in sections.items():
            tree[name] = {**tree.get(name, {}), **section}
        return Run(
            run_id="test",
            dir=tmp_path,
            settings=build_settings(tree, source="test"),
            redis_url="",
            keys=RunKeys(runner_key="ol-runner-x", admin_key="ol-admin-x", episode_secret="s"),
        )

    return make


@pytest.fixture(scope="session")
def renderer(model_folder: Path) -> PolicyRenderer:
    """The renderer of the tiny model, thinking off."""
    settings = build_settings(
        {
            "model": {
                "path": str(model_folder),
                "renderer": "qwen3",
                "renderer_options": {"enable_thinking": False},
            }
        },
        source="test",
    )
    return PolicyRenderer(settings.model)


@dataclass
class Stage:
    """A running router over a twin and a fake server, and what tests do with it."""

    run: Run
    url: str
    buffer: TwinRun | None
    """None: its run is in a real Redis."""
    writer: WatchedWriter
    server: FakeServer
    renderer: PolicyRenderer
    http: httpx.AsyncClient
    app: object
    stack: AsyncExitStack

    async def post(self, path: str, body: object, key: str = "ol-runner-x", **headers: str):
        """POST JSON with a key."""
        return await self.http.post(
            path, json=body, headers={"Authorization": f"Bearer {key}", **headers}
        )

    async def get(self, path: str, key: str = "ol-runner-x"):
        """GET with a key."""
        return await self.http.get(path, headers={"Authorization": f"Bearer {key}"})

    async def open(self, **fields: object) -> dict:
        """Open an episode, of a claimed attempt unless it is an evaluation."""
        body = {"task_id": "t", "deadline_s": 60.0, "purpose": "train", "attempt": 0} | fields
        if body["purpose"] == "train" and "group_id" not in body:
            claim = await self.buffer.claim(self.writer, body["task_id"])
            body |= {"group_id": claim.group_id, "attempt": claim.attempt}
        answer = await self.post("/episodes", body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def client(self, episode: dict, **options: object) -> openai.AsyncOpenAI:
        """The unmodified OpenAI client of an episode."""
        client = openai.AsyncOpenAI(
            base_url=episode["base_url"], api_key=episode["api_key"], **options
        )
        self.stack.push_async_callback(client.close)
        return client

    def says(self, *texts: str) -> None:
        """The policy answers these texts, one per call, each ended by the stop id."""
        scripts = iter(self.script(text) for text in texts)
        self.server.answer = lambda request: next(scripts)

    def script(self, text: str) -> Script:
        """The script of one answer."""
        stop = self.renderer.stop_ids[0]
        return Script(
            ids=[*self.renderer.tokenizer.encode(text), stop],
            finish={"type": "stop", "matched": stop},
        )

    def turns(self, episode: dict) -> tuple[Turn, ...]:
        """Recorded turns of an episode."""
        return self.buffer.load_episode(episode["episode_id"]).turns


@pytest.fixture
async def make_stage(
    make_run: Callable[..., Run], renderer: PolicyRenderer
) -> AsyncIterator[Callable]:
    """Start a router on a twin, `beside` another stage, or of a `run` in a real Redis; further
    keywords are sections of settings."""
    async with AsyncExitStack() as stack:

        async def make(
            beside: Stage | None = None,
            run: Run | None = None,
            staleness: int = 1,
            timings: Timings = DEFAULT_TIMINGS,
            may_listen: bool = True,
            connection: type[ClientConnection] = ClientConnection,
            **sections: dict,
        ) -> Stage:
            redis_run = run
            buffer = {"max_staleness": staleness} | sections.pop("buffer", {})
            run = run or make_run(**sections, buffer=buffer)
            server = FakeServer(lambda request: Script(ids=[1]))
            server.url = await stack.enter_async_context(serving(server))
            if redis_run is not None:
                buffer, writer = None, await WatchedWriter.connect(redis_run)
            else:
                buffer = TwinRun(run, may_listen=may_listen) if beside is None else beside.buffer
                if beside is None:
                    buffer.serve(server.url)
                writer = await buffer.connect()
            stack.push_async_callback(writer.close)
            app = create_app(run, writer, timings=timings)
            url = await stack.enter_async_context(serving(app, connection))
            if buffer is not None:
                await app.state.parts.pool.refresh()
            http = await stack.enter_async_context(
                httpx.AsyncClient(base_url=url, timeout=20, verify=False)
            )
            return Stage(run, url, buffer, writer, server, renderer, http, app, stack)

        yield make


@pytest.fixture
async def stage(make_stage: Callable) -> Stage:
    """A router with default settings."""
    return await make_stage()
