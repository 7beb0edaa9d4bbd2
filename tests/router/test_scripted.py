"""Real SDKs, router, Redis and torch server with a scripted policy: what Redis holds is what the
server was given and generated."""

import asyncio
import json
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import openai
import pydantic
import pytest

from fakes.scripted_torch import playing, scripted_server
from fakes.talkers import Meeting
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.redis.run_meta import init_run
from outloop.buffer.run import create_run
from outloop.engine.models.random_init import Sizes, write_policy
from outloop.engine.train.data.samples import build_samples

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 * 7"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "\\u00e9"}}\n</tool_call>'
CONTEXT = 8192


class Answer(pydantic.BaseModel):
    """What an agent asks its model for."""

    number: int
    is_sure: bool


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random policy that knows every byte."""
    folder = tmp_path_factory.mktemp("policy")
    write_policy(folder, seed=0, sizes=Sizes(max_context_tokens=CONTEXT))
    return folder


@pytest.fixture(scope="module")
def scripted(policy: Path, start_torch_server):
    """One server for the module."""
    options = {"max_context_tokens": CONTEXT, "max_running_requests": 8}
    with scripted_server(start_torch_server, policy, **options) as server:
        yield server


@pytest.fixture
async def scene(scripted, policy: Path, make_run, tmp_path: Path):
    """A run in a Redis of its own."""
    model = {"path": str(policy), "max_context_tokens": CONTEXT}
    with EmbeddedRedis(tmp_path / "redis", max_memory_mb=64) as redis:
        run = create_run(
            make_run(model=model, buffer={"group_size": 2}).settings, tmp_path / "run", redis.url
        )
        init_run(run)
        async with playing(run, scripted) as found:
            yield found


@pytest.mark.medium
async def test_tool_loops_of_every_sdk_are_recorded_as_the_server_saw_them(scene) -> None:
    """chat, responses and messages, plain and by the SDK's own streaming helper: two calls at once
    and an answer are one branch, id for id and logprob for logprob the engine's."""
    for dialect in ("chat", "responses", "messages"):
        meeting = Meeting(dialect, scene.url)
        for stream in (False, True):
            scene.says(f"Both.\n{CALL}\n{OTHER}", "The answer is 84, caf\u00e9 \U0001f600.")
            episode = await scene.open()
            talker = meeting.begin(episode)
            talker.tell("What is 12 * 7?")
            reply = await talker.ask(stream=stream)
            assert [call for _, call in reply.plain_calls] == [
                {"expression": "12 * 7"},
                {"expression": "\u00e9"},
            ]
            talker.hand_back(reply)
            talker.hand_results([(call_id, "84") for call_id, _, _ in reply.calls])
            reply = await talker.ask(stream=stream)
            assert reply.text == "The answer is 84, caf\u00e9 \U0001f600."
            assert scene.check_exact(episode) == ["root", "extension"]
            # The second turn's prompt was computed once: the cache held the first turn.
            assert scene.server.seen[1].num_cached > len(scene.server.seen[0].prompt_ids) // 2
            assert all(turn.loss_spans for turn in scene.turns(episode))
        await meeting.close()


@pytest.mark.medium
async def test_structured_output_is_sampled_under_the_schema(scene) -> None:
    """A random policy's answer is parsed by the SDK's helper into the caller's type, plain and
    streamed; what the grammar forced is recorded as the server sampled it, and masked."""
    scene.samples_freely()
    episode = await scene.open(purpose="eval", sampling={"max_new_tokens": 200, "seed": 3})
    client = openai.AsyncOpenAI(base_url=episode["base_url"], api_key=episode["api_key"])
    asked = {"model": "policy", "messages": [{"role": "user", "content": "How many?"}]}
    async with client:
        plain = await client.chat.completions.parse(**asked, response_format=Answer)
        parsed = [plain.choices[0].message.parsed]
        async with client.chat.completions.stream(**asked, response_format=Answer) as events:
            parsed.append((await events.get_final_completion()).choices[0].message.parsed)
    assert all(isinstance(one, Answer) for one in parsed), parsed
    turns = scene.turns(episode)
    assert scene.check_exact(episode) == ["root", "resampled"]
    assert {turn.mask_reason for turn in turns} == {"eval"}
    assert all(json.loads(scene.renderer.tokenizer.decode([*t.output_ids[:-1]])) for t in turns)


@pytest.mark.medium
async def test_the_check_finds_a_wrong_record(scene) -> None:
    """One id or one logprob that differs from the server's is found."""
    scene.says("fine")
    episode = await scene.open()
    client = openai.AsyncOpenAI(base_url=episode["base_url"], api_key=episode["api_key"])
    async with client:
        messages = [{"role": "user", "content": "go"}]
        await client.chat.completions.create(model="policy", messages=messages)
    (running,) = scene.server.seen
    for wrong in (
        {"prompt_ids": [*running.prompt_ids[:-1], 0]},
        {"output_ids": [0, *running.output_ids[1:]]},
        {"logprobs": [*running.logprobs[:-1], -7.0]},
    ):
        names = ("rid", "prompt_ids", "output_ids", "logprobs")
        fields = {name: getattr(running, name) for name in names} | wrong
        scene.server.seen = [SimpleNamespace(**fields)]
        with pytest.raises(AssertionError):
            scene.check_exact(episode)


