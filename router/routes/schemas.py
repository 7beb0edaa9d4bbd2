"""Bodies of the runner's routes.

Owns: their fields. Does not own: what is done with them. Invariant: the types that decode a body
also describe it in the OpenAPI document; unknown fields are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from outloop.buffer.records import FailureKind, Outcome, Purpose


def _no_tools() -> msgspec.Raw:
    return msgspec.Raw(b"null")


class TaskBody(msgspec.Struct):
    """One task."""

    task_id: str
    payload: dict[str, Any]
    priority: int = 0


class SourceBody(msgspec.Struct):
    """One of the lists of which `tasks` consists, in their order."""

    name: str
    num_tasks: int
    weight: float = 1.0
    priority: int = 0


class TasksBody(msgspec.Struct):
    """Body of `POST /tasks`; without sources all tasks are one."""

    tasks: list[TaskBody]
    eval_tasks: list[TaskBody] = []
    sources: list[SourceBody] = []
    num_test_tasks: int = 0
    """The last of `eval_tasks`: the test split."""


class ClaimBody(msgspec.Struct):
    """Body of `POST /tasks/claim`; `open` opens each claim's episode in the same call."""

    key: str
    count: int
    open: bool = False
    runner_id: str = ""
    """Of a runner that sends heartbeats; without, attempts are lost at their deadlines alone."""


class HeartbeatBody(msgspec.Struct):
    """Body of `POST /runners/heartbeat`."""

    runner_id: str
    warning: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    """A sentence for whoever watches the run; it stays until the runner sends another one."""


class EpisodeBody(msgspec.Struct):
    """Body of `POST /episodes`."""

    task_id: str
    deadline_s: float
    purpose: Purpose
    group_id: str | None = None
    attempt: Annotated[int, msgspec.Meta(ge=0)] = 0
    episode_id: str | None = None
    sampling: dict[str, float] | None = None
    eval_name: str = ""
    metadata: dict[str, str] = {}


class TokenRewardBody(msgspec.Struct):
    """What the tokens [start, end) of an answer earned; `turn`: the id of the answer or turn."""

    turn: str
    start: int
    end: int
    value: float


class RewardValue(msgspec.Struct):
    """A verifier's score; single turns and branches by the id of the answer or of the turn."""

    value: float
    components: dict[str, float] = {}
    turns: dict[str, float] = {}
    branches: dict[str, float] = {}
    tokens: list[TokenRewardBody] = []


class RewardBody(RewardValue, kw_only=True):
    """Body of `POST /episodes/{id}/reward`."""

    key: str


class CloseBody(msgspec.Struct):
    """Body of `POST /episodes/{id}/close`."""

    outcome: Outcome
    key: str
    failure_kind: FailureKind | None = None
    reward: RewardValue | None = None
    error: str = ""
    output: str = ""


class ConversationBody(msgspec.Struct):
    """One conversation for SFT, as OpenAI messages."""

    messages: msgspec.Raw
    tools: msgspec.Raw = msgspec.field(default_factory=_no_tools)
    metadata: dict[str, str] = {}


class TrajectoriesBody(msgspec.Struct):
    """Body of `POST /trajectories`; `final`: no more will come."""

    trajectories: list[ConversationBody]
    key: str
    final: bool
