"""The most steps per hour that a run can make, in closed form.

Invariant: no schedule that trains every episode is faster, in the long run. A run comes near a
bound where no other bound is near it.

With B groups of G episodes a step, staleness k, the update's time U and the publish's time P:

* trainer: updates and publishes follow each other, so a step takes at least U + P.
* servers: a step needs B G tokens-per-episode of work, and n servers give n R tokens a second.
* slots: B G episodes of mean duration E[T] need B G E[T] seconds; M episodes run at once.
* groups in flight (Little 1961, L = lambda W): a group is in flight from its first attempt until
  its version is acknowledged, at least E[max of G] + U + P. At most (k + 1) B groups are in flight,
  so a step takes at least (E[max of G] + U + P) / (k + 1).
* longest episode, k = 0: a batch starts after the last publish and ends with the longest of its
  B G episodes, so a step takes at least E[max of B G] + U + P.

Refills take more groups. With a share p of groups without signal and r refills, B becomes
B (1 + p + .. + p^r).

A server that decodes n sequences at once takes a + b n seconds for a token of each. Reading the
weights takes a, one sequence's cache takes b (Pope et al. 2022, "Efficiently Scaling Transformer
Inference", section 3). Two measured speeds give both: 1/(a + b) for one sequence, and
m/(a + b m) for m at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field, model_validator

from outloop.engine.launch.plan.lengths import Lengths


class Servers(BaseModel):
    """A pool of equal servers; speeds are measured or computed."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    count: int = Field(1, ge=1)
    gpus: int = Field(1, ge=1)
    """GPUs of one server."""
    tokens_per_s_alone: float = Field(gt=0)
    """Speed of one sequence on a server of its own."""
    tokens_per_s: float = Field(gt=0)
    """Speed of a server with `max_running` sequences, all together."""
    max_running: int = Field(ge=1)
    prefill_tokens_per_s: float | None = Field(None, gt=0)
    """Speed of prompts. None: prompts take no time."""

    @model_validator(mode="after")
    def _refuse_faster_than_alone(self) -> Servers:
        most = self.max_running * self.tokens_per_s_alone
        if self.tokens_per_s > most * (1 + 1e-9):
            raise ValueError(
                f"servers.tokens_per_s={self.tokens_per_s:g} is more than servers.max_running="
                f"{self.max_running} sequences of servers.tokens_per_s_alone="
                f"{self.tokens_per_s_alone:g} can give; at most {most:g} is possible: measure both "
                "on the same server"
            )
        return self

    @property
    def capacity(self) -> float:
        """Tokens a second of the whole pool when it is full."""
        return self.count * self.tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Sizes and times of a training loop."""

    group_size: int
    groups_per_step: int
    max_staleness: int
    slots: int
    """Episodes that run at once, over all runners."""
    update_s: float
    publish_s: float
    seconds: Lengths
    """Duration of an episode outside the model: tools, sandboxes, the verifier."""
    tokens: Lengths
    """Work of the servers: sampled tokens, and prompt tokens at their relative cost."""
    servers: Servers | None
    """None: `seconds` contains the model's time."""
    by_task: float = 0.0
    """Share of attempts with the length of their task; the others' lengths are independent."""
    overhead_s: float = 0.0
    """Time of an episode for claim, router, records and recovery."""
    no_signal_share: float = 0.0
    max_refills: int = 0

    @property
    def alone(self) -> Lengths:
        """Duration of an episode whose servers it shares with nobody."""
        if self.servers is None:
            return self.seconds
        return self.seconds.plus(self.tokens, 1.0 / self.servers.tokens_per_s_alone)

    @property
    def num_groups(self) -> float:
        """Groups that a step takes, refills included."""
        p, r = self.no_signal_share, self.max_refills
        return self.groups_per_step * sum(p**i for i in range(r + 1))

    @property
    def generate_s(self) -> float:
        """Seconds of the whole pool for one step; 0 without servers."""
        if self.servers is None:
            return 0.0
        episodes = self.num_groups * self.group_size
        return episodes * self.tokens.mean() / self.servers.capacity


def least_step_s(loop: Loop) -> Mapping[str, float]:
    """Return every bound by its name, in seconds of a step; the largest holds."""
    alone, serial_s = loop.alone, loop.update_s + loop.publish_s
    longest_s = loop.overhead_s + alone.mean_of_max(1, loop.group_size, loop.by_task)
    episodes = loop.num_groups * loop.group_size
    flight_s = (longest_s + serial_s) / (loop.max_staleness + 1)
    least = {
        "trainer": serial_s,
        "slots": episodes * (alone.mean() + loop.overhead_s) / loop.slots,
        "groups in flight": flight_s * loop.num_groups / loop.groups_per_step,
    }
    if loop.servers is not None:
        least["servers"] = loop.generate_s
    if loop.max_staleness == 0:
        longest_s = loop.overhead_s + alone.mean_of_max(
            loop.groups_per_step, loop.group_size, loop.by_task
        )
        least["longest episode"] = longest_s + serial_s
    return least


def binding(loop: Loop) -> tuple[str, float]:
    """Return the name of the bound that holds, and its steps per hour."""
    least = least_step_s(loop)
    name = max(least, key=lambda name: least[name])
    return name, 3600.0 / least[name]
