"""The runner's and the operator's routes."""

import json

import pytest

from outloop.router.timings import Timings

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


async def register(stage, num_tasks: int = 2) -> None:
    """Training tasks, and one for evaluation."""
    tasks = [{"task_id": f"t{number}", "payload": {"q": number}} for number in range(num_tasks)]
    body = {"tasks": tasks, "eval_tasks": [{"task_id": "e", "payload": {"q": -1}}]}
    assert (await stage.post("/tasks", body)).status_code == 200


async def claim(stage, key: str = "k", count: int = 1, **fields) -> dict:
    """What a runner gets for a claim."""
    answer = await stage.post("/tasks/claim", {"key": key, "count": count, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_claims_open_their_episodes_once(make_stage, stage) -> None:
    """The same key gives the same claims, episodes and keys, also from another router."""
    await register(stage)
    first = await claim(stage, count=9, open=True)
    assert await claim(stage, count=9, open=True) == first
    other = await claim(await make_stage(beside=stage), count=9, open=True)
    for one in (*first["claims"], *other["claims"]):
        # Each router names itself.
        del one["episode"]["base_url"]
    assert other == first
    numbers = [claimed["task"]["payload"]["q"] for claimed in first["claims"]]
    assert numbers == [numbers[0]] * 8 + [1 - numbers[0]]
    assert stage.buffer.reader.stats()["buffer/episodes"] == 9
    episode = first["claims"][1]["episode"]
    stage.says("fine")
    assert (await stage.post("/v1/chat/completions", CHAT, episode["api_key"])).status_code == 200
    assert stage.buffer.load_episode(episode["episode_id"]).opening.attempt == 1


async def test_eval_claims_carry_their_sampling_and_no_group(stage) -> None:
    """What the trainer asked for reaches the episode."""
    await register(stage)
    stage.buffer.reader.request_eval(
        "0:greedy",
        policy_version=0,
        num_episodes=1,
        sampling={"temperature": 0.0},
        blocks_training=True,
    )
    episode = (await claim(stage, open=True))["claims"][0]["episode"]
    opening = stage.buffer.load_episode(episode["episode_id"]).opening
    assert (opening.purpose, opening.group_id, opening.eval_name) == ("eval", None, "0:greedy")
    assert opening.sampling == {"temperature": 0.0}


async def test_claims_wait_for_the_announced_version(make_stage) -> None:
    """503 with Retry-After while nothing serves it; the end of the run is an answer at once."""
    stage = await make_stage(staleness=0, timings=Timings(claim_wait_s=0.05))
    stage.buffer.announce(5)
    await stage.app.state.parts.pool.refresh()
    answer = await stage.post("/tasks/claim", {"key": "k", "count": 1})
    assert answer.status_code == 503
    assert answer.headers["x-should-retry"] == "true"
    stage.buffer.reader.set_run_state("finished")
    await stage.app.state.parts.pool.refresh()
    answer = await stage.post("/tasks/claim", {"key": "k2", "count": 1})
    assert answer.json()["reason"] == "finished"


async def test_a_runner_says_that_it_is_there(stage) -> None:
    """With its claims and heartbeats; what it warns of is kept; without its id it is refused."""
    answer = await stage.post("/runners/heartbeat", {"runner_id": "r1"})
    assert (answer.status_code, answer.json()) == (200, {"max_silence_s": 20.0})
    await stage.post("/runners/heartbeat", {"runner_id": "r1", "warning": "episodes fail"})
    assert stage.buffer.reader.registry.statuses()["runner r1"] == {"warning": "episodes fail"}
    answer = await stage.post("/runners/heartbeat", {})
    assert (answer.status_code, answer.headers["x-should-retry"]) == (400, "false")
    assert "runner_id" in answer.json()["error"]["message"]


async def test_pause_gives_out_nothing(stage) -> None:
    """An operator can hold back new episodes."""
    await register(stage)
    await stage.post("/pause", {}, "ol-admin-x")
    answer = await claim(stage)
    assert (answer["claims"], answer["reason"]) == ([], "paused")
    await stage.post("/resume", {}, "ol-admin-x")
    (claimed,) = (await claim(stage))["claims"]
    assert claimed["episode"] is None


async def test_a_claimed_episode_knows_its_source(stage) -> None:
    """Which list of tasks it is from, for metrics by source."""
    tasks = [{"task_id": name, "payload": {"q": name}} for name in ("easy", "hard")]
    sources = [{"name": f"{name}.jsonl", "num_tasks": 1} for name in ("easy", "hard")]
    assert (await stage.post("/tasks", {"tasks": tasks, "sources": sources})).status_code == 200
    found = {}
    for claimed in (await claim(stage, count=16, open=True))["claims"]:
        episode = await stage.get(f"/episodes/{claimed['episode']['episode_id']}")
        metadata = episode.json()["opening"]["metadata"]
        found[claimed["task"]["task_id"]] = metadata["source"]
    assert found
    assert all(source == f"{task_id}.jsonl" for task_id, source in found.items())


async def test_a_claimed_episode_keeps_what_its_teacher_sees(make_stage) -> None:
    """The text of the task's field, with the episode; agents are not shown it by the router."""
    stage = await make_stage(
        trainer={"recipe": "distill", "teacher": {"context_key": "hint"}},
        model={"max_context_tokens": 2048},
    )
    tasks = [
        {"task_id": "a", "payload": {"q": "2+2", "hint": "4"}},
        {"task_id": "b", "payload": {"q": "3+3"}},
    ]
    assert (await stage.post("/tasks", {"tasks": tasks})).status_code == 200
    found = {}
    for claimed in (await claim(stage, count=16, open=True))["claims"]:
        episode = await stage.get(f"/episodes/{claimed['episode']['episode_id']}")
        found[claimed["task"]["task_id"]] = episode.json()["opening"]["metadata"]
    assert found == {"a": {"teacher_context": "4"}, "b": {}}


async def test_a_claim_whose_group_sealed_meanwhile_is_left_out(stage) -> None:
    """The others of the batch are opened and given out."""
    await register(stage)
    lost, kept = (await claim(stage, count=9))["claims"][::8]
    close = {"outcome": "completed", "key": "c", "reward": {"value": 1.0}}
    task_id = lost["task"]["task_id"]
    for attempt in range(8):
        episode = await stage.open(task_id=task_id, group_id=lost["group_id"], attempt=attempt)
        await stage.post(f"/episodes/{episode['episode_id']}/close", close)
    answer = await claim(stage, count=9, open=True)
    assert [claimed["group_id"] for claimed in answer["claims"]] == [kept["group_id"]]


async def test_an_episode_can_be_read_scored_and_closed_once(stage) -> None:
    """Turns with ids, the reward, and a close that may be repeated."""
    episode = await stage.open(metadata={"a": "b"})
    stage.says("fine")
    await stage.post("/v1/chat/completions", CHAT, episode["api_key"])
    path = f"/episodes/{episode['episode_id']}"
    reward = {"value": 0.5, "components": {"exact": 1.0}}
    assert (await stage.post(f"{path}/reward", {**reward, "key": "r"})).json() == {}
    close = {"outcome": "completed", "key": "c", "reward": reward}
    expected = {"counted": True, "sealed_group": None}
    for _ in range(2):
        assert (await stage.post(f"{path}/close", close)).json() == expected
    read = (await stage.get(path)).json()
    assert read["opening"]["metadata"] == {"a": "b"}
    assert read["outcome"] == "completed"
    assert read["reward"] == {
        **reward,
        "turns": {},
        "branches": {},
        "tokens": [],
        "answer": "",
    }
    (turn,) = read["turns"]
    assert len(turn["output_ids"]) == len(turn["behavior_logprobs"])
    late = await stage.post(f"{path}/close", {**close, "key": "other"})
    assert late.status_code == 410


@pytest.mark.medium
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ("{", None),
        ("[]", None),
        ("\ufffd".encode()[:1], None),
        ("{}", None),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"stop": [""]}, "stop"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": "all"}, "tools"),
    ],
)
async def test_impossible_bodies_get_the_envelope(stage, body, param: str | None) -> None:
    """A 400 that names the parameter, never a 500, and nothing reaches a server."""
    episode = await stage.open()
    if isinstance(body, dict):
        body = json.dumps({**CHAT, **body})
    answer = await stage.http.post(
        "/v1/chat/completions",
        content=body,
        headers={"Authorization": f"Bearer {episode['api_key']}"},
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert answer.headers["x-should-retry"] == "false"
    if param is not None:
        assert error["param"] == param
    assert not stage.server.requests


async def test_unknown_fields_and_other_tools_are_ignored(stage) -> None:
    """As OpenAI-compatible servers do."""
    stage.says("fine")
    episode = await stage.open()
    body = {
        **CHAT,
        "tools": [{"type": "web_search"}, {"type": "custom", "custom": {}}],
        "reasoning_effort": "high",
        "metadata": {"x": 1},
        "parallel_tool_calls": None,
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "hi"}], "cache": {}},
        ],
    }
    answer = await stage.post("/v1/chat/completions", body, episode["api_key"])
    assert answer.status_code == 200
    prompt = stage.renderer.tokenizer.decode(stage.server.requests[0]["input_ids"])
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert "# Tools" not in prompt


