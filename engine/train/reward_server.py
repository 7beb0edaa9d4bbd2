"""A reward model behind HTTP: what a verifier asks while a run goes on.

Scores come from the trainer's own layers, so they are those of the model that was trained. Weights
are replaced whole or not at all, between two batches; a score names the version that gave it.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from outloop.buffer.errors import RecordError, SettingsError
from outloop.buffer.settings import Settings
from outloop.engine.train.data.reward_rows import Comparison, scored_rows
from outloop.engine.train.data.samples import prompt_sample
from outloop.engine.train.megatron import model_and_optimizer
from outloop.engine.train.megatron.model_and_optimizer import ValueModel
from outloop.engine.train.step.reward_update import HEAD, load_reward_model, scores_of

_MAX_BATCH = 256
_log = structlog.get_logger()

Render = Callable[[Sequence[Any], Sequence[Any]], list[int]]
"""Messages and tools -> the ids of the conversation, as in training; raises RecordError."""
Conversation = Callable[[dict[str, Any], str], dict[str, Any]]
"""A task's payload and an answer -> {"messages", "tools"?}."""


class RewardScorer:
    """The reward model of a folder; used by one thread at a time."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        """
        Raises:
            SettingsError: the folder is not that of a reward model.
        """
        self._settings = settings
        self.version = 0
        model_and_optimizer.join_process_group(seed=0)
        self._model = self._read(folder)

    def load(self, folder: Path) -> int:
        """Take the weights of another folder; returns the new version.

        Raises:
            SettingsError: it cannot be loaded; the weights before stay in use.
        """
        self._model = self._read(folder)
        self.version += 1
        _log.info("reward_model_loaded", path=str(folder), version=self.version)
        return self.version

    def scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """One number for each row of ids."""
        samples = tuple(prompt_sample(ids) for ids in rows)
        chosen = scored_rows([Comparison(name="", rows=samples, targets=(0.0,) * len(samples))])
        found = scores_of(
            self._model,
            chosen.batch,
            max_tokens=self._settings.trainer.max_microbatch_tokens,
            on_microbatch=lambda: None,
        )
        if not np.isfinite(found).all():
            raise RecordError("a score is not finite; look at the reward model's training")
        return [float(score) for score in found]

    def _read(self, folder: Path) -> ValueModel:
        if not (folder / HEAD).is_file():
            raise SettingsError(
                f"folder {str(folder)!r} holds no {HEAD}; give the hf folder of a run with "
                "trainer.reward_model"
            )
        config = model_and_optimizer.read_config(
            folder, self._settings.trainer.megatron, dtype=self._settings.trainer.dtype
        )
        model = ValueModel(config)
        load_reward_model(model, folder)
        return model.requires_grad_(False).eval()


class ScoreBody(BaseModel):
    """A conversation, or a task with the answer that is scored."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = []
    task: dict[str, Any] | None = None
    answer: str = ""


class LoadBody(BaseModel):
    """A folder that this machine can read."""

    path: Path


@dataclass(slots=True)
class _Asked:
    ids: list[int]
    answer: asyncio.Future[tuple[float, int]]


