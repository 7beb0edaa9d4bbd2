"""Keys open what they are for, and nothing else."""

import tracemalloc

import pytest

from outloop.router.auth import KeyRing

BODY = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}

ADMIN = {"/status", "/servers", "/pause", "/resume", "/policy_version"}
OPEN = {"/health", "/ready", "/metrics"}


def assert_final(answer, status: int, code: str) -> None:
    """The refusal is one that no SDK retries."""
    assert answer.status_code == status, answer.text
    assert answer.headers["x-should-retry"] == "false"
    assert answer.json()["error"]["code"] == code


@pytest.mark.medium
@pytest.mark.parametrize("key", ["", "sk-other", "ol-ep-x-abc", "ol-runner-x", "ol-ep-\u00e9-1"])
async def test_other_keys_open_no_episode(stage, key: str) -> None:
    """Missing, foreign, forged and runner keys are refused for good."""
    answer = await stage.http.post(
        "/v1/chat/completions",
        json=BODY,
        headers={"Authorization": f"Bearer {key}".strip().encode()},
    )
    assert_final(answer, 401, "invalid_api_key")


async def test_a_key_opens_its_own_episode_only(stage) -> None:
    """By path, the key must be that episode's."""
    one, other = await stage.open(), await stage.open()
    stage.says("fine")
    path = f"/episodes/{one['episode_id']}/v1/chat/completions"
    assert (await stage.post(path, BODY, one["api_key"])).status_code == 200
    assert_final(await stage.post(path, BODY, other["api_key"]), 401, "wrong_episode")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("post", "/tasks"),
        ("post", "/tasks/claim"),
        ("post", "/runners/heartbeat"),
        ("post", "/episodes"),
        ("get", "/episodes/EPISODE"),
        ("post", "/episodes/EPISODE/reward"),
        ("post", "/episodes/EPISODE/close"),
        ("post", "/trajectories"),
        ("get", "/status"),
        ("get", "/servers"),
        ("post", "/pause"),
        ("post", "/resume"),
        ("get", "/policy_version"),
    ],
)
async def test_an_episode_key_controls_nothing(stage, method: str, path: str) -> None:
    """An agent with a shell cannot score itself, open episodes or read others."""
    episode = await stage.open()
    url = path.replace("EPISODE", episode["episode_id"])
    answer = await stage.http.request(
        method, url, json={}, headers={"Authorization": f"Bearer {episode['api_key']}"}
    )
    assert_final(answer, 401, "invalid_api_key")


async def test_a_closed_episode_is_refused_for_good(stage) -> None:
    """Also by another router process."""
    episode = await stage.open()
    await stage.post(
        f"/episodes/{episode['episode_id']}/close", {"outcome": "completed", "key": "c"}
    )
    answer = await stage.post("/v1/chat/completions", BODY, episode["api_key"])
    assert_final(answer, 404, "episode_closed")


async def test_an_episode_closed_elsewhere_is_refused_for_good(make_stage, stage) -> None:
    """The buffer knows better than this process; its answer is final too."""
    episode = await stage.open()
    stage.says("fine", "fine")
    other = await make_stage(beside=stage)
    close = {"outcome": "completed", "key": "c"}
    await other.post(f"/episodes/{episode['episode_id']}/close", close)
    for _ in range(2):
        answer = await stage.post("/v1/chat/completions", BODY, episode["api_key"])
        assert_final(answer, 404, "episode_closed")


async def test_an_unknown_episode_is_refused_for_good(stage) -> None:
    """A validly signed key of an episode that was never opened."""
    key = KeyRing(stage.run.keys).episode_key("ep-never-opened")
    answer = await stage.post("/v1/chat/completions", BODY, key)
    assert_final(answer, 404, "episode_not_found")


async def test_unkeyed_traffic_is_served_but_not_recorded(make_stage) -> None:
    """With router.unkeyed="serve", a foreign key gets answers and leaves nothing."""
    stage = await make_stage(router={"unkeyed": "serve"})
    stage.says("fine")
    answer = await stage.post("/v1/chat/completions", BODY, "sk-mine")
    assert answer.status_code == 200
    assert stage.buffer.reader.stats()["buffer/turns"] == 0
    assert_final(
        await stage.post("/v1/chat/completions", BODY, "ol-ep-x-0"), 401, "invalid_api_key"
    )


async def test_keys_hold_for_every_router_of_the_run(make_stage, stage) -> None:
    """Episode keys are derived, not stored."""
    episode = await stage.open()
    other = await make_stage(beside=stage)
    stage.says("fine")
    answer = await other.post("/v1/chat/completions", BODY, episode["api_key"])
    assert answer.status_code == 200


@pytest.mark.medium
async def test_every_route_is_opened_by_one_kind_of_key(make_stage) -> None:
    """Agent, runner and admin have a key each: whatever else is on a route, the other two, and a
    forged one, are 401 there, also where traffic without a key is served."""
    for unkeyed in ("refuse", "serve"):
        stage = await make_stage(router={"unkeyed": unkeyed})
        stage.server.answer = lambda request, stage=stage: stage.script("fine")
        episode = await stage.open()
        keys = {
            "agent": episode["api_key"],
            "runner": stage.run.keys.runner_key,
            "admin": stage.run.keys.admin_key,
            "forged": episode["api_key"][:-1] + "!",
        }
        document = (await stage.get("/openapi.json")).json()
        opened = set()
        for path, methods in document["paths"].items():
            if path in OPEN:
                continue
            owner = "agent" if "/v1/" in path else "admin" if path in ADMIN else "runner"
            url = path.format(episode_id=episode["episode_id"], model_id="policy")
            for method in methods:
                for role, key in keys.items():
                    # What would close the episode is refused for its body.
                    answer = await stage.http.request(
                        method, url, json={}, headers={"Authorization": f"Bearer {key}"}
                    )
                    assert (answer.status_code == 401) == (role != owner), (url, role, answer.text)
                opened.add(owner)
        assert opened == {"agent", "runner", "admin"}


@pytest.mark.parametrize(
    ("sections", "is_closed", "code"),
    [
        ({}, True, "episode_closed"),
        ({"router": {"max_turns_per_episode": 1}}, False, "turn_budget_spent"),
        ({"router": {"max_tokens_per_episode": 20}}, False, "token_budget_spent"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_clients_that_read_words_know_that_an_episode_has_ended(
    make_stage, sections: dict, is_closed: bool, code: str, path: str
) -> None:
    """LiteLLM sees neither code nor headers; 404 with this type is final in every dialect there."""
    stage = await make_stage(**sections)
    stage.server.answer = lambda request: stage.script("fine")
    episode = await stage.open()
    assert (await stage.post("/v1/chat/completions", BODY, episode["api_key"])).status_code == 200
    if is_closed:
        await stage.post(
            f"/episodes/{episode['episode_id']}/close", {"outcome": "completed", "key": "c"}
        )
    answer = await stage.post(path, {**BODY, "max_tokens": 5}, episode["api_key"])
    assert_final(answer, 404, code)
    assert answer.json()["error"]["type"] == "not_found_error"


def test_keys_of_strangers_leave_nothing_in_memory(make_run) -> None:
    """Whatever a stranger calls an episode, nothing of it is kept."""
    keys = KeyRing(make_run().keys)
    assert keys.episode_of(keys.episode_key("ep-1")) == "ep-1"
    tracemalloc.start()
    for number in range(200):
        assert keys.episode_of(f"ol-ep-{'x' * 200_000}{number}-{'0' * 40}") is None
        assert keys.episode_of(f"ol-ep-ep-{number}-{'0' * 40}") is None
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 1_000_000
