"""What is particular to `/v1/completions`: text and ids without a chat format."""

import random

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes.fake_server import Script
from outloop.router.rendering.stream_filter import RawStream

PIECES = (
    "The sum ",
    "is <tool_call>",
    " 84.\n",
    "caf\u00e9 \u4e2d",
    "<|im_end|>",
    " ",
    "\U0001f600",
)


@pytest.fixture
async def client(stage):
    """The unmodified client of an episode, which it carries along."""
    episode = await stage.open()
    client = await stage.client(episode, max_retries=0)
    client.episode = episode
    return client


async def complete(client, prompt, *, stream: bool, **options) -> str:
    """The text of one completion."""
    answer = await client.completions.create(
        model="policy", prompt=prompt, stream=stream, **options
    )
    if not stream:
        return answer.choices[0].text
    return "".join([chunk.choices[0].text async for chunk in answer])


@pytest.mark.parametrize("as_ids", [False, True])
async def test_a_prompt_that_goes_on_is_one_exact_branch(stage, client, as_ids: bool) -> None:
    """Text or ids: what begins with a recorded turn continues its ids."""
    rng = random.Random(5)
    encode, stop = stage.renderer.tokenizer.encode, stage.renderer.stop_ids[0]
    prompt: str | list[int] = encode("Q: 12 * 7?\n") if as_ids else "Q: 12 * 7?\n"
    for number in range(12):
        ids = [i for _ in range(3) for i in encode(rng.choice(PIECES)) if i != stop]
        script = Script(ids=ids, finish={"type": "length"})
        stage.server.answer = lambda request, script=script: script
        stage.server.chunk = 2
        text = await complete(client, prompt, stream=number % 2 == 0)
        assert text == stage.renderer.tokenizer.decode(ids)
        more = rng.choice(PIECES)
        prompt = [*prompt, *ids, *encode(more)] if as_ids else prompt + text + more
    turns, path = stage.turns(client.episode), []
    for turn, request in zip(turns, stage.server.requests, strict=True):
        path += turn.prompt_ids.tolist()
        assert path == request["input_ids"]
        path += turn.output_ids.tolist()
        assert turn.loss_spans == ((0, len(turn.output_ids)),)
    assert [turn.branch_cause for turn in turns] == ["root", *["extension"] * 11]


async def test_a_stop_string_is_cut_and_may_be_put_back(stage, client) -> None:
    """A client that goes on with the stop string itself continues the same ids."""
    script = stage.script("Thought\nObservation:")
    script.ids, script.finish = script.ids[:-1], {"type": "stop", "matched": "Observation:"}
    stage.server.answer = lambda request: script
    for stream in (False, True):
        text = await complete(client, f"Go{stream}: ", stream=stream, stop="Observation:")
        assert text == "Thought\n"
        prompt = f"Go{stream}: {text}Observation: 4\n"
        await complete(client, prompt, stream=stream)
        first, second = stage.turns(client.episode)[-2:]
        assert second.parent_turn_id == first.turn_id
        assert stage.renderer.tokenizer.decode(second.prompt_ids.tolist()) == " 4\n"


async def test_choices_logprobs_and_usage(stage, client) -> None:
    """n choices share the prompt; the stop id is counted, its text is not shown."""
    stage.server.answer = lambda request: stage.script("fine")
    answer = await client.completions.create(
        model="policy", prompt=["hi"], n=2, best_of=2, logprobs=0
    )
    turns = stage.turns(client.episode)
    assert [choice.text for choice in answer.choices] == ["fine", "fine"]
    assert answer.choices[0].finish_reason == "stop"
    assert len(answer.choices[1].logprobs.tokens) == len(turns[1].output_ids)
    assert answer.usage.prompt_tokens == len(turns[0].prompt_ids)
    assert answer.usage.completion_tokens == sum(len(turn.output_ids) for turn in turns)
    chunks = await client.completions.create(
        model="policy", prompt="hi", n=2, stream=True, stream_options={"include_usage": True}
    )
    texts, usage = ["", ""], None
    async for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
        usage = chunk.usage or usage
    assert texts == ["fine", "fine"]
    assert usage.total_tokens == answer.usage.total_tokens


async def test_a_retry_gets_the_recorded_turn(stage, client) -> None:
    """Also from a router that has forgotten it, and a raw turn is not taken for a chat."""
    stage.says("one", "two", "three", "four")
    options = {"model": "policy", "prompt": "hi"}
    assert (await client.completions.create(**options)).choices[0].text == "one"
    stage.app.state.parts.episodes.known(client.episode["episode_id"]).turns.clear()
    retry = {"x-stainless-retry-count": "1"}
    again = await client.completions.create(**options, extra_headers=retry)
    assert again.choices[0].text == "one"
    assert (await client.completions.create(**options)).choices[0].text == "two"
    history = [{"role": "assistant", "content": "one"}, {"role": "user", "content": "go"}]
    await client.chat.completions.create(model="policy", messages=history)
    assert stage.turns(client.episode)[-1].parent_turn_id is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"n": 0}, "n"),
        ({"stop": [""]}, "stop"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(stage, client, fields: dict, param: str) -> None:
    """400 with the parameter; an id that no server has never reaches one."""
    with pytest.raises(openai.BadRequestError) as caught:
        await client.post(
            "/completions", body={"model": "policy", "prompt": "hi", **fields}, cast_to=object
        )
    assert caught.value.param == param
    assert not stage.server.requests


@pytest.mark.medium
@given(
    text=st.text(alphabet="ab <to|\n\u00e9\U0001f600", max_size=40),
    cut=st.integers(1, 7),
    stop=st.sampled_from([(), ("ab",), ("\n\n", "<to")]),
)
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_raw_text_is_shown_up_to_its_stop(renderer, text: str, cut: int, stop) -> None:
    """What is shown is a prefix of the text before the first stop, and all of it without one."""
    ids, shown = renderer.tokenizer.encode(text), ""
    stream = RawStream(renderer.tokenizer, stop, renderer.stop_ids)
    for start in range(0, len(ids), cut):
        shown += stream.add(ids[start : start + cut]).text
    first = min((text.find(one) for one in stop if one in text), default=len(text))
    assert text[:first].startswith(shown)
    assert stop or shown == text
