"""A client of the router's control routes.

A call returns after a 2xx, or raises. It is repeated only with the same body and idempotency key.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

import aiohttp
import msgspec

from outloop.buffer.errors import (
    Conflict,
    DeadlineExceeded,
    Gone,
    NotFound,
    RecordError,
    SettingsError,
)
from outloop.buffer.records import Claim, FailureKind, Outcome, Refusals, Reward, Task
from outloop.buffer.tasks.mixture import TaskSource

_ATTEMPT_TIMEOUT_S = 60.0
_FIRST_DELAY_S = 0.05
_MAX_DELAY_S = 2.0
_ERRORS: dict[int, type[Exception]] = {
    400: RecordError,
    401: SettingsError,
    403: SettingsError,
    404: NotFound,
    409: Conflict,
    410: Gone,
    422: Conflict,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedClaim:
    """A claim with its open episode."""

    claim: Claim
    episode_id: str
    base_url: str
    api_key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeCalls:
    """The model calls of an episode."""

    num_turns: int
    num_calls: int
    """Turns, refused calls, and calls that have no answer yet."""
    refusals: Refusals


@dataclass(frozen=True, kw_only=True, slots=True)
class Claimed:
    """What there is to play; `reason` says why there is nothing."""

    claims: tuple[OpenedClaim, ...]
    reason: str
    retry_after_s: float


class _NotNow(Exception):
    """The router answered that it cannot serve yet."""

    def __init__(self, text: str, retry_after_s: float | None) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class RouterClient:
    """Control calls over one connection pool; an async context manager.

    Every call is repeated after lost connections and 5xx until `deadline_s` has passed.

    Raises:
        DeadlineExceeded: the router did not answer in time.
        SettingsError: the runner key is refused.
        RecordError, NotFound, Gone, Conflict: the router refuses the request.
    """

    def __init__(self, url: str, runner_key: str, *, deadline_s: float = 60.0) -> None:
        self.url = url.rstrip("/")
        self._deadline_s = deadline_s
        self._headers = {
            "Authorization": f"Bearer {runner_key}",
            "Content-Type": "application/json",
        }
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> RouterClient:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=64),
            timeout=aiohttp.ClientTimeout(total=_ATTEMPT_TIMEOUT_S),
            headers=self._headers,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def register_tasks(
        self,
        tasks: Sequence[Task],
        eval_tasks: Sequence[Task],
        sources: Sequence[TaskSource] = (),
        *,
        suites: Mapping[str, int] | None = None,
    ) -> None:
        """Register the run's tasks; the same tasks again change nothing.

        Raises:
            SettingsError: the router refuses them, as it would at every further try.
        """
        await self._post_settings(
            "/tasks",
            {
                "tasks": [asdict(task) for task in tasks],
                "eval_tasks": [
                    {"task_id": t.task_id, "payload": t.payload, "source": t.source}
                    for t in eval_tasks
                ],
                "sources": [asdict(source) for source in sources],
                "suites": suites,
            },
        )

    async def heartbeat(self, runner_id: str, *, warning: str = "") -> None:
        """Report that a runner is alive, so that it keeps what it claimed under `runner_id`.

        `warning`: a sentence for the user who watches the run.
        """
        body = {"runner_id": runner_id} | ({"warning": warning} if warning else {})
        await self._post("/runners/heartbeat", body)

    async def claim(self, *, key: str, count: int, runner_id: str = "") -> Claimed:
        """Claim up to `count` attempts and open their episodes, in one call.

        If the router is not ready yet, the answer is empty, with reason "not_ready".

        Args:
            runner_id: of a runner that sends heartbeats; without heartbeats it loses its attempts.
        """
        try:
            answer = await self._post(
                "/tasks/claim",
                {"key": key, "count": count, "open": True, "runner_id": runner_id},
                retry_not_ready=False,
            )
        except _NotNow as busy:
            return Claimed(claims=(), reason="not_ready", retry_after_s=busy.retry_after_s or 0.5)
        return Claimed(
            # No episode: the attempt was replaced between its claim and its opening.
            claims=tuple(_opened(row) for row in answer["claims"] if row["episode"] is not None),
            reason=answer.get("reason") or "",
            retry_after_s=float(answer.get("retry_after_s") or 0.0),
        )

    async def close_episode(
        self,
        episode_id: str,
        *,
        outcome: Outcome,
        failure_kind: FailureKind | None,
        reward: Reward | None,
        error: str,
        output: str = "",
    ) -> bool:
        """Close an episode with its reward; False if it was too late or will be replaced."""
        scored = None
        if reward is not None:
            scored = {"value": reward.value, "components": reward.components}
            parts = {
                "turns": reward.turns,
                "branches": reward.branches,
                "tokens": [
                    {
                        "turn": span.turn_id,
                        "start": span.start,
                        "end": span.end,
                        "value": span.value,
                    }
                    for span in reward.tokens
                ],
            }
            scored |= {name: scores for name, scores in parts.items() if scores}
            if reward.answer:
                scored["answer"] = reward.answer
        answer = await self._post(
            f"/episodes/{episode_id}/close",
            {
                "outcome": outcome,
                "failure_kind": failure_kind,
                "reward": scored,
                "error": error,
                "output": output,
                "key": f"close-{episode_id}",
            },
        )
        return bool(answer.get("counted", True))

    async def read_calls(self, episode_id: str) -> EpisodeCalls | None:
        """The model calls of an episode; None if the router does not know it."""
        assert self._session is not None, "use `async with RouterClient(...)`"
        try:
            async with self._session.get(f"{self.url}/episodes/{episode_id}") as response:
                if response.status != 200:
                    return None
                found = await response.json()
                return EpisodeCalls(
                    num_turns=len(found["turns"]),
                    num_calls=int(found["num_calls"]),
                    refusals=msgspec.convert(found["refusals"], Refusals),
                )
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError):
            return None

    async def put_trajectories(
        self, rows: Sequence[dict[str, Any]], *, key: str, final: bool
    ) -> int:
        """Send conversations; `final`: these are the last."""
        answer = await self._post_settings(
            "/trajectories", {"trajectories": list(rows), "key": key, "final": final}
        )
        return int(answer["num_accepted"])

    async def _post_settings(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Post what the user gave; a refusal is final.

        Raises:
            SettingsError: the router refuses it.
        """
        try:
            return await self._post(path, body)
        except (RecordError, NotFound, Conflict, Gone) as error:
            raise SettingsError(str(error)) from error

    async def _post(
        self, path: str, body: dict[str, Any], *, retry_not_ready: bool = True
    ) -> dict[str, Any]:
        data = json.dumps(body).encode()
        started = time.monotonic()
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                return await self._attempt(path, data)
            except _NotNow as busy:
                if not retry_not_ready and busy.retry_after_s is not None:
                    raise
                wait_s = busy.retry_after_s or delay_s
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError):
                wait_s = delay_s
            wait_s = min(wait_s, _MAX_DELAY_S) * random.uniform(0.75, 1.25)
            if time.monotonic() + wait_s - started > self._deadline_s:
                raise DeadlineExceeded(
                    who="runner",
                    phase=f"POST {path}",
                    peer=f"router at {self.url}",
                    after_s=time.monotonic() - started,
                )
            await asyncio.sleep(wait_s)
            delay_s = min(2 * delay_s, _MAX_DELAY_S)

    async def _attempt(self, path: str, data: bytes) -> dict[str, Any]:
        assert self._session is not None, "use `async with RouterClient(...)`"
        async with self._session.post(self.url + path, data=data) as response:
            text = await response.text()
            if response.status >= 500 or response.status in (408, 429):
                raise _NotNow(text[:200], _seconds(response.headers.get("Retry-After")))
            if response.status >= 400:
                raise _ERRORS.get(response.status, SettingsError)(
                    f"router refused POST {path} with status={response.status}: {_message(text)}"
                )
            answer: dict[str, Any] = json.loads(text)
            return answer


def _opened(row: dict[str, Any]) -> OpenedClaim:
    task, episode = row["task"], row["episode"]
    return OpenedClaim(
        claim=Claim(
            task=Task(task_id=task["task_id"], payload=task["payload"]),
            purpose=row["purpose"],
            group_id=row.get("group_id"),
            attempt=row.get("attempt", 0),
            deadline_s=float(row["deadline_s"]),
            sampling=row.get("sampling"),
            eval_name=row.get("eval_name") or "",
        ),
        episode_id=episode["episode_id"],
        base_url=episode["base_url"],
        api_key=episode["api_key"],
    )


def _seconds(header: str | None) -> float | None:
    try:
        return max(0.0, float(header)) if header is not None else None
    except ValueError:
        return None


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]
