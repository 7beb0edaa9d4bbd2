"""Bodies of the runner's routes.

Owns: their fields. Does not own: what is done with them. Invariant: the types that decode a body
also describe it in the OpenAPI document; unknown fields are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from outloop.buffer.records import (
    FailureKind,
    FinishReason,
    Outcome,
    Purpose,
    Sampling,
    VersionSpan,
)


def _no_tools() -> msgspec.Raw:
    return msgspec.Raw(b"null")


class TaskBody(msgspec.Struct):
    """One task."""

    task_id: str
    payload: dict[str, Any]
    priority: int = 0
    source: str = ""
    """Of an evaluation task: the list that it was held out from."""


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
    suites: dict[str, int] | None = None
    """Of which `eval_tasks` consist, in order: name and number of tasks; null: all are
    "validation"."""


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
    answer: str = ""
    """What the episode answered, for majority votes of an evaluation."""


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


Id = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""Of a token."""
Version = Annotated[int, msgspec.Meta(ge=0)]


class PostedTurn(msgspec.Struct, kw_only=True):
    """One model call of a posted trajectory; fields as in `GET /episodes/{id}`."""

    turn_id: str = ""
    parent_turn_id: str | None = None
    choice_index: int = 0
    prompt_ids: list[Id]
    """Given after the parent's ids."""
    output_ids: list[Id]
    behavior_logprobs: list[float]
    policy_version: Version | None = None
    """Of all output ids; or version_spans."""
    version_spans: list[VersionSpan] = []
    loss_spans: list[tuple[int, int]] | None = None
    """Which output ids are trained; left out: all whose distribution is known."""
    sampling: Sampling
    """In force when it was sampled."""
    finish_reason: FinishReason = "stop"
    started_at: float = 0.0
    finished_at: float = 0.0


class PostedSample(msgspec.Struct, kw_only=True):
    """A branch of a posted trajectory as one row; all lists are of one length."""

    token_ids: list[Id]
    loss_mask: list[bool | int]
    """True, 1: sampled by the policy, and trained."""
    behavior_logprobs: list[float]
    """Read where loss_mask is true."""
    policy_versions: Version | list[Version]
    sampling: Sampling
    finish_reason: FinishReason = "stop"


class TrajectoryBody(msgspec.Struct, kw_only=True):
    """`turns` or `samples` of an open episode, for RL; or `messages`, a conversation for SFT."""

    episode_id: str = ""
    turns: list[PostedTurn] | None = None
    samples: list[PostedSample] | None = None
    outcome: Outcome = "completed"
    failure_kind: FailureKind | None = None
    reward: RewardValue | None = None
    """Left out: it comes later, by `POST /episodes/{id}/reward`."""
    error: str = ""
    output: str = ""
    messages: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    """As OpenAI's."""
    tools: msgspec.Raw = msgspec.field(default_factory=_no_tools)
    metadata: dict[str, str] = {}
    """Of a conversation."""

    @property
    def is_played(self) -> bool:
        """True if it is for RL."""
        return self.turns is not None or self.samples is not None


class TrajectoriesBody(msgspec.Struct):
    """Body of `POST /trajectories`: of one kind, all for RL or all for SFT."""

    trajectories: list[TrajectoryBody]
    key: str = ""
    """SFT: the same key again adds nothing. Trajectories for RL have their episode_id."""
    final: bool = False
    """SFT: no more will come."""
