"""A served reward model: its scores, its refresh while it is asked, and what it refuses."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from outloop.buffer.errors import RecordError, SettingsError
from outloop.buffer.records import Task
from outloop.buffer.settings import Settings
from outloop.buffer.settings.trainer import TrainerSettings
from outloop.engine.train.megatron.model_and_optimizer import (
    ValueModel,
    build_reward_model,
    read_config,
)
from outloop.engine.train.reward_server import (
    RewardApp,
    RewardScorer,
    question_and_answer,
    serve_reward_model,
)
from outloop.engine.train.step.reward_update import load_reward_model, save_reward_model
from outloop.envs.verifiers.judge import RewardModel
from outloop.envs.verifiers.result import Result


def render(messages: Sequence[Any], tools: Sequence[Any]) -> list[int]:
    """A letter is an id."""
    text = "".join(message["content"] for message in messages)
    if not text:
        raise RecordError("the conversation is empty")
    return [ord(letter) for letter in text]


@pytest.fixture
def folders(tiny_folder: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path]:
    """Two reward models over the same layers."""
    made = build_reward_model(read_config(tiny_folder(), {}), TrainerSettings(), num_updates=1)
    model = made.model
    assert isinstance(model, ValueModel)
    load_reward_model(model, tiny_folder())
    found = []
    for number in (1, 2):
        with torch.no_grad():
            model.output_layer.weight.copy_(number * torch.linspace(-1, 1, 64)[None])
            model.output_layer.bias.fill_(float(number))
        found.append(tmp_path / f"model-{number}")
        save_reward_model(model, found[-1], source=tiny_folder())
    return found[0], found[1]


def settings_of(folder: Path) -> Settings:
    """Of a served model."""
    return Settings(
        model={"path": folder, "max_context_tokens": 64},
        trainer={"mode": "sft", "reward_model": "bradley_terry"},
    )


@asynccontextmanager
async def client_of(folder: Path, key: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the routes, without a socket."""
    with ThreadPoolExecutor(1) as threads:
        served = RewardApp(
            threads.submit(RewardScorer, folder, settings_of(folder)).result(),
            threads=threads,
            render=render,
            conversation=question_and_answer,
            max_tokens=64,
            key=key,
        )
        scoring = asyncio.create_task(served.run())
        transport = httpx.ASGITransport(app=served.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            yield client
        scoring.cancel()
        await asyncio.gather(scoring, return_exceptions=True)


def question(text: str, answer: str) -> dict[str, Any]:
    """What the verifier sends."""
    return {"task": {"question": text}, "answer": answer}


@pytest.mark.medium
async def test_scores_are_the_models_whoever_else_asks(folders: tuple[Path, Path]) -> None:
    """One by one and many at once; as a task with its answer, and as a conversation."""
    scorer = RewardScorer(folders[0], settings_of(folders[0]))
    wanted = scorer.scores([render([{"content": f"{n}?{n + 1}"}], []) for n in range(20)])
    assert len(set(wanted)) == 20
    async with client_of(folders[0]) as client:
        asked = [client.post("/score", json=question(f"{n}?", f"{n + 1}")) for n in range(20)]
        found = [(await one).json() for one in asked]
        together = await asyncio.gather(
            *(client.post("/score", json=question(f"{n}?", f"{n + 1}")) for n in range(20))
        )
        said = {"messages": [{"role": "user", "content": "3?4"}]}
        alone = (await client.post("/score", json=said)).json()
    assert [one["score"] for one in found] == pytest.approx(wanted, abs=1e-5)
    assert [one.json()["score"] for one in together] == pytest.approx(wanted, abs=1e-5)
    assert alone["score"] == pytest.approx(wanted[3], abs=1e-5)
    assert {one["version"] for one in found} == {0}


async def test_weights_are_replaced_whole_or_not_at_all(
    folders: tuple[Path, Path], tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """While it is asked; a folder that is no reward model changes nothing, and the sentence says
    what is missing."""
    first, second = folders
    async with client_of(first) as client:
        before = (await client.post("/score", json=question("a", "b"))).json()
        for folder in (tiny_folder(), tmp_path / "nowhere"):
            refused = await client.post("/load", json={"path": str(folder)})
            assert refused.status_code == 400
            assert "holds no reward_head.safetensors" in refused.json()["error"]
        (second / "model.safetensors").write_bytes(b"rubbish")
        assert (await client.post("/load", json={"path": str(second)})).status_code == 400
        assert (await client.post("/score", json=question("a", "b"))).json() == before
    _, second = folders
    async with client_of(first) as client:
        assert (await client.get("/health")).json() == {"version": 0}
        loaded = await client.post("/load", json={"path": str(first)})
        assert loaded.json() == {"version": 1}
        after = (await client.post("/score", json=question("a", "b"))).json()
    assert after == {"score": pytest.approx(before["score"]), "version": 1}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "give either messages, or task and answer"),
        ({"task": {"question": "a"}, "messages": []}, "give either"),
        ({"task": {"q": "a"}, "answer": "b"}, "no text under 'question'"),
        ({"messages": [{"role": "user", "content": ""}]}, "is empty"),
        ({"messages": [{"role": "user", "content": "a" * 65}]}, "has 65 ids"),
    ],
)
async def test_what_cannot_be_scored_is_a_sentence(
    body: dict[str, Any], words: str, folders: tuple[Path, Path]
) -> None:
    """400, and the server goes on."""
    async with client_of(folders[0]) as client:
        answer = await client.post("/score", json=body)
        assert answer.status_code == 400
        assert words in answer.json()["error"]
        assert (await client.post("/score", json=question("a", "b"))).status_code == 200


async def test_a_key_is_asked_for(folders: tuple[Path, Path]) -> None:
    """By every route but that of its health."""
    async with client_of(folders[0], key="secret") as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.post("/score", json=question("a", "b"))).status_code == 401
        right = {"authorization": "Bearer secret"}
        answer = await client.post("/score", json=question("a", "b"), headers=right)
        assert answer.status_code == 200


async def test_other_machines_need_a_key(folders: tuple[Path, Path]) -> None:
    """Refused before anything is loaded."""
    with pytest.raises(SettingsError, match="without a key"):
        await serve_reward_model(
            settings_of(folders[0]),
            folders[0],
            render=render,
            conversation=question_and_answer,
            stop=asyncio.Event(),
            on_ready=lambda url: None,
            host="0.0.0.0",
        )


@pytest.mark.medium
async def test_a_verifier_gets_its_scores(folders: tuple[Path, Path]) -> None:
    """`RewardModel` of outloop.envs.verifiers, over a socket, before and after a refresh."""
    first, second = folders
    stop, ready = asyncio.Event(), asyncio.Queue[str]()
    serving = asyncio.create_task(
        serve_reward_model(
            settings_of(first),
            first,
            render=render,
            conversation=question_and_answer,
            stop=stop,
            on_ready=ready.put_nowait,
        )
    )
    url = await asyncio.wait_for(ready.get(), 30)
    verifier = RewardModel(f"{url}/score")
    task = Task(task_id="t", payload={"question": "12*7"})
    before = await verifier(task, Result(answer="84"))
    async with httpx.AsyncClient() as client:
        assert (await client.post(f"{url}/load", json={"path": str(second)})).json() == {
            "version": 1
        }
    after = await verifier(task, Result(answer="84"))
    await verifier.tear_down()
    stop.set()
    await asyncio.wait_for(serving, 30)
    assert after == pytest.approx(2 * before, abs=1e-4)