@pytest.mark.medium
async def test_only_what_the_policy_generated_for_training_reaches_the_trainer(scene) -> None:
    """Of a group whose episodes also ask the frozen policy, and of evaluations that run beside it
    under the same words, the trainer is leased the group alone, and its samples train exactly the
    ids that the engine sampled for the policy's own turns."""
    scene.says("fine")
    trained, group = [], [await scene.open() for _ in range(2)]
    exam = await scene.open(purpose="eval", group_id=None, sampling={"temperature": 0.5})
    for number, episode in enumerate([*group, exam]):
        client = openai.AsyncOpenAI(base_url=episode["base_url"], api_key=episode["api_key"])
        async with client:
            messages = [{"role": "user", "content": "go"}]
            for model in ("policy", "policy@0", "policy"):
                reply = await client.chat.completions.create(model=model, messages=messages)
                messages += [
                    reply.choices[0].message.model_dump(exclude_none=True),
                    {"role": "user", "content": "on"},
                ]
                if model == "policy" and episode is not exam:
                    trained.append(scene.server.seen[-1])
        close = {"outcome": "completed", "reward": {"value": float(number)}, "key": f"c{number}"}
        path = f"/episodes/{episode['episode_id']}/close"
        assert (await scene.http.post(path, json=close)).status_code == 200
    reader = scene.reader
    (lease,) = await asyncio.to_thread(
        reader.take,
        1,
        fence=reader.acquire_fence(),
        policy_version=0,
        timeout_s=20.0,
        on_wait=lambda _: None,
        should_stop=lambda: False,
    )
    found = {one.episode.episode_id: one for one in lease.group.trajectories}
    assert found.keys() == {episode["episode_id"] for episode in group}
    samples = [one for t in found.values() for one in build_samples(t)]
    sampled = [sample.token_ids[sample.loss_mask].tolist() for sample in samples]
    assert sorted(chain(*sampled)) == sorted(chain(*(one.output_ids for one in trained)))
    given = [sample.behavior_logprobs[sample.loss_mask].tolist() for sample in samples]
    engine = np.array([*chain(*(one.logprobs for one in trained))], np.float32)
    assert sorted(chain(*given)) == sorted(engine.tolist())
    masks = [turn.mask_reason for turn in scene.turns(exam)]
    assert masks == ["eval"] * 3


@pytest.mark.medium
@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_a_stream_is_held_while_its_server_is_paused(scene, mode) -> None:
    """A client reads a stream whose server is paused in the middle, in each of its ways, and goes
    on: one text, one turn, every id of it sampled once, and nothing recorded while it is paused."""
    text = "The answer is told at length. " * 3 + "Done."
    scene.says(text)
    (whole,) = scene.server.lines
    if mode == "abort":
        scene.server.lines.append(whole[20:])
    scene.server.pause_after(20, mode)
    episode = await scene.open()
    client = openai.AsyncOpenAI(
        base_url=episode["base_url"], api_key=episode["api_key"], max_retries=0
    )
    async with client, httpx.AsyncClient(base_url=scene.server.url) as server:
        messages = [{"role": "user", "content": "go"}]
        asked = {"model": "policy", "messages": messages, "stream": True}
        stream = await client.chat.completions.create(**asked)
        shown, num_sequences = "", 2 if mode == "abort" else 1
        async with asyncio.timeout(20):
            while len(shown) < 15:
                shown += (await anext(stream)).choices[0].delta.content or ""
            while len(scene.server.seen) < num_sequences or not scene.server.paused.done():
                await asyncio.sleep(0.005)
        rest = asyncio.create_task(collect(stream))
        assert sum(len(one.output_ids) for one in scene.server.seen) == 20
        assert not rest.done()
        assert not scene.turns(episode)
        await server.post("/continue_generation", json={})
        assert shown + await rest == text
    assert len(scene.server.seen) == num_sequences
    (turn,) = scene.turns(episode)
    last = scene.server.seen[-1]
    assert [*turn.prompt_ids, *turn.output_ids] == last.prompt_ids + last.output_ids
    assert turn.output_ids.tolist() == whole
    sampled = [*chain(*(one.logprobs for one in scene.server.seen))]
    assert np.array_equal(turn.behavior_logprobs, np.array(sampled, np.float32))
    assert turn.loss_spans == ((0, len(whole)),)


async def collect(stream) -> str:
    """The rest of a stream's text."""
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
