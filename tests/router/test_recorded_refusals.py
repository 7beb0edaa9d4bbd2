"""Refused model calls in the record of their episode."""

import pytest
from msgspec import json

from outloop.buffer.records import NO_REFUSALS
from outloop.buffer.trajectories.ended import EndedEpisode, Entry
from outloop.buffer.trajectories.tables import Decoder, refusals_of, tables_of

HI = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
LONG = {"model": "policy", "messages": [{"role": "user", "content": "word " * 5000}]}
REFUSED = {
    "context_length_exceeded": ("/v1/chat/completions", LONG),
    "unsupported_content": ("/v1/responses", {**HI, "input": [{"type": "image"}]}),
    "invalid_value": ("/v1/chat/completions", {**HI, "messages": []}),
    "model_not_found": ("/v1/messages", {**HI, "model": "gpt-5", "max_tokens": 8}),
    "unsupported_parameter": ("/v1/chat/completions", {**HI, "functions": [{"name": "f"}]}),
}


async def recorded(stage, episode) -> dict:
    """What the episode's record says of refusals."""
    return (await stage.get(f"/episodes/{episode['episode_id']}")).json()["refusals"]


@pytest.mark.parametrize("code", REFUSED)
async def test_a_refused_call_is_counted_by_its_code(stage, code) -> None:
    """Also its sentence is kept."""
    path, body = REFUSED[code]
    episode = await stage.open()
    for _ in range(2):
        answer = await stage.post(path, body, episode["api_key"])
        assert answer.status_code < 500
    told = answer.json()["error"]["message"]
    assert await recorded(stage, episode) == {"counts": {code: 2}, "last": told[:500]}


async def test_refusals_of_several_processes_are_added(make_stage) -> None:
    """The last sentence stays, and a call that is served changes nothing."""
    one = await make_stage()
    two = await make_stage(beside=one)
    one.says("yes")
    episode = await one.open()
    for stage, code in [(one, "invalid_value"), (two, "invalid_value"), (two, "model_not_found")]:
        path, body = REFUSED[code]
        await stage.post(path, body, episode["api_key"])
    assert (await one.post("/v1/chat/completions", HI, episode["api_key"])).status_code == 200
    found = await recorded(two, episode)
    assert found["counts"] == {"invalid_value": 2, "model_not_found": 1}
    assert "gpt-5" in found["last"]


async def test_a_call_that_may_be_repeated_is_not_counted(make_stage) -> None:
    """Its client is told to come back."""
    stage = await make_stage()
    episode = await stage.open()
    await stage.app.state.parts.service.drain(0)
    answer = await stage.post("/v1/chat/completions", HI, episode["api_key"])
    assert answer.status_code == 503
    assert await recorded(stage, episode) == {"counts": {}, "last": ""}


async def test_refusals_stay_with_a_closed_episode(stage) -> None:
    """The trainer, the archive and whoever reads the record find them; none is added."""
    episode = await stage.open()
    path, body = REFUSED["context_length_exceeded"]
    await stage.post(path, body, episode["api_key"])
    close = {"outcome": "completed", "reward": {"value": 0.0}, "key": "c"}
    for _ in range(2):
        answer = await stage.post(f"/episodes/{episode['episode_id']}/close", close)
        assert answer.status_code == 200
        await stage.post(path, body, episode["api_key"])
    loaded = stage.buffer.load_episode(episode["episode_id"])
    assert loaded.refusals.counts == {"context_length_exceeded": 1}
    entry = Entry(episode["episode_id"], "trained", "", 0, 0, 0, 1, 0)
    archived, _ = tables_of(
        [EndedEpisode(entry=entry, episode=loaded, closed_at=0.0)], Decoder(None)
    )
    (row,) = archived.to_pylist()
    assert refusals_of(row) == loaded.refusals
    assert refusals_of({**row, "refusals": None}) == NO_REFUSALS
    assert json.decode(row["refusals"])["last"].startswith("prompt is too long")


async def test_a_router_goes_on_when_redis_has_lost_an_episode(stage) -> None:
    """A Redis that came back without its last writes: the turn is refused, others are answered."""
    stage.says(*["yes"] * 4)
    lost, other = await stage.open(), await stage.open()
    assert (await stage.post("/v1/chat/completions", HI, lost["api_key"])).status_code == 200
    client = stage.buffer.twin.client()
    for name in client.scan_iter(f"*episode:{lost['episode_id']}*"):
        client.delete(name)
    for _ in range(2):
        answer = await stage.post("/v1/chat/completions", HI, lost["api_key"])
        assert answer.status_code == 404
    assert (await stage.post("/v1/chat/completions", HI, other["api_key"])).status_code == 200
    assert stage.app.state.parts.service.num_running == 0
