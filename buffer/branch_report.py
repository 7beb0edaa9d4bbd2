"""Why episodes broke into branches, what that costs, and what to change.

Every turn counts under exactly one cause; an unknown cause is shown by its name.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from outloop.buffer.records import Trajectory, Turn

_NOT_BROKEN = frozenset({"root", "extension"})
EXPLANATIONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "template": (
            "the chat format does not let this answer be continued word for word: most drop the "
            "reasoning of earlier turns when the user speaks again, or the answer was cut",
            'keep it with model.renderer_options = {"thinking_retention": "all"}, or raise '
            "sampling.max_new_tokens if answers were cut",
        ),
        "history_rewritten": (
            "the agent changed its history: it shortened or summarised it, or wrote calls and "
            "results as text",
            "have the agent send messages back as it got them, tool calls and ids included; if it "
            "compacts its context on purpose, this is the price",
        ),
        "tools_changed": (
            "the same conversation came with other tools, which are at the top of the prompt",
            "give the agent one list of tools, in one order, for the whole episode",
        ),
        "system_changed": (
            "the system message changed between turns: a clock, a token count, a reminder",
            "move what changes into the newest user message, or switch it off",
        ),
        "new_conversation": (
            "a conversation that shares nothing with the earlier ones: a sub-agent, a title, a "
            "memory or a planning request",
            "expected of agents that make side requests; switch the ones you do not want trained "
            "off, or send them to another model with [router.upstreams]",
        ),
        "resampled": (
            "the same conversation was continued more than once: several tries, or a retry without "
            "the header of a retry",
            "expected of agents that search; otherwise use an SDK that marks its retries, or send "
            "an Idempotency-Key",
        ),
        "choice": ("n > 1: every choice after the first is a branch", "expected; ask for fewer"),
        "prefill": (
            "the agent prefilled the answer",
            "leave the last assistant message out, or use tool_choice to force a call",
        ),
        "history_unknown": (
            "another router process recorded the earlier turns, so this one knows only their ids, "
            "and the rendering did not begin with these",
            "let an episode stay with one router: keep connections alive, or hash by episode",
        ),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CauseCost:
    """The cost of the turns with one cause."""

    cause: str
    num_turns: int
    num_prompt_tokens: int
    """Ids that were rendered and computed again because no recorded turn could be continued."""
    num_episodes: int
    explanation: str
    advice: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """Branches of some episodes; costs in descending order."""

    num_episodes: int
    num_turns: int
    num_branches: int
    num_prompt_tokens: int
    """New prompt ids of all turns."""
    costs: tuple[CauseCost, ...]
    masked: Mapping[str, int]
    """Number of output tokens that are not trained, by mask_reason."""
    refused: Mapping[str, int]
    """Model calls that the router refused, by code."""

    @property
    def cost_share(self) -> float:
        """Share of all prompt ids that is due to broken branches."""
        return sum(c.num_prompt_tokens for c in self.costs) / max(1, self.num_prompt_tokens)


def measure(trajectories: Iterable[Trajectory]) -> Drift:
    """The drift of `trajectories`; those for SFT are left out, since no policy sampled them."""
    turns_of: dict[str, list[Turn]] = defaultdict(list)
    episodes_of: dict[str, set[str]] = defaultdict(set)
    masked: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    num_episodes = num_turns = num_branches = num_prompt_tokens = 0
    for trajectory in trajectories:
        if trajectory.episode.purpose == "sft":
            continue
        num_episodes += 1
        num_branches += len(trajectory.branches())
        refused.update(trajectory.episode.refusals.counts)
        for turn in trajectory.turns:
            num_turns += 1
            num_prompt_tokens += len(turn.prompt_ids)
            trained = sum(end - start for start, end in turn.loss_spans)
            if trained < len(turn.output_ids):
                masked[turn.mask_reason or "unknown"] += len(turn.output_ids) - trained
            if turn.branch_cause not in _NOT_BROKEN:
                turns_of[turn.branch_cause].append(turn)
                episodes_of[turn.branch_cause].add(trajectory.episode.episode_id)
    costs = [_cost(cause, turns, len(episodes_of[cause])) for cause, turns in turns_of.items()]
    return Drift(
        num_episodes=num_episodes,
        num_turns=num_turns,
        num_branches=num_branches,
        num_prompt_tokens=num_prompt_tokens,
        costs=tuple(sorted(costs, key=lambda c: (-c.num_prompt_tokens, -c.num_turns, c.cause))),
        masked=MappingProxyType(dict(masked.most_common())),
        refused=MappingProxyType(dict(refused.most_common())),
    )


def _cost(cause: str, turns: list[Turn], num_episodes: int) -> CauseCost:
    explanation, advice = EXPLANATIONS.get(cause, ("no explanation is known", ""))
    return CauseCost(
        cause=cause,
        num_turns=len(turns),
        num_prompt_tokens=sum(
            len(turn.prompt_ids) for turn in turns if turn.parent_turn_id is None
        ),
        num_episodes=num_episodes,
        explanation=explanation,
        advice=advice,
    )
