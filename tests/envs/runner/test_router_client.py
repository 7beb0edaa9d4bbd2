"""Control calls: what is repeated, what is not, and with which key."""

from types import ModuleType
from typing import Any

import pytest

from outloop.buffer.errors import DeadlineExceeded, Gone, SettingsError
from outloop.buffer.records import Reward, Task
from outloop.envs.runner.router_client import RouterClient

TASKS = [Task(task_id="a", payload={"q": 1})]


def client(router: Any, fake_module: ModuleType, deadline_s: float = 5.0) -> RouterClient:
    """A client of the fake router."""
    return RouterClient(router.url, fake_module.RUNNER_KEY, deadline_s=deadline_s)


@pytest.mark.medium
async def test_5xx_and_lost_connections_are_repeated(router: Any, fake_module: ModuleType) -> None:
    """A restarting router is waited for; the call succeeds in the end."""
    router.refusals["/tasks"] = [503, 500]
    async with client(router, fake_module) as control:
        await control.register_tasks(TASKS, [])
        assert router.num_registered == 1
        port = int(router.url.rsplit(":", 1)[1])
        await router.stop()
        with pytest.raises(DeadlineExceeded, match="runner waited .* router at http"):
            async with client(router, fake_module, deadline_s=0.3) as hasty:
                await hasty.register_tasks(TASKS, [])
        await router.start(port)
        await control.register_tasks(TASKS, [])
    assert router.num_registered == 2


async def test_a_repeated_close_has_the_same_key(router: Any, fake_module: ModuleType) -> None:
    """The key of a close is the episode's, so a repetition cannot score twice."""
    router.refusals["/episodes"] = [502]
    async with client(router, fake_module) as control:
        for _ in range(2):
            await control.close_episode(
                "ep-9",
                outcome="completed",
                failure_kind=None,
                reward=Reward(value=0.5, components={"form": 1.0}),
                error="",
            )
    assert router.closes["ep-9"]["key"] == "close-ep-9"
    assert router.closes["ep-9"]["reward"] == {"value": 0.5, "components": {"form": 1.0}}


@pytest.mark.parametrize("status", [400, 404, 409, 413, 422])
async def test_tasks_that_the_router_refuses_stop_the_run_at_once(
    status: int, router: Any, fake_module: ModuleType
) -> None:
    """A runner that is started again would be refused again."""
    router.refusals = {"/tasks": [status] * 9, "/trajectories": [status] * 9}
    task = Task(task_id="t", payload={"q": "a"})
    async with client(router, fake_module) as control:
        with pytest.raises(SettingsError, match=f"status={status}: scripted refusal"):
            await control.register_tasks([task], [])
        with pytest.raises(SettingsError, match=f"status={status}: scripted refusal"):
            await control.put_trajectories([{"messages": []}], key="k", final=True)
    assert len(router.refusals["/tasks"]) == len(router.refusals["/trajectories"]) == 8


async def test_a_router_that_is_not_ready_is_no_error(router: Any, fake_module: ModuleType) -> None:
    """A claim's 503 with Retry-After becomes the reason not_ready."""
    router.refusals["/tasks/claim"] = [503]
    async with client(router, fake_module) as control:
        await control.register_tasks(TASKS, [])
        first = await control.claim(key="k1", count=2)
        assert (first.claims, first.reason, first.retry_after_s) == ((), "not_ready", 0.05)
        second = await control.claim(key="k2", count=2)
    assert [claim.episode_id for claim in second.claims] == ["ep-0", "ep-1"]


async def test_refusals_become_errors_at_once(router: Any, fake_module: ModuleType) -> None:
    """4xx are not repeated: a wrong key is a SettingsError, a late close is Gone."""
    async with RouterClient(router.url, "wrong", deadline_s=5.0) as control:
        with pytest.raises(SettingsError, match="runner key"):
            await control.register_tasks(TASKS, [])
    router.refusals["/episodes"] = [410]
    async with client(router, fake_module) as control:
        with pytest.raises(Gone):
            await control.close_episode(
                "ep-1", outcome="failed", failure_kind=None, reward=None, error=""
            )
