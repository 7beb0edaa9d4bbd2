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


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("kind", "mode", "versions", "spans"),
    [
        # Prefilled by version 0, held without a token, and sampled by version 1.
        ("sglang", "in_place", [1], [(0, 0, 0), (1, 0, None)]),
        # Some tokens before the publish: the first of them says by what it was prefilled.
        ("sglang", "in_place", [0, 1], [(0, 0, 1), (1, 1, None)]),
        ("sglang", "in_place", [0], [(0, 0, None)]),
        # Its keys and values were computed again, or the server says it itself.
        ("sglang", None, [1], [(1, 0, None)]),
        ("sglang", "retract", [1], [(1, 0, None)]),
        ("torch", None, [1], [(1, 0, None)]),
    ],
)
async def test_a_turn_held_in_place_has_the_version_that_prefilled_it(
    make_stage, kind, mode, versions, spans, is_streamed
) -> None:
    """A turn counts as old as the keys and values that it attended to."""
    publish = {} if mode is None else {"publish": {"mode": mode}}
    stage = await make_stage(server={"kind": kind}, **publish)
    stage.buffer.serve(stage.server.url, kind=kind)
    await stage.app.state.parts.pool.refresh()
    script = stage.script("fine")
    size = len(script.ids)
    ends = [1, size] if len(versions) == 2 else [size]
    stated = [
        {"version": str(version), "start": 0 if index == 0 else 1, "end": end}
        for index, (version, end) in enumerate(zip(versions, ends, strict=True))
    ]
    stage.server.answer = lambda request: replace(script, spans=stated)
    episode = await stage.open()
    body = BODY | ({"stream": True} if is_streamed else {})
    answer = await stage.post("/v1/chat/completions", body, episode["api_key"])
    assert answer.status_code == 200
    assert stage.server.requests[-1]["extra_key"] == "0"
    (turn,) = stage.turns(episode)
    wanted = [(version, start, size if end is None else end) for version, start, end in spans]
    assert [(s.policy_version, s.start, s.end) for s in turn.version_spans] == wanted
    oldest, newest = turn.trained_version_bounds
    assert (oldest, newest) == (min(spans)[0], versions[-1])
