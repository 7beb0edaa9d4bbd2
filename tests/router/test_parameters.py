"""Values that no server should be asked to sample with."""

import pytest

from outloop.buffer.codec.records_codec import encode_turn

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
WRONG = (
    {"seed": 2**63},
    {"seed": 10**400},
    {"top_k": 2**31},
    {"top_k": -2},
    {"top_p": 0},
    {"temperature": 2.5},
    {"repetition_penalty": 0},
)


@pytest.mark.parametrize("fields", WRONG)
async def test_an_impossible_value_is_refused_by_name(make_stage, fields: dict) -> None:
    """Also where the client's value would be in force: 400, and no server sees it."""
    stage = await make_stage(sampling={"governance": "record"})
    episode = await stage.open()
    answer = await stage.post("/v1/chat/completions", {**CHAT, **fields}, episode["api_key"])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == next(iter(fields))
    assert not stage.server.requests


@pytest.mark.parametrize(
    ("fields", "sent"),
    [({"seed": -(2**63)}, -(2**63)), ({"top_k": 0}, -1), ({"top_k": 2**31 - 1}, 2**31 - 1)],
)
async def test_a_value_at_its_border_is_used_and_recorded(make_stage, fields, sent) -> None:
    """The extremes reach the server and the record; a top_k of 0 means none."""
    stage = await make_stage(sampling={"governance": "record"})
    stage.says("fine")
    episode = await stage.open()
    answer = await stage.post("/v1/chat/completions", {**CHAT, **fields}, episode["api_key"])
    assert answer.status_code == 200, answer.text
    (name,) = fields
    on_wire = {"seed": "sampling_seed"}.get(name, name)
    assert stage.server.requests[0]["sampling_params"][on_wire] == sent
    (turn,) = stage.turns(episode)
    assert getattr(turn.sampling, name) == sent
    assert encode_turn(turn)


@pytest.mark.parametrize(
    "sampling",
    [
        *({name: value} for one in WRONG[2:] for name, value in one.items()),
        {"max_new_tokens": 0},
        {"top_k": 2.5},
        {"temprature": 0},
    ],
)
async def test_an_evaluation_brings_no_impossible_sampling(stage, sampling: dict) -> None:
    """It is refused when the episode is opened, not at its first turn."""
    body = {"task_id": "t", "purpose": "eval", "deadline_s": 60, "sampling": sampling}
    answer = await stage.post("/episodes", body)
    assert answer.status_code == 400
    assert next(iter(sampling)) in answer.json()["error"]["message"]
