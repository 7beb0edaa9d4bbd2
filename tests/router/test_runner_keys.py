"""Runner keys that come and go, limits of each key, and the log of who did what."""

import asyncio

import pytest
from structlog.testing import capture_logs

from outloop.buffer.errors import Conflict, NotFound, SettingsError
from outloop.router.errors import Refusal
from outloop.router.http.rate_limit import RateLimit
from outloop.router.timings import Timings

BEAT = {"runner_id": "r"}


async def answers(stage, key: str, status: int) -> None:
    """Return when a runner with that key gets this status."""
    async with asyncio.timeout(20):
        while (await stage.post("/runners/heartbeat", BEAT, key)).status_code != status:
            await asyncio.sleep(0.01)


async def test_keys_are_taken_and_refused_while_the_run_is_up(make_stage) -> None:
    """A new one beside the run's own, then alone, then none; a router that starts later agrees."""
    stage = await make_stage(timings=Timings(housekeeping_s=0.02))
    keys = stage.buffer.reader.runner_keys
    assert (await stage.post("/runners/heartbeat", BEAT, "ol-runner-y")).status_code == 401
    key = keys.add("gpu-7")
    await answers(stage, key, 200)
    await answers(stage, "ol-runner-x", 200)
    keys.revoke("run")
    await answers(stage, "ol-runner-x", 401)
    answer = await stage.post("/runners/heartbeat", BEAT, "ol-runner-x")
    assert "was revoked; send the key that `outloop keys add` made" in answer.text
    await answers(stage, key, 200)
    later = await make_stage(beside=stage)
    assert (await later.post("/runners/heartbeat", BEAT, "ol-runner-x")).status_code == 401
    keys.revoke("gpu-7")
    await answers(stage, key, 401)
    assert keys.names() == {"run": False, "gpu-7": False}


async def test_a_name_is_never_another_key(stage) -> None:
    """What was revoked stays so; names of nothing are refused."""
    keys = stage.buffer.reader.runner_keys
    keys.add("a")
    keys.revoke("a")
    with pytest.raises(Conflict, match="there is, or was, a runner key name='a'"):
        keys.add("a")
    with pytest.raises(NotFound, match="no runner key name='b'"):
        keys.revoke("b")
    for name in ("run", "", "a b", "x" * 65):
        with pytest.raises(SettingsError, match="1 to 64 letters"):
            keys.add(name)


async def test_a_key_has_its_share_of_requests(make_stage) -> None:
    """More are told to come again; other keys are served, and health is never limited."""
    stage = await make_stage(router={"max_requests_per_s": 0.01})
    assert (await stage.post("/runners/heartbeat", BEAT)).status_code == 200
    answer = await stage.post("/runners/heartbeat", BEAT)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "true")
    assert answer.json()["error"]["code"] == "rate_limited"
    assert (await stage.post("/runners/heartbeat", BEAT, "other")).status_code == 401
    for _ in range(3):
        assert (await stage.get("/health")).status_code == 200


def test_a_limit_refills_and_forgets_idle_keys() -> None:
    """A second's worth at once, then what the rate gives; strangers' keys take no memory."""
    now = [0.0]
    limit = RateLimit(4.0, clock=lambda: now[0])

    def num_taken(key: str) -> int:
        for number in range(100):
            try:
                limit.take(key)
            except Refusal:
                return number
        raise AssertionError("no limit")

    assert num_taken("a") == 4
    now[0] += 0.5
    assert num_taken("a") == 2
    for number in range(50_000):
        now[0] += 0.001
        limit.take(f"stranger {number}")
    assert limit.num_keys < 10_000
    assert num_taken("a") == 4


@pytest.mark.medium
async def test_the_audit_log_names_who_did_what(make_stage) -> None:
    """Rewards and control, by the name of the key and never the key; only with the setting."""
    for is_on in (True, False):
        stage = await make_stage(router={"audit_log": is_on})
        episode = await stage.open()
        path = f"/episodes/{episode['episode_id']}/close"
        close = {"outcome": "completed", "key": "c", "reward": {"value": 0.5}}
        with capture_logs() as logs:
            assert (await stage.post(path, close)).status_code == 200
            assert (await stage.post("/pause", {}, "ol-admin-x")).status_code == 200
        noted = [entry for entry in logs if entry["event"] == "audit"]
        assert [(entry["act"], entry["by"]) for entry in noted] == (
            [("close", "run"), ("pause", "admin")] if is_on else []
        )
        if is_on:
            assert (noted[0]["reward"], noted[0]["episode_id"]) == (0.5, episode["episode_id"])
        assert "ol-runner-x" not in str(logs)


async def test_the_admin_key_is_replaced_while_the_run_is_up(make_stage) -> None:
    """The new one opens admin routes and the old one does not; runner keys are as before."""
    stage = await make_stage(timings=Timings(housekeeping_s=0.02))
    keys, old = stage.buffer.reader.runner_keys, stage.run.keys.admin_key
    assert (await stage.get("/servers", old)).status_code == 200
    keys.set_admin("ol-admin-new")
    async with asyncio.timeout(20):
        while (await stage.get("/servers", old)).status_code != 401:
            await asyncio.sleep(0.01)
    assert (await stage.get("/servers", "ol-admin-new")).status_code == 200
    later = await make_stage(beside=stage)
    assert (await later.get("/servers", old)).status_code == 401
    assert keys.names() == {"run": True}
    await answers(stage, "ol-runner-x", 200)
    await answers(stage, "ol-admin-new", 401)
