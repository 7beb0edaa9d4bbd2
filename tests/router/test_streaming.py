"""Incremental text."""

import asyncio
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outloop.router.dialects.base import Message, TurnRequest
from outloop.router.episodes.in_flight import InFlightTurn
from outloop.router.rendering.stream_filter import ContentStream, ReasonedStream, Shown

QUICK = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.medium
@QUICK
@given(
    ids=st.lists(st.integers(0, 399), max_size=60), cuts=st.lists(st.integers(1, 5), min_size=60)
)
def test_pieces_concatenate_to_the_whole_text(renderer, ids: list[int], cuts: list[int]) -> None:
    """No character is split and none is lost, except those that stay incomplete at the end."""
    ids = [i for i in ids if i < renderer.tokenizer.vocab_size]
    stream, text, rest = renderer.tokenizer.detokenizer(), "", list(ids)
    for cut in cuts:
        text += stream.add(rest[:cut])
        rest = rest[cut:]
    whole = renderer.tokenizer.decode(ids)
    assert whole.startswith(text)
    assert set(whole[len(text) :]) <= {"\ufffd"}


@QUICK
@given(
    text=st.text(alphabet="ab <to_cal>|\n\u00e9\U0001f600", max_size=40),
    cut=st.integers(1, 7),
    stop=st.sampled_from([(), ("ab",), ("\n\n", "<to")]),
)
def test_nothing_shown_is_ever_taken_back(renderer, text: str, cut: int, stop) -> None:
    """What is shown is a prefix of the final content, stop strings and markers held back."""
    ids = renderer.tokenizer.encode(text)
    stream = ContentStream(renderer.tokenizer, stop)
    for start in range(0, len(ids), cut):
        stream.add(ids[start : start + cut])
    content = text.strip()
    for one in stop:
        content = content.partition(one)[0] if one in text else content
    assert text.lstrip().startswith(stream.shown)
    assert not any(one in stream.shown for one in (*stop, "<tool_call>"))
    assert stream.shown == stream.shown.rstrip()


@pytest.mark.medium
@QUICK
@given(
    text=st.text(alphabet="ab \n\u00e9<", max_size=30),
    begin=st.sampled_from(["", "<think>", "\n<think>\n", "a<think>"]),
    middle=st.sampled_from(["", "</think>", "\n</think>\n\n", "<tool_call>"]),
    rest=st.text(alphabet="ab \n<\u00e9", max_size=20),
    cut=st.integers(1, 5),
)
def test_reasoning_and_text_are_shown_as_they_are_parsed(
    renderer, text: str, begin: str, middle: str, rest: str, cut: int
) -> None:
    """What is shown of either is a prefix of what the finished ids say."""
    ids = renderer.tokenizer.encode(begin + text + middle + rest)
    stream = ReasonedStream(
        renderer.tokenizer, (), renderer.reasoning_ids, begins_in_reasoning=False
    )
    pieces = [stream.add(ids[start : start + cut]) for start in range(0, len(ids), cut)]
    reasoning = "".join(piece.reasoning for piece in pieces)
    shown = "".join(piece.text for piece in pieces)
    parsed = renderer.parse(ids, prompt_ids=[], tools=(), call_prefix="").message
    assert parsed.reasoning.startswith(reasoning)
    assert parsed.text.startswith(shown)
    if "<think>" in begin and begin[0] != "a" and "</think>" in middle:
        assert reasoning == parsed.reasoning == text.strip()


@pytest.mark.medium
async def test_the_first_delta_comes_before_generation_ends(stage) -> None:
    """Streaming is real: text arrives while the server still generates."""
    stage.server.step_gate = asyncio.Event()
    stage.says("Hello there, this is long.")
    episode = await stage.open()
    client = await stage.client(episode)
    chunks = await client.chat.completions.create(
        model="policy",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    text = ""
    async for chunk in chunks:
        if chunk.choices and chunk.choices[0].delta.content:
            text += chunk.choices[0].delta.content
            # The server waits for us after its first piece: nothing can be over yet.
            assert stage.server.step_gate.is_set() or not stage.turns(episode)
            stage.server.step_gate.set()
        usage = chunk.usage
    assert text == "Hello there, this is long."
    assert usage.completion_tokens == len(stage.turns(episode)[0].output_ids)


async def test_a_turn_is_recorded_before_its_last_chunk(stage) -> None:
    """The finish reason reaches the client only after the buffer has the turn."""
    stage.says("Hello.")
    episode = await stage.open()
    client = await stage.client(episode)
    async for chunk in await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "hi"}], stream=True
    ):
        if chunk.choices[0].finish_reason:
            assert len(stage.turns(episode)) == 1


async def test_a_stop_string_ends_the_answer_but_stays_in_the_ids(stage) -> None:
    """The client sees the text before it; the token that completes it is recorded and trained."""
    script = stage.script("The sum\nObservation: 4")
    script.ids = script.ids[:-1]
    script.finish = {"type": "stop", "matched": "Observation:"}
    stage.server.answer = lambda request: script
    episode = await stage.open()
    client = await stage.client(episode)
    options = {
        "model": "policy",
        "messages": [{"role": "user", "content": "hi"}],
        "stop": ["Observation:"],
    }
    plain = await client.chat.completions.create(**options)
    assert plain.choices[0].message.content == "The sum"
    text = ""
    async for chunk in await client.chat.completions.create(**options, stream=True):
        text += chunk.choices[0].delta.content or ""
    assert text == "The sum"
    assert stage.server.requests[0]["sampling_params"]["stop"] == ["Observation:"]
    assert stage.turns(episode)[0].loss_spans == ((0, len(script.ids)),)


async def test_a_long_stream_that_is_there_already_lets_others_go_on(stage) -> None:
    """All of it may be handed on at once to a retry: others have their turns between its pieces."""
    request = TurnRequest(model="policy", messages=(Message("user", "x"),))
    episode = stage.app.state.parts.episodes.unkeyed()
    turn = InFlightTurn(episode, request, "key", is_retry=False)
    turn.turn_ids = ("t",)
    for _ in range(10_000):
        turn.show(0, Shown(text="x"))
    turn.finish(())
    num_given, seen = 0, []

    async def others() -> None:
        while num_given < 10_000:
            seen.append(num_given)
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    async for _ in turn.stream(silence_s=60.0):
        num_given += 1
    await task
    assert max(after - before for before, after in pairwise([*seen, 10_000])) <= 2_000
