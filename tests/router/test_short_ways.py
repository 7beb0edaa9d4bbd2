"""What is done in fewer steps for nearly every turn comes to the same as the long way."""

import asyncio
import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from outloop.router.dialects.base import Message, TurnRequest
from outloop.router.metrics import RouterMetrics
from outloop.router.turns.sampling import decide

BODY = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
MARKERS = st.sampled_from(
    ["<|im_end|>", "<think>", "</tool_call>", " ", "\n\n", "\u00e9", "e\u0301"]
)


@given(st.lists(st.text(max_size=20) | MARKERS, max_size=8).map("".join))
def test_ids_are_those_of_the_library(model_folder, renderer, text) -> None:
    """Whatever the text, its ids are those that the tokenizer gives with places in the text."""
    library = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    assert renderer.tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("governance", ["enforce", "record"])
@pytest.mark.parametrize("wanted", [None, 1, 40, 90])
def test_who_asks_nothing_gets_what_who_asks_for_just_that_gets(
    make_run, governance, wanted
) -> None:
    """The sampling in force does not depend on how it was found."""
    sampling = {"temperature": 0.7, "max_new_tokens": 50, "governance": governance}
    settings = make_run(sampling=sampling).settings.sampling
    said = (Message("user", "x"),)
    request = TurnRequest(model="m", messages=said, max_new_tokens=wanted, stop=("a",))
    asking = structs.replace(request, asked={"temperature": 0.7})
    for room in (1, 45, 60, 1000):
        found = decide(request, None, settings, room=room)
        assert found == decide(asking, None, settings, room=room)


async def test_an_answer_that_is_made_early_waits_for_its_record(stage) -> None:
    """While Redis writes, the answer's bytes are there and the client has none of them."""
    stage.says("fine", "never said")
    episode = await stage.open()
    append, written = stage.buffer.append_turn, asyncio.Event()
    begun = asyncio.Event()

    async def slow(turn):
        begun.set()
        await written.wait()
        return await append(turn)

    stage.buffer.append_turn = slow
    waiting = asyncio.create_task(stage.post("/v1/chat/completions", BODY, episode["api_key"]))
    await begun.wait()
    (job,) = stage.app.state.parts.service._jobs
    while job.drafted is None:
        await asyncio.sleep(0)
    assert not waiting.done()
    assert not stage.turns(episode)
    written.set()
    assert (await waiting).content == job.drafted

    begun.clear()
    written.clear()
    asked = asyncio.create_task(stage.post("/v1/chat/completions", BODY, episode["api_key"]))
    await begun.wait()
    stage.buffer.closed[episode["episode_id"]] = ("completed", None, "end")
    written.set()
    refused = await asked
    assert refused.status_code == 404
    assert "never said" not in refused.text


@pytest.mark.parametrize("wrong", [-1, 2**31])
async def test_ids_that_no_policy_has_are_no_answer(stage, wrong) -> None:
    """A server that answers them failed, and the turn is drawn again."""
    fine = stage.script("fine")
    scripts = iter([replace(fine, ids=[wrong, *fine.ids]), fine])
    stage.server.answer = lambda request: next(scripts)
    episode = await stage.open()
    answer = await stage.post("/v1/chat/completions", BODY, episode["api_key"])
    assert answer.json()["choices"][0]["message"]["content"] == "fine"
    assert stage.turns(episode)[0].output_ids.tolist() == fine.ids


@pytest.mark.parametrize("missing", [None, 1e39])
async def test_logprobs_that_are_no_numbers_mask_the_turn(stage, missing) -> None:
    """A turn without every logprob, as float32 has it, is recorded and not trained."""
    script = stage.script("fine")
    logprobs = [missing, *itertools.repeat(-0.5, len(script.ids) - 1)]
    stage.server.answer = lambda request: replace(script, logprobs=logprobs)
    episode = await stage.open()
    await stage.post("/v1/chat/completions", BODY, episode["api_key"])
    (turn,) = stage.turns(episode)
    assert (turn.loss_spans, turn.mask_reason) == ((), "behavior_unknown")
    assert not turn.behavior_logprobs.any()


@given(st.lists(st.floats(0, 200) | st.sampled_from([0.005, 0.1, 120.0]), max_size=20))
def test_latencies_are_shown_as_a_histogram(latencies) -> None:
    """Each bucket counts what is at most its bound, and the last one everything."""
    metrics = RouterMetrics()
    for latency in latencies:
        metrics.observe_latency(latency)
    families = text_string_to_metric_families(metrics.exposition().decode())
    (found,) = [family for family in families if family.name == "router_turn_seconds"]
    for sample in found.samples:
        if sample.name.endswith("_bucket"):
            bound = float(sample.labels["le"])
            assert sample.value == sum(latency <= bound for latency in latencies)
        elif sample.name.endswith("_count"):
            assert sample.value == len(latencies)
        else:
            assert sample.value == pytest.approx(sum(latencies))