async def test_a_lost_buffer_is_a_retryable_error_and_nothing_is_acknowledged(make_stage) -> None:
    """A turn that cannot be recorded is not answered with 2xx."""
    stage = await make_stage(router={"buffer_timeout_s": 0.1})
    stage.says("fine", "again")
    episode = await stage.open()
    await stage.post("/v1/chat/completions", CHAT, episode["api_key"])
    stage.buffer.twin.is_away = True
    answer = await stage.post("/v1/chat/completions", CHAT, episode["api_key"])
    assert answer.status_code == 503
    assert answer.headers["x-should-retry"] == "true"
    stage.buffer.twin.is_away = False
    assert len(stage.turns(episode)) == 1


async def test_other_routes_and_methods_get_the_envelope(stage) -> None:
    """Also what is not served is answered in one form."""
    episode = await stage.open()
    for method, path in (("GET", "/nowhere"), ("GET", "/v1/chat/completions")):
        answer = await stage.http.request(
            method, path, headers={"Authorization": f"Bearer {episode['api_key']}"}
        )
        assert answer.status_code in (404, 405)
        expected = "not_found_error" if answer.status_code == 404 else "invalid_request_error"
        assert answer.json()["error"]["type"] == expected


async def test_tasks_are_registered_once(stage) -> None:
    """Other content under the same run is refused for good."""
    body = {"tasks": [{"task_id": "a", "payload": {}}], "eval_tasks": []}
    for _ in range(2):
        answer = await stage.post("/tasks", body)
        assert answer.json() == {"num_tasks": 1, "num_eval_tasks": 0}
    body["tasks"][0]["payload"] = {"x": 1}
    answer = await stage.post("/tasks", body)
    assert answer.status_code == 422
    assert answer.headers["x-should-retry"] == "false"


async def test_a_close_that_is_refused_closes_nothing(stage) -> None:
    """Its key is no key: the episode stays open here as it does for every other router."""
    stage.server.answer = lambda request: stage.script("fine")
    episode = await stage.open()
    path = f"/episodes/{episode['episode_id']}/close"
    refused = await stage.post(path, {"outcome": "completed", "key": ""})
    assert refused.status_code == 400
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    answer = await stage.post("/v1/chat/completions", body, episode["api_key"])
    assert answer.status_code == 200, answer.text
