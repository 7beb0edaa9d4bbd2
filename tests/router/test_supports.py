"""Among which ids a server sampled is recorded with the turn, where that was not all of them."""

from dataclasses import replace

import pytest

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
MESSAGES = [{"role": "user", "content": "hi"}]
CUT = {"top_p": 0.9, "max_support_ids": 4}


def with_supports(script):
    """Each token among two ids more; the third of too many."""
    left = [[token, 3, 5][: 1 + index % 3] for index, token in enumerate(script.ids)]
    left[2] = list(range(5))
    left[2][0] = script.ids[2]
    return replace(script, supports=left)


async def ask(stage, episode, **fields):
    """One chat completion."""
    body = {"model": "policy", "messages": MESSAGES, **fields}
    answer = await stage.post("/v1/chat/completions", body, episode["api_key"])
    assert answer.status_code == 200, answer.text
    return answer


def assert_recorded(stage, episode, script) -> None:
    """Ids and logprobs of each token but the third, which is not trained."""
    (turn,) = stage.turns(episode)
    left = list(script.supports)
    left[2] = []
    assert turn.support.lists() == left
    logprobs = [-0.5 * len(ids) for ids in script.supports]
    assert turn.behavior_logprobs.tolist() == logprobs
    assert turn.loss_spans == ((0, 2), (3, len(script.ids)))
    assert turn.mask_reason == "support_unknown"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_cumulative", [False, True])
async def test_what_was_left_is_recorded(make_stage, stream: bool, is_cumulative: bool) -> None:
    """In whole and streamed answers; a token that had more than the run records has no loss."""
    stage = await make_stage(sampling=CUT)
    script = with_supports(stage.script("Hello there"))
    stage.server.answer = lambda request: script
    stage.server.is_cumulative = is_cumulative
    episode = await stage.open()
    await ask(stage, episode, stream=stream)
    (request,) = stage.server.requests
    assert request["return_sampling_mask"] is True
    assert request["sampling_params"]["top_p"] == 0.9
    assert_recorded(stage, episode, script)


async def test_what_two_servers_left_is_joined(make_stage) -> None:
    """A turn that was aborted half-way and goes on."""
    stage = await make_stage(sampling=CUT)
    whole = with_supports(stage.script("Hello there, my old friend."))
    first = replace(whole, ids=whole.ids[:5], supports=whole.supports[:5])
    first = replace(first, finish={"type": "abort", "message": "x"})
    scripts = iter([first, replace(whole, ids=whole.ids[5:], supports=whole.supports[5:])])
    stage.server.answer = lambda request: next(scripts)
    episode = await stage.open()
    await ask(stage, episode)
    assert_recorded(stage, episode, whole)


async def test_a_server_that_does_not_tell_leaves_the_turn_untrained(make_stage) -> None:
    """As before: the distribution cannot be rebuilt."""
    stage = await make_stage(sampling=CUT)
    stage.says("fine")
    episode = await stage.open()
    await ask(stage, episode)
    (turn,) = stage.turns(episode)
    assert (turn.support, turn.loss_spans, turn.mask_reason) == (None, (), "behavior_unknown")


async def test_a_grammars_answer_is_trained_over_what_it_left(make_stage) -> None:
    """A schema of the client's; a turn that is never trained is not asked about."""
    stage = await make_stage()
    script = with_supports(stage.script('{"n": 1}'))
    stage.server.answer = lambda request: script
    episode = await stage.open()
    await ask(stage, episode, response_format=FORMAT)
    (turn,) = stage.turns(episode)
    assert turn.sampling.constraint
    assert turn.loss_spans == ((0, len(script.ids)),)
    evaluated = await stage.open(purpose="eval", group_id=None)
    await ask(stage, evaluated, response_format=FORMAT)
    await ask(stage, await stage.open())
    asked = [request.get("return_sampling_mask", False) for request in stage.server.requests]
    assert asked == [True, False, False]


async def test_sglang_is_asked_only_with_a_top_k(make_stage) -> None:
    """It refuses others; the same request without one is served, and not trained."""
    server = {"kind": "sglang", "num_servers": 0, "urls": ["http://127.0.0.1:1"]}
    stage = await make_stage(sampling={"governance": "record"}, server=server)
    script = with_supports(stage.script("fine"))
    stage.server.answer = lambda request: script
    episode = await stage.open()
    for top_k in (-1, 1, 5000, 8):
        await ask(stage, episode, top_p=0.9, **({} if top_k < 0 else {"top_k": top_k}))
    asked = [request.get("return_sampling_mask", False) for request in stage.server.requests]
    assert asked == [False, False, False, True]
