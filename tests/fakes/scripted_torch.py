"""A real torch server whose sequences are recorded, behind a real router over a real Redis.

    with scripted_server(start_torch_server, folder) as server:
        async with playing(run, server) as scene:
            scene.says("I compute.", "The answer is 84.")
            episode = await scene.open()

Weights are random; a sequence is held to its line by the server's own constrained decoding, so that
forward passes, sampling, cache, logprobs and streams are the real ones. What the server was given
and generated is kept where the engine takes it over, behind everything that the router has to do
with.
"""

import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from fakes.live_router import live_router
from fakes.served_policy import publish
from outloop.buffer.reader import BufferReader
from outloop.buffer.records import Turn
from outloop.buffer.run import Run
from outloop.engine.models.random_init import (
    MARKER_TOKENS,
    SPECIAL_TOKENS,
    Sizes,
    config_of,
    initial_weights,
)
from outloop.engine.serve.torch_server.constrained_decoding import Grammars
from outloop.engine.serve.torch_server.requests import Running
from outloop.engine.serve.torch_server.scheduler import Engine, PauseMode
from outloop.router.rendering.renderer import PolicyRenderer

RUNNER_KEY = "ol-runner-x"


class _Line:
    """What one sequence says, an id at a time."""

    def __init__(
        self, ids: list[int], vocab_size: int, on_taken: Callable[[int], None] | None
    ) -> None:
        self._rest = deque(ids)
        self._num_ids = len(ids)
        self._vocab_size = vocab_size
        self._on_taken = on_taken

    def allowed(self) -> np.ndarray:
        found = np.zeros(self._vocab_size, dtype=np.bool_)
        found[self._rest[0]] = True
        return found

    def take(self, token: int) -> None:
        assert token == self._rest.popleft()
        if self._on_taken is not None:
            self._on_taken(self._num_ids - len(self._rest))


@dataclass
class ScriptedServer:
    """A torch server; `lines` are what its next sequences say, none: what they like."""

    url: str = ""
    lines: deque[list[int]] = field(default_factory=deque)
    last: list[int] | None = None
    """Said again where no line is left."""
    seen: list[Running] = field(default_factory=list)
    """Every sequence, with what it was given and generated."""
    engine: Engine | None = None
    on_taken: Callable[[int], None] | None = None
    """Called in the engine's thread with the number of ids that a sequence has generated."""
    paused: Future[None] = field(default_factory=Future)
    """Done when the engine is paused as `pause_after` asks."""

    def pause_after(self, num_ids: int, mode: PauseMode) -> None:
        """Have the next sequence generated up to there, and the engine paused before it goes on."""

        def pause(num_sampled: int) -> None:
            engine = self.engine
            if num_sampled == num_ids and engine is not None:
                self.on_taken = None
                self.paused = engine.call(lambda: engine.pause(mode))

        self.paused = Future()
        self.on_taken = pause


class _Lines(Grammars):
    """Holds each sequence to the server's next line."""

    def __init__(self, server: ScriptedServer, folder: Path, vocab_size: int) -> None:
        super().__init__(folder, vocab_size)
        self._server = server
        self._num_words = vocab_size

    def build(self, params: Any, stop_ids: Any) -> Any:
        """The line, or where none is left what the request asks for."""
        lines = self._server.lines
        ids = lines.popleft() if lines else self._server.last
        if ids is None:
            return super().build(params, stop_ids)
        return _Line(ids, self._num_words, self._server.on_taken)


