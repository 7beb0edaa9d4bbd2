"""Makes a dumped step again and compares the results.

The updates run through the same function as in the run that was dumped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from outloop.engine.train.algorithms.user_functions import loss_of
from outloop.engine.train.debug.step_dump import load_state, read_dump
from outloop.engine.train.megatron import model_and_optimizer, parallel_config
from outloop.engine.train.megatron.layer_kind import layers_of
from outloop.engine.train.megatron.value_head import ValueHead
from outloop.engine.train.step.head_update import HeadUpdate
from outloop.engine.train.step.policy_update import rl_update

_ROUNDING = 1e-4
"""Relative tolerance: one process adds up in another order than several ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One update, then and now; (loss, gradient norm), None: it was refused."""

    then: tuple[float, float] | None
    now: tuple[float, float] | None
    refusal: str = ""
    tolerance: float = 0.0
    """Relative; above zero for what several ranks made."""

    @property
    def is_equal(self) -> bool:
        """True if both are the same, to the last bit or within `tolerance`, or both refused."""
        if self.then is None or self.now is None:
            return self.then == self.now
        t, pairs = self.tolerance, zip(self.then, self.now, strict=True)
        return all(math.isclose(a, b, rel_tol=t, abs_tol=t / 10) for a, b in pairs)

    @property
    def sentence(self) -> str:
        """One line for a person."""
        if self.now is None:
            before = "as it was then" if self.then is None else f"then it gave {self.then}"
            return f"refused: {self.refusal} ({before})"
        numbers = f"loss={self.now[0]!r} grad_norm={self.now[1]!r}"
        if self.is_equal:
            return f"{numbers}, equal{' to rounding' if self.tolerance else ''}"
        if self.then is None:
            return f"{numbers}; then it was refused"
        return f"{numbers}; then loss={self.then[0]!r} grad_norm={self.then[1]!r}"


def replay(folder: Path) -> list[Outcome]:
    """Make the updates of a dumped step in this process; stops at one that is refused.

    What several ranks made is made here by one: equal to rounding, not bit by bit.

    Raises:
        SettingsError: the folder is no dumped step, or its model folder is another one now.
    """
    dump = read_dump(folder)
    settings = dump.settings
    torch.set_num_threads(settings.trainer.num_threads)
    raw = settings.trainer.megatron
    alone = {
        name: raw[name] for name in raw.keys() - {*parallel_config.FIELDS, "sequence_parallel"}
    }
    config = model_and_optimizer.read_config(
        settings.model.path,
        alone,
        layers=layers_of(settings.trainer),
        dtype=settings.trainer.dtype,
    )
    model_and_optimizer.join_process_group(seed=settings.run.seed)
    policy = model_and_optimizer.build_policy(
        config, settings.trainer, num_updates=dump.num_updates
    )
    head = None
    if dump.batch.returns is not None and settings.trainer.critic.kind == "head":
        head = ValueHead(
            config.hidden_size,
            settings.trainer,
            num_updates=dump.num_updates,
            device=next(policy.model.parameters()).device,
        )
    load_state(policy, dump, head=head)
    loss = loss_of(settings)
    tolerance = _ROUNDING if settings.trainer.num_ranks > 1 else 0.0
    outcomes: list[Outcome] = []
    for index, rows in enumerate(dump.updates):
        then = dump.results[index] if index < len(dump.results) else None
        try:
            report = rl_update(
                policy,
                dump.batch,
                settings.trainer,
                rows=rows,
                policy_version=dump.policy_version,
                on_microbatch=lambda: None,
                loss=loss,
                values=None
                if head is None
                else HeadUpdate(head, dump.batch, settings.trainer, rows=rows),
            )
        except FloatingPointError as error:
            outcomes.append(Outcome(then=then, now=None, refusal=str(error)))
            break
        now = (report.loss, report.grad_norm)
        outcomes.append(Outcome(then=then, now=now, tolerance=tolerance))
    return outcomes
