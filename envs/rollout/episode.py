"""The episode that a rollout function plays: its task, address, key, deadline and scores.

Its key opens this episode only, and no control routes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from outloop.buffer.records import Purpose, Task
from outloop.envs.rollout.clients import Clients
from outloop.envs.rollout.episode_rewards import Scores

if TYPE_CHECKING:
    from anthropic import Anthropic, AsyncAnthropic
    from openai import AsyncOpenAI, OpenAI


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One open attempt at a task."""

    episode_id: str
    task: Task
    purpose: Purpose
    base_url: str
    """For any OpenAI client; the same as OPENAI_BASE_URL."""
    api_key: str
    """Valid for this episode only, until it closes; the same as OPENAI_API_KEY."""
    deadline: float
    """Unix seconds; `play` is cancelled then and the episode counts as truncated."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """group_id, attempt and eval_name of the claim."""
    clients: Clients = field(repr=False)
    scores: Scores = field(repr=False)

    @cached_property
    def client(self) -> AsyncOpenAI:
        """An `openai.AsyncOpenAI` for this episode; closing it is not needed."""
        return self.clients.openai(self.base_url, self.api_key)

    @cached_property
    def blocking_client(self) -> OpenAI:
        """An `openai.OpenAI` for this episode, for rollout functions that block."""
        return self.clients.openai_blocking(self.base_url, self.api_key)

    @cached_property
    def anthropic(self) -> AsyncAnthropic:
        """An `anthropic.AsyncAnthropic` for this episode."""
        return self.clients.anthropic(self.anthropic_base_url, self.api_key)

    @cached_property
    def blocking_anthropic(self) -> Anthropic:
        """An `anthropic.Anthropic` for this episode, for rollout functions that block."""
        return self.clients.anthropic_blocking(self.anthropic_base_url, self.api_key)

    @property
    def anthropic_base_url(self) -> str:
        """For any Anthropic client, which adds `/v1` itself."""
        return self.base_url.removesuffix("/v1")

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline; 0 when it has passed."""
        return max(0.0, self.deadline - time.time())

    def score(
        self,
        value: float | None = None,
        *,
        turn: object | None = None,
        branch: object | None = None,
        tokens: tuple[int, int] | None = None,
        answer: str | None = None,
        **components: float,
    ) -> None:
        """Score the episode instead of returning a reward, or score a part of it.

        `score(1.0)` is the reward. `score(form=0.5)` adds a named component; with components only,
        their sum weighted by env.reward_weights is the reward. `score(0.2, turn=answer)` scores the
        turn that gave `answer` (a client's answer, or its id), `score(0.2, branch=answer)` the
        branch that ends with it, `score(-1.0, turn=answer, tokens=(3, 9))` the 4th to 9th token of
        the answer. Scores of parts add to the episode's, which is 0 unless it is given. They are
        trained with env.turn_scores="train", and kept with "record".

        `answer` is what the episode answered, for majority votes of an evaluation: `score(1.0,
        answer="42")`, or without a score beside a reward that is returned.

        Raises:
            RecordError: a number is not finite, or the arguments do not name what is scored.
            SettingsError: this run takes no scores of turns, branches and tokens.
        """
        self.scores.add(value, turn, branch, tokens, components, answer)

    def environ(self) -> dict[str, str]:
        """Environment variables for an agent that is a program."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.api_key,
            "OUTLOOP_EPISODE_ID": self.episode_id,
            "OUTLOOP_TASK_ID": self.task.task_id,
            "OUTLOOP_DEADLINE": f"{self.deadline:.3f}",
        }