class _SeenEngine(Engine):
    """Records its requests in `server.seen`."""

    def __init__(self, server: ScriptedServer, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._server = server
        server.engine = self

    def submit(self, request: Running) -> None:
        """As its base class."""
        self._server.seen.append(request)
        super().submit(request)


@contextmanager
def scripted_server(
    start: Callable[..., Any], folder: Path, **options: Any
) -> Iterator[ScriptedServer]:
    """A server of `folder`, started by `start`."""
    server = ScriptedServer()
    makers = {
        "make_engine": partial(_SeenEngine, server),
        "make_grammars": partial(_Lines, server),
    }
    server.url = start(folder, makers=makers, **options).url
    body = {"new_version": "0"}
    httpx.post(f"{server.url}/update_weight_version", json=body).raise_for_status()
    yield server


def write_policy_for(texts: Iterable[str], folder: Path, *, max_context_tokens: int) -> None:
    """A random policy in `folder` that has few tokens for `texts`: whole lines may be one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=16_000, initial_alphabet=alphabet, show_progress=False, max_token_length=64
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKER_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    end, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    sizes = Sizes(hidden_size=32, max_context_tokens=max_context_tokens)
    config = config_of(sizes, tokenizer.get_vocab_size(), end=end, pad=pad)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(initial_weights(config, 0), str(folder / "model.safetensors"))


@dataclass
class Scene:
    """A run that is served, and what tests do with it."""

    url: str
    server: ScriptedServer
    renderer: PolicyRenderer
    reader: BufferReader
    http: httpx.AsyncClient
    num_opened: int = 0

    def says(self, *texts: str) -> None:
        """The policy says these texts in this order, then the last one again and again."""
        stop = self.renderer.stop_ids[0]
        lines = [[*self.renderer.tokenizer.encode(text), stop] for text in texts]
        self.server.lines, self.server.last = deque(lines), lines[-1]
        self.server.seen = []

    def samples_freely(self) -> None:
        """The policy says what it likes."""
        self.server.lines, self.server.last, self.server.seen = deque(), None, []

    async def open(self, **fields: Any) -> dict[str, Any]:
        """The next task's episode, or one with these fields."""
        self.num_opened += 1
        if fields:
            body = {"task_id": f"t{self.num_opened}", "attempt": 0, "deadline_s": 600.0, **fields}
            answer = await self.http.post("/episodes", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()
        body = {"key": f"claim-{self.num_opened}", "count": 1, "open": True}
        answer = await self.http.post("/tasks/claim", json=body)
        assert answer.status_code == 200, answer.text
        (claim,) = answer.json()["claims"]
        return claim["episode"]

    def turns(self, episode: dict[str, Any]) -> tuple[Turn, ...]:
        """What Redis holds of an episode."""
        found = self.reader.load_episode(episode["episode_id"])
        assert found is not None
        return found.turns

    def check_exact(self, episode: dict[str, Any]) -> list[str]:
        """Hold every recorded path against what the server was given and generated; the causes."""
        turns = self.turns(episode)
        by_id = {turn.turn_id: turn for turn in turns}
        seen = {running.rid.rpartition("-")[0]: running for running in self.server.seen}
        assert by_id.keys() == seen.keys()
        for turn in turns:
            path: list[int] = []
            step: Turn | None = turn
            while step is not None:
                path = [*step.prompt_ids, *step.output_ids, *path]
                step = by_id.get(step.parent_turn_id or "")
            running = seen[turn.turn_id]
            assert path == running.prompt_ids + running.output_ids
            assert turn.output_ids.tolist() == running.output_ids
            given = np.array(running.logprobs, np.float32)
            assert np.array_equal(turn.behavior_logprobs, given)
        return [turn.branch_cause for turn in turns]


@asynccontextmanager
async def playing(run: Run, server: ScriptedServer, num_tasks: int = 64) -> AsyncIterator[Scene]:
    """The router's own entry point over `run`, whose version 0 `server` serves."""
    run = replace(run, keys=replace(run.keys, runner_key=RUNNER_KEY))
    key = {"Authorization": f"Bearer {RUNNER_KEY}"}
    async with (
        live_router(run) as url,
        httpx.AsyncClient(base_url=url, headers=key, verify=False, timeout=60) as http,
    ):
        reader = BufferReader.connect(run)
        try:
            tasks = [{"task_id": f"t{i}", "payload": {}} for i in range(num_tasks)]
            await http.post("/tasks", json={"tasks": tasks, "eval_tasks": []})
            publish(run, server.url)
            renderer = PolicyRenderer(run.settings.model)
            yield Scene(url, server, renderer, reader, http)
        finally:
            reader.close()
