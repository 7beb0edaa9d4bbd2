"""What every trainer rank does with its part of the model.

Owns: this rank's policy and reference, and the operations on them that all ranks make together.
Does not own: when they are made (loop, sft, through ranks), Redis, servers. Invariant: all ranks
call the same operations with the same arguments in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import structlog

from outloop.buffer.errors import DeadlineExceeded
from outloop.buffer.records import CheckpointMark, Float32
from outloop.buffer.run import Run
from outloop.engine.train.algorithms.user_functions import loss_of
from outloop.engine.train.checkpoint.async_writer import Saving, begin_save, save_checkpoint
from outloop.engine.train.checkpoint.checkpoint_format import KEPT, Checkpoint, load_checkpoint
from outloop.engine.train.data.samples import prompt_sample
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.megatron.export_weights import Exports
from outloop.engine.train.megatron.import_weights import load_huggingface
from outloop.engine.train.megatron.model_and_optimizer import Policy, PolicyConfig, build_policy
from outloop.engine.train.megatron.offload import Placement
from outloop.engine.train.ranks.collectives import agree
from outloop.engine.train.step.policy_update import rl_update, sft_update
from outloop.engine.train.step.recompute_logprobs import score, with_proximal
from outloop.engine.train.step.reference_model import (
    Reference,
    load_reference,
    read_reference_config,
)
from outloop.engine.train.step.update_metrics import UpdateReport

_LAST_SAVE_S = 30.0
"""Within what torchrun and the launcher grant a trainer that they end."""
_log = structlog.get_logger()
_NO_MARK = CheckpointMark(fence=0, group_ids=(), next_slot=0, policy_version=0)
Beat = Callable[[], None]
ModelName = Literal["policy", "reference"]


class Work:
    """One rank's models; `build` comes first."""

    def __init__(self, run: Run, config: PolicyConfig) -> None:
        self.config = config
        self._settings = run.settings
        self._run_dir = run.dir
        self._loss = loss_of(run.settings)
        self._policy: Policy | None = None
        self._exports: Exports | None = None
        self._reference: Reference | None = None
        self._placement: Placement | None = None
        self._saving: Saving | None = None
        self._batch: TrainBatch | None = None

    @property
    def policy(self) -> Policy:
        """The model that is trained."""
        assert self._policy is not None, "build comes first"
        return self._policy

    @property
    def exports(self) -> Exports:
        """Its tensors under their Hugging Face names."""
        assert self._exports is not None, "build comes first"
        return self._exports

    @property
    def placement(self) -> Placement:
        """Whether this rank's tensors are on its device."""
        assert self._placement is not None, "build comes first"
        return self._placement

    @property
    def reference(self) -> Reference:
        """The frozen model of the KL terms."""
        assert self._reference is not None, "load_reference comes first"
        return self._reference

    def build(self, *, num_updates: int) -> None:
        """Make the policy for `num_updates` updates and load the model folder.

        Raises:
            SettingsError: on every rank, when any rank could not read the folder.
        """
        policy = build_policy(self.config, self._settings.trainer, num_updates=num_updates)
        agree("load", lambda: load_huggingface(policy.model, self._settings.model.path))
        policy.take_weights()
        self._policy = policy
        self._exports = Exports(policy.model)
        self._placement = Placement(policy, is_colocated=self._settings.trainer.is_colocated)

    def load_reference(self, *, pinned_hash: str) -> str:
        """Load the frozen model; gives its content hash.

        Raises:
            SettingsError: the folder's content is not what it was when the run began.
        """
        settings = self._settings
        self._reference = agree(
            "load the reference",
            lambda: load_reference(
                read_reference_config(settings, self.config),
                settings.trainer.reference_path or settings.model.path,
                pinned_hash=pinned_hash,
                device=next(self.policy.model.parameters()).device,
            ),
        )
        self.placement.add_frozen(self._reference.model)
        return self._reference.content_hash

    @property
    def batch(self) -> TrainBatch:
        """The rows of the step, the same on every rank."""
        assert self._batch is not None, "load_batch comes first"
        return self._batch

    def load_batch(self, batch: TrainBatch) -> None:
        """Take the rows of a step in place of those of the one before."""
        self._batch = batch

    def set_column(self, name: str, values: Float32) -> None:
        """Give the batch a column [T]."""
        self._batch = self.batch.with_columns(**{name: values})

    def score_reference(self, rows: Sequence[int], *, on_microbatch: Beat) -> Float32:
        """Give rows of the batch the reference's logprobs; the column [T], on every rank.

        Other rows keep those that they have.
        """
        column = self.score("reference", rows, on_microbatch=on_microbatch)
        if self.batch.reference_logprobs is not None:
            column += self.batch.reference_logprobs
        self._batch = self.batch.with_columns(reference_logprobs=column)
        return column

    def recompute_proximal(
        self, updates: Sequence[Sequence[int]], *, on_microbatch: Beat
    ) -> dict[str, float]:
        """Give the batch proximal logprobs and corrections, before its first update; the metrics.

        The rows of each update are packed as in the update.
        """
        column = np.zeros(self.batch.token_ids.shape, np.float32)
        for rows in updates:
            column += self.score("policy", rows, on_microbatch=on_microbatch)
        self._batch, metrics = with_proximal(
            self.batch, column, self._settings.trainer, rows=list(chain(*updates))
        )
        return metrics

    def update(
        self,
        rows: Sequence[int],
        *,
        policy_version: int,
        norm_limit: float,
        on_microbatch: Beat,
    ) -> UpdateReport:
        """One policy-gradient update on some rows of the batch; the report is the sum over all
        ranks, on every rank.

        Raises:
            FloatingPointError: on every rank, when the gradient's norm is not finite or above
                `norm_limit`; weights are unchanged.
        """
        self.policy.norm_limit = norm_limit
        return rl_update(
            self.policy,
            self.batch,
            self._settings.trainer,
            rows=rows,
            policy_version=policy_version,
            on_microbatch=on_microbatch,
            loss=self._loss,
        )

    def sft_update(self) -> UpdateReport:
        """One cross-entropy update on the batch."""
        return sft_update(self.policy, self.batch, self._settings.trainer)

    def score(
        self, name: ModelName, rows: Sequence[int] | None = None, *, on_microbatch: Beat
    ) -> Float32:
        """Logprobs [T] of rows of the batch under the policy or the reference, on every rank."""
        model = self.policy.model
        if name == "reference":
            assert self._reference is not None, "load_reference comes first"
            model = self._reference.model
        return score(
            model,
            self.batch,
            rows=rows,
            max_tokens=self._settings.trainer.max_microbatch_tokens,
            on_microbatch=on_microbatch,
        )

    def score_prompts(
        self, prompts: Sequence[Sequence[int]], *, on_microbatch: Beat
    ) -> list[Float32]:
        """Logprobs [T - 1] at temperature 1 of every prompt's ids under the policy, the first
        aside; on every rank."""
        batch = TrainBatch.of([prompt_sample(ids) for ids in prompts])
        column = score(
            self.policy.model,
            batch,
            max_tokens=self._settings.trainer.max_microbatch_tokens,
            on_microbatch=on_microbatch,
        )
        return [column[start + 1 : end] for start, end in pairwise(batch.starts.tolist())]

    def load(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint.

        Raises:
            SettingsError: it is of another model.
        """
        load_checkpoint(self.policy, checkpoint)

    def save(
        self, *, step: int, mark: CheckpointMark, reference_hash: str, kept: bytes = b""
    ) -> Saving:
        """Begin a checkpoint of all ranks, written in a thread of each while training goes on.

        With trainer.trains_while_saving off it is over when this returns.

        Args:
            kept: `KeptGroups.encode`; on rank 0 only.
        """
        self._end_save()
        trainer = self._settings.trainer
        self._saving = begin_save(
            self.policy,
            self._run_dir / "checkpoints",
            step=step,
            mark=mark,
            keep=trainer.keep_checkpoints,
            reference_hash=reference_hash,
            timeout_s=trainer.rank_timeout_s,
            is_copied=trainer.trains_while_saving,
        )
        if kept:
            self._saving.add(KEPT, kept)
        (self._saving.start if trainer.trains_while_saving else self._saving.run)()
        return self._saving

    def save_state(self, folder: Path, *, step: int) -> None:
        """Write a checkpoint that acknowledges nothing into `folder`, and wait for it."""
        self._end_save()
        save_checkpoint(self.policy, folder, step=step, mark=_NO_MARK, keep=1)

    def close(self) -> None:
        """Let a save that is under way end; whoever does not wait for it leaves the one before."""
        if self._saving is not None and not self._saving.wait(_LAST_SAVE_S):
            _log.warning("checkpoint_given_up", step=self._saving.step)

    def _end_save(self) -> None:
        """Of the save before; rank 0 began another one, so it is over but for a moment."""
        timeout_s = self._settings.trainer.rank_timeout_s
        if self._saving is not None and not self._saving.wait(timeout_s):
            raise DeadlineExceeded(
                who="trainer",
                phase=f"write the checkpoint of step {self._saving.step}",
                peer="its disk",
                after_s=timeout_s,
            )
        self._saving = None

    def save_folder(self) -> None:
        """Write the policy as the run's Hugging Face folder."""
        self.exports.save(self._run_dir / "hf", source=self._settings.model.path)
