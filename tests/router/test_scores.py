"""Scores of single turns and branches, and what an agent program wrote."""

import pytest

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def recording(make_stage):
    """A router whose run keeps scores of single turns."""
    return await make_stage(env={"turn_scores": "record"})


@pytest.mark.parametrize("route", ["reward", "close"])
async def test_turns_are_scored_by_the_id_of_their_answer(recording, route: str) -> None:
    """What an agent knows of a turn, its answer's id, names the recorded turn."""
    episode = await recording.open()
    recording.says("one", "two")
    client = await recording.client(episode)
    first = await client.chat.completions.create(**CHAT)
    second = await client.responses.create(model="policy", input="hello")
    ids = [turn.turn_id for turn in recording.turns(episode)]
    scores = {
        "value": 0.5,
        "components": {"form": 1.0},
        "turns": {first.id: 0.25, ids[1]: -1.0},
        "branches": {second.id: 2.0},
        "tokens": [{"turn": first.id, "start": 0, "end": 1, "value": -0.5}],
    }
    body = {**scores, "key": "k"}
    if route == "close":
        body = {"outcome": "completed", "reward": scores, "output": "said\n", "key": "k"}
    answer = await recording.post(f"/episodes/{episode['episode_id']}/{route}", body)
    assert answer.status_code == 200, answer.text
    reward = (await recording.get(f"/episodes/{episode['episode_id']}")).json()["reward"]
    assert reward == {
        "value": 0.5,
        "components": {"form": 1.0},
        "turns": {ids[0]: 0.25, ids[1]: -1.0},
        "branches": {ids[1]: 2.0},
        "tokens": [{"turn_id": ids[0], "start": 0, "end": 1, "value": -0.5}],
        "answer": "",
    }


def span(turn: str, start: int, end: int) -> dict:
    """A score of some tokens of an answer."""
    return {"turn": turn, "start": start, "end": end, "value": 1.0}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("scores", "words"),
    [
        (lambda first, last: {"turns": {"chatcmpl-none": 1.0}}, "is none of the 2 turns"),
        (lambda first, last: {"tokens": [span("none", 0, 1)]}, "is none of the 2 turns"),
        (lambda first, last: {"branches": {first: 1.0}}, "was continued; name the last turn"),
        (lambda first, last: {"tokens": [span(last, 0, 99)]}, "0..99 of 'chatcmpl-"),
        (
            lambda first, last: {"tokens": [span(last, 0, 2), span(last, 1, 2)]},
            "0..2 and 1..2 of turn",
        ),
        (
            lambda first, last: {"turns": {last: 1.0, last.removeprefix("chatcmpl-"): 2.0}},
            "scored under another of its names too",
        ),
    ],
)
async def test_a_score_of_what_the_episode_does_not_have_is_refused(
    recording, scores, words: str
) -> None:
    """A typing error is not stored as a score of nothing, and nothing of it is stored."""
    episode = await recording.open()
    recording.says("one", "two")
    client = await recording.client(episode)
    first = await client.chat.completions.create(**CHAT)
    said = {"role": "assistant", "content": first.choices[0].message.content}
    again = {"role": "user", "content": "go on"}
    last = await client.chat.completions.create(
        model="policy", messages=[*CHAT["messages"], said, again]
    )
    body = {"value": 1.0, "key": "k", **scores(first.id, last.id)}
    answer = await recording.post(f"/episodes/{episode['episode_id']}/reward", body)
    assert answer.status_code in (400, 422), answer.text
    assert words in answer.json()["error"]["message"]
    found = (await recording.get(f"/episodes/{episode['episode_id']}")).json()
    assert found["reward"] is None


@pytest.mark.parametrize("part", [{"turns": {"chatcmpl-x": 1.0}}, {"tokens": [span("x", 0, 1)]}])
async def test_scores_that_nothing_is_trained_by_are_refused(stage, part: dict) -> None:
    """Unless the run says that they are kept for reading only, or trains by them."""
    episode = await stage.open()
    body = {"value": 1.0, "key": "k", **part}
    answer = await stage.post(f"/episodes/{episode['episode_id']}/reward", body)
    assert answer.status_code == 422
    assert 'env.turn_scores="record"' in answer.json()["error"]["message"]


@pytest.mark.parametrize("route", ["reward", "close"])
async def test_scores_of_an_unknown_episode_are_not_found(recording, route: str) -> None:
    """As a number alone for it is."""
    for part in ({}, {"turns": {"chatcmpl-x": 1.0}}):
        body = {"value": 1.0, "key": "k", **part}
        if route == "close":
            body = {"outcome": "completed", "key": "k", "reward": {"value": 1.0, **part}}
        answer = await recording.post(f"/episodes/nobody/{route}", body)
        assert answer.status_code == 404, answer.text
        assert "nobody" in answer.json()["error"]["message"]


async def test_the_end_of_an_agents_output_is_stored(stage) -> None:
    """At most 8,192 characters of it, the last ones."""
    episode = await stage.open()
    body = {
        "outcome": "failed",
        "failure_kind": "agent",
        "error": "exit code 1",
        "output": "x" * 9000 + "end",
        "key": "k",
    }
    await stage.post(f"/episodes/{episode['episode_id']}/close", body)
    found = (await stage.get(f"/episodes/{episode['episode_id']}")).json()
    assert (found["error"], found["failure_kind"]) == ("exit code 1", "agent")
    assert found["output"] == "x" * 8189 + "end"