class RewardApp:
    """The routes; `run` serves what they are asked, as many rows at once as are waiting."""

    def __init__(
        self,
        scorer: RewardScorer,
        *,
        threads: ThreadPoolExecutor,
        render: Render,
        conversation: Conversation,
        max_tokens: int,
        key: str | None = None,
    ) -> None:
        """`threads`: one thread, in which the model is used; `key`: what every request but for its
        health must bring as a bearer token."""
        self._scorer = scorer
        self._threads = threads
        self._render = render
        self._conversation = conversation
        self._max_tokens = max_tokens
        self._authorization = f"Bearer {key}" if key else None
        self._waiting: asyncio.Queue[_Asked] = asyncio.Queue()
        self.app = FastAPI(title="outloop reward model", redirect_slashes=False)
        self._add_routes()

    async def run(self) -> None:
        """Score what waits, batch by batch, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            asked = [await self._waiting.get()]
            while not self._waiting.empty() and len(asked) < _MAX_BATCH:
                asked.append(self._waiting.get_nowait())
            rows = [one.ids for one in asked]
            try:
                scores = await loop.run_in_executor(self._threads, self._scorer.scores, rows)
            except RecordError as error:
                for one in asked:
                    if not one.answer.done():
                        one.answer.set_exception(error)
                continue
            for one, score in zip(asked, scores, strict=True):
                if not one.answer.done():
                    one.answer.set_result((score, self._scorer.version))

    def _add_routes(self) -> None:
        @self.app.middleware("http")
        async def check_key(request: Request, call_next: Any) -> Response:
            given = request.headers.get("authorization", "")
            wanted = "" if request.url.path == "/health" else self._authorization
            if wanted and not hmac.compare_digest(given.encode(), wanted.encode()):
                return JSONResponse({"error": "Unauthorized"}, 401)
            found: Response = await call_next(request)
            return found

        @self.app.get("/health")
        async def health() -> dict[str, int]:
            return {"version": self._scorer.version}

        @self.app.post("/score")
        async def score(body: ScoreBody) -> Response:
            try:
                ids = self._ids_of(body)
            except RecordError as error:
                return JSONResponse({"error": str(error)}, 400)
            asked = _Asked(ids, asyncio.get_running_loop().create_future())
            await self._waiting.put(asked)
            try:
                found, version = await asked.answer
            except RecordError as error:
                return JSONResponse({"error": str(error)}, 500)
            return JSONResponse({"score": found, "version": version})

        @self.app.post("/load")
        async def load(body: LoadBody) -> Response:
            loop = asyncio.get_running_loop()
            try:
                version = await loop.run_in_executor(self._threads, self._scorer.load, body.path)
            except SettingsError as error:
                return JSONResponse({"error": str(error)}, 400)
            return JSONResponse({"version": version})

    def _ids_of(self, body: ScoreBody) -> list[int]:
        messages, tools = body.messages, body.tools
        if (messages is None) == (body.task is None):
            raise RecordError("give either messages, or task and answer")
        if body.task is not None:
            made = self._conversation(body.task, body.answer)
            messages, tools = made["messages"], made.get("tools", [])
        assert messages is not None
        ids = self._render(messages, tools)
        if len(ids) > self._max_tokens:
            raise RecordError(
                f"the conversation has {len(ids)} ids; model.max_context_tokens="
                f"{self._max_tokens} are allowed"
            )
        return ids


def question_and_answer(task: dict[str, Any], answer: str) -> dict[str, Any]:
    """The task's question, and the answer: what is scored where nothing else is said.

    Raises:
        RecordError: the task has no text under `question`.
    """
    question = task.get("question")
    if not isinstance(question, str):
        raise RecordError(
            "the task has no text under 'question'; name a function that makes the conversation, "
            "outloop reward-server --conversation package.module:function"
        )
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


async def serve_reward_model(
    settings: Settings,
    folder: Path,
    *,
    render: Render,
    conversation: Conversation,
    stop: asyncio.Event,
    on_ready: Callable[[str], None],
    host: str = "127.0.0.1",
    port: int = 0,
    key: str | None = None,
) -> None:
    """Serve the reward model of `folder` until `stop`.

    Raises:
        SettingsError: the folder cannot be served, or it would be open to other machines.
    """
    if key is None and host not in ("127.0.0.1", "::1", "localhost"):
        raise SettingsError(
            f"host={host!r} without a key: any process that reaches it could replace the weights; "
            "give --key-file, or listen on 127.0.0.1"
        )
    torch.set_num_threads(settings.trainer.num_threads)
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1, thread_name_prefix="reward-model") as threads:
        scorer = await loop.run_in_executor(threads, RewardScorer, folder, settings)
        served = RewardApp(
            scorer,
            threads=threads,
            render=render,
            conversation=conversation,
            max_tokens=settings.model.max_context_tokens,
            key=key,
        )
        with socket.create_server((host, port)) as listener:
            server = uvicorn.Server(
                uvicorn.Config(served.app, http="h11", ws="none", log_config=None, lifespan="off")
            )
            scoring = asyncio.create_task(served.run())
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            on_ready(f"http://{host}:{listener.getsockname()[1]}")
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait({scoring, serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
            server.should_exit = True
            await serving
            for task in (scoring, stopped):
                task.cancel()
            await asyncio.gather(scoring, stopped, return_exceptions=True)
