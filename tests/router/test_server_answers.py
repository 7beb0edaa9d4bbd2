"""Answers of servers that are no turn, or none to be trained."""

import itertools
from dataclasses import replace

import pytest

BODY = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("wrong", [-1, 2**31])
async def test_ids_that_no_policy_has_are_no_answer(stage, wrong) -> None:
    """A server that answers them failed, and the turn is sampled again."""
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
