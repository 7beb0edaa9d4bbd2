"""What every trainer rank does with its part of the model: the same operations, in the same order.

When they are done is decided on rank 0 (loop, sft), through `RankController`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import chain, pairwise

import msgspec
import numpy as np
import structlog
import torch
import torch.distributed as dist
from torch import Tensor

from outloop.buffer.errors import DeadlineExceeded, UpdateRefused
from outloop.buffer.records import CheckpointMark, Float32
from outloop.buffer.run import Run
from outloop.buffer.settings import Settings
from outloop.buffer.trajectories.trained import keeps_trajectories
from outloop.engine.machine.visible_gpus import own_gpu
from outloop.engine.models.kept_versions import version_folder
from outloop.engine.publish.buckets.plan import Place, TensorSpec
from outloop.engine.publish.sending.orders import Order, Outcome
from outloop.engine.publish.sending.sending_rank import SendingRank, ShareReader
from outloop.engine.publish.transports.registry import build_sending_rank
from outloop.engine.publish.weights_copy import WeightsCopy
from outloop.engine.train.algorithms.credit import VALUE_ADVANTAGES
from outloop.engine.train.algorithms.kl import adapted_coefficient
from outloop.engine.train.algorithms.objective import adapted_entropy_coefficient
from outloop.engine.train.algorithms.user_functions import advantage_of, loss_of
from outloop.engine.train.checkpoint.async_writer import (
    Saving,
    Shards,
    begin_save,
)
from outloop.engine.train.checkpoint.checkpoint_format import (
    Checkpoint,
    load_checkpoint,
    load_moved_reference,
)
from outloop.engine.train.data.batch_builder import Credit, with_reference
from outloop.engine.train.data.samples import prompt_sample
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.debug.step_debugger import StepDebugger
from outloop.engine.train.megatron.export_weights import Exports
from outloop.engine.train.megatron.import_weights import load_huggingface
from outloop.engine.train.megatron.model_and_optimizer import (
    Policy,
    PolicyConfig,
    PolicyModel,
    ValueModel,
    build_critic,
    build_policy,
    build_reward_model,
    rendezvous_store,
)
from outloop.engine.train.megatron.offload import Offload
from outloop.engine.train.megatron.value_head import ValueHead
from outloop.engine.train.ranks.bucket_staging import BucketStaging
from outloop.engine.train.ranks.collectives import agree, gather_bytes, meet
from outloop.engine.train.ranks.model_shares import ModelShares
from outloop.engine.train.ranks.order_channel import OrderChannel
from outloop.engine.train.ranks.watchdog import Watchdog
from outloop.engine.train.step.critic_update import (
    critic_update,
    cut_rows,
    read_critic_config,
    values_of,
    with_value_targets,
    with_values,
)
from outloop.engine.train.step.head_update import HeadUpdate, update_head_alone
from outloop.engine.train.step.policy_update import rl_update, sft_update
from outloop.engine.train.step.recompute_logprobs import score, with_proximal
from outloop.engine.train.step.reference_model import (
    Reference,
    load_reference,
    move_reference,
    read_reference_config,
)
from outloop.engine.train.step.reward_update import (
    load_reward_model,
    reward_update,
    save_reward_model,
    scores_of,
)
from outloop.engine.train.step.teacher import (
    Columns,
    read_teacher_config,
    teacher_columns,
    teacher_metrics,
)
from outloop.engine.train.step.update_metrics import UpdateReport, step_metrics
from outloop.engine.train.step.update_speed import (
    active_weights,
    begin_memory_peak,
    memory_peak,
    mfu,
    own_peak,
    update_operations,
)

_LAST_SAVE_S = 30.0
"""Within what torchrun and the launcher grant a trainer that they end."""
_log = structlog.get_logger()
_OUTCOME = msgspec.msgpack.Decoder(Outcome)
_ORDER = msgspec.msgpack.Decoder(tuple[str, Order])


class RankWorker:
    """One rank's models; `build` comes first.

    Every public method is an operation that all ranks run together, with equal arguments.
    """

    def __init__(
        self,
        run: Run,
        config: PolicyConfig,
        watchdog: Watchdog,
        *,
        make_shards: Callable[..., Shards] = Shards,
    ) -> None:
        """`make_shards`: of its checkpoints, see `begin_save`."""
        self.config = config
        self._make_shards = make_shards
        self._watchdog = watchdog
        self._settings = run.settings
        self._run_dir = run.dir
        self._loss = loss_of(run.settings)
        self._policy: Policy | None = None
        self._critic: Policy | None = None
        """A critic that is a model of its own."""
        self._head: ValueHead | None = None
        """A critic that is a head on the policy."""
        self._kl_coefficient = run.settings.trainer.kl_coefficient
        """Of the next step; trainer.kl_target moves it."""
        self._entropy_coefficient = run.settings.trainer.entropy_coefficient
        """The same, by trainer.entropy_target."""
        self._exports: Exports | None = None
        self._reference: Reference | None = None
        self._teacher: Reference | None = None
        """A model of its own; None with one that is served, or the policy itself."""
        self._placement: Offload | None = None
        self._saving: Saving | None = None
        self._staging: BucketStaging | None = None
        self._shares: ModelShares | None = None
        self._copy: WeightsCopy | None = None
        self._channel: OrderChannel | None = None
        self._sending: dict[tuple[str, bool], SendingRank] = {}
        """By transport, and whether it sends the copy."""
        self.gpus: tuple[str, ...] = ()
        """Of every rank, as CUDA_VISIBLE_DEVICES names it; empty where that is not set."""
        self._debugger = StepDebugger(run.settings, run.dir)

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
    def shares(self) -> ModelShares:
        """What each rank sends of them."""
        assert self._shares is not None, "build comes first"
        return self._shares

    @property
    def copy(self) -> WeightsCopy:
        """This rank's share as it was copied."""
        assert self._copy is not None, "copy_weights comes first"
        return self._copy

    @property
    def placement(self) -> Offload:
        """Whether this rank's tensors are on its device."""
        assert self._placement is not None, "build comes first"
        return self._placement

    @property
    def reference(self) -> Reference:
        """The frozen model of the KL terms."""
        assert self._reference is not None, "load_reference comes first"
        return self._reference

    def build(self, *, num_updates: int) -> None:
        """Make the policy, and a critic where advantages need one, for `num_updates` updates, and
        load their folders.

        Raises:
            SettingsError: on every rank, when any rank could not read the folder.
        """
        policy = build_policy(self.config, self._settings.trainer, num_updates=num_updates)
        agree("load", lambda: load_huggingface(policy.model, self._settings.model.path))
        policy.take_weights()
        policy.hashes_gradients = keeps_trajectories(self._settings.trajectories)
        self._policy = policy
        self._exports = Exports(policy.model)
        self._shares = ModelShares(self._exports, self._settings.publish.transport)
        names = [data.decode() for data in gather_bytes(own_gpu().encode())]
        self.gpus = tuple(names) if all(names) else ()
        self._placement = Offload(policy, is_colocated=self._settings.trainer.is_colocated)
        if advantage_of(self._settings) not in VALUE_ADVANTAGES:
            return
        if self._settings.trainer.critic.kind == "head":
            self._head = ValueHead(
                self.config.hidden_size,
                self._settings.trainer,
                num_updates=num_updates,
                device=next(policy.model.parameters()).device,
            )
        else:
            self._critic = self._build_critic(num_updates)
            self._placement.add_trained(self._critic)

    def _build_critic(self, num_updates: int) -> Policy:
        settings = self._settings
        config = agree("read the critic", lambda: read_critic_config(settings, self.config))
        critic = build_critic(config, settings.trainer, num_updates=num_updates)
        folder = settings.trainer.critic.path or settings.model.path
        agree("load the critic", lambda: load_huggingface(critic.model, folder))
        critic.take_weights()
        return critic

    def build_reward_model(self, *, num_updates: int) -> None:
        """Make a reward model in place of the policy, and load the folder, its head included.

        Raises:
            SettingsError: on every rank, when any rank could not read the folder.
        """
        settings = self._settings
        made = build_reward_model(self.config, settings.trainer, num_updates=num_updates)
        model = made.model
        assert isinstance(model, ValueModel)
        agree("load", lambda: load_reward_model(model, settings.model.path))
        made.take_weights()
        self._policy = made
        self._placement = Offload(made, is_colocated=False)

    def reward_update(
        self, batch: TrainBatch, targets: list[float], sets: list[int]
    ) -> dict[str, float]:
        """One update of the reward model on the rows of `scored_rows`.

        Raises:
            UpdateRefused: on every rank, when the gradient is not finite; the weights are those
                from before it.
        """
        trainer = self._settings.trainer
        assert trainer.reward_model is not None
        try:
            return reward_update(
                self.policy,
                batch,
                targets,
                sets,
                loss=trainer.reward_model,
                max_tokens=trainer.max_microbatch_tokens,
                on_microbatch=self._watchdog.progress,
            )
        except FloatingPointError as error:
            raise UpdateRefused(f"the reward model's update was refused: {error}") from error

    def reward_scores(self, batch: TrainBatch) -> list[float]:
        """The reward model's scores of the rows of `scored_rows`, on every rank."""
        model = self.policy.model
        assert isinstance(model, ValueModel)
        found: list[float] = scores_of(
            model,
            batch,
            max_tokens=self._settings.trainer.max_microbatch_tokens,
            on_microbatch=self._watchdog.progress,
        ).tolist()
        return found

    def save_reward_model(self) -> None:
        """Write the reward model as the run's `hf` folder."""
        model = self.policy.model
        assert isinstance(model, ValueModel)
        save_reward_model(model, self._run_dir / "hf", source=self._settings.model.path)

    def load_reference(self, *, pinned_hash: str, checkpoint: Checkpoint | None = None) -> str:
        """Load the frozen model; gives its content hash.

        Args:
            checkpoint: that the run goes on from; it holds a reference that follows the policy.

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
        if checkpoint is not None and checkpoint.has_reference and self._reference_moves:
            load_moved_reference(self._reference.model, checkpoint)
        self.placement.add_frozen(self._reference.model)
        return self._reference.content_hash

    def load_teacher(self) -> str:
        """Load the model of trainer.teacher.path; gives its content hash.

        Raises:
            SettingsError: on every rank, when any rank could not read the folder.
        """
        settings = self._settings
        assert settings.trainer.teacher is not None
        folder = settings.trainer.teacher.path
        assert folder is not None
        self._teacher = agree(
            "load the teacher",
            lambda: load_reference(
                read_teacher_config(settings, self.config),
                folder,
                pinned_hash="",
                device=next(self.policy.model.parameters()).device,
            ),
        )
        self.placement.add_frozen(self._teacher.model)
        return self._teacher.content_hash

    def train_step(
        self,
        batch: TrainBatch,
        updates: list[list[int]],
        *,
        credit: Credit,
        contexts: dict[str, tuple[int, ...]],
        step: int,
        policy_version: int,
    ) -> tuple[list[UpdateReport], dict[str, float]]:
        """One step: score under the reference, ask the critic and train it, score under the
        teacher, recompute proximal logprobs, update by update.

        Args:
            updates: rows of the batch, for each update.
            credit: the rewards of the batch's advantages, where these depend on the reference.
            contexts: by episode, what only the teacher sees.
            policy_version: that the weights have now.

        Returns:
            A report of each update, summed over all ranks, and the metrics of KL, teacher and
            corrections.

        Raises:
            UpdateRefused: on every rank, when a gradient is not finite or a spike; the weights are
                those from before that update.
        """
        settings = self._current_settings
        metrics: dict[str, float] = {}
        begin_memory_peak()
        began_at, num_rows = time.monotonic(), sum(map(len, updates))
        if self._settings.trainer.kl != "none" and len(batch):
            reference = self._score(self.reference.model, batch)
            batch, metrics = with_reference(batch, credit, reference, settings)
        if (self._critic is not None or self._head is not None) and updates:
            alone = step <= self._settings.trainer.critic.steps_alone
            batch, measured = self._ask_critic(batch, updates, credit, alone=alone)
            metrics |= measured
            if alone:
                updates = []
        if self._settings.trainer.teacher is not None and updates:
            if batch.teacher_logprobs is None:
                batch = batch.with_columns(**self._teacher_columns(batch, contexts))
            metrics |= teacher_metrics(batch)
        if self._settings.trainer.proximal == "recompute" and updates:
            batch, measured = self._with_proximal(batch, updates, policy_version)
            metrics |= measured

        def make(rows: Sequence[int], norm_limit: float) -> UpdateReport:
            self.policy.norm_limit = norm_limit
            values = None
            if self._head is not None:
                values = HeadUpdate(self._head, batch, settings.trainer, rows=rows)
            report = rl_update(
                self.policy,
                batch,
                settings.trainer,
                rows=rows,
                policy_version=policy_version,
                on_microbatch=self._watchdog.progress,
                loss=self._loss,
                values=values,
            )
            if values is not None:
                # Of a step's updates the first says what the critic was worth.
                metrics.update(values.metrics | metrics)
            return report

        reports = self._debugger.run(
            batch,
            updates,
            make,
            step=step,
            score=lambda rows: self._score(self.policy.model, batch, rows),
        )
        self._adapt_kl(metrics)
        self._adapt_entropy(reports, metrics)
        self._move_reference(step)
        if reports and num_rows:
            metrics |= self._speed(batch, updates, seconds=time.monotonic() - began_at)
        return reports, metrics

    def _teacher_columns(self, batch: TrainBatch, contexts: dict[str, tuple[int, ...]]) -> Columns:
        """What a teacher on these ranks makes of the batch: its own model, or the policy's as it
        is before the first update."""
        trainer = self._settings.trainer
        assert trainer.teacher is not None
        return teacher_columns(
            self.policy.model if self._teacher is None else self._teacher.model,
            batch,
            contexts,
            top_k=trainer.teacher.top_k,
            vocab_size=self.config.vocab_size,
            max_tokens=trainer.max_microbatch_tokens,
            on_microbatch=self._watchdog.progress,
        )

    def _speed(
        self, batch: TrainBatch, updates: Sequence[Sequence[int]], *, seconds: float
    ) -> dict[str, float]:
        """What this step's updates reached, scoring before them included in their time."""
        of_row = np.diff(batch.starts)
        lengths = [int(of_row[row]) for rows in updates for row in rows]
        num_ranks, config = dist.get_world_size(), self.config
        peaks = [int(data) for data in gather_bytes(str(memory_peak()).encode())]
        metrics = {
            "train/tokens_per_s_per_rank": sum(lengths) / (seconds * num_ranks),
            "train/memory_peak_bytes": float(max(peaks)),
        }
        peak = own_peak(self.exports.specs[0].dtype)
        if peak is not None:
            experts = config.num_moe_experts
            weights = active_weights(
                self.exports.specs,
                expert_share=config.moe_router_topk / experts if experts else 1.0,
                is_tied=config.is_tied,
            )
            operations = update_operations(
                weights,
                num_layers=config.num_layers,
                attention_width=config.num_attention_heads * config.kv_channels,
                lengths=lengths,
            )
            metrics["train/mfu"] = mfu(operations, seconds=seconds, num_ranks=num_ranks, peak=peak)
        return metrics

    @property
    def _current_settings(self) -> Settings:
        """The run's, with the coefficients of KL and entropy as they are now."""
        trainer = self._settings.trainer.model_copy(
            update={
                "kl_coefficient": self._kl_coefficient,
                "entropy_coefficient": self._entropy_coefficient,
            }
        )
        return self._settings.model_copy(update={"trainer": trainer})

    def _adapt_kl(self, metrics: dict[str, float]) -> None:
        """Move the coefficient of the next step towards trainer.kl_target; every rank alike."""
        trainer = self._settings.trainer
        if trainer.kl == "none":
            return
        metrics["train/kl_coefficient"] = self._kl_coefficient
        if trainer.kl_target is not None and math.isfinite(metrics.get("train/kl", math.nan)):
            self._kl_coefficient = adapted_coefficient(
                self._kl_coefficient, metrics["train/kl"], target=trainer.kl_target
            )

    def _adapt_entropy(self, reports: Sequence[UpdateReport], metrics: dict[str, float]) -> None:
        """Move the coefficient of the next step towards trainer.entropy_target; every rank alike,
        from the reports of all."""
        target = self._settings.trainer.entropy_target
        if target is None:
            return
        metrics["train/entropy_coefficient"] = self._entropy_coefficient
        measured = step_metrics(reports).get("train/entropy", math.nan) if reports else math.nan
        if math.isfinite(measured):
            self._entropy_coefficient = adapted_entropy_coefficient(
                self._entropy_coefficient, measured, target=target
            )

    @property
    def _reference_moves(self) -> bool:
        trainer = self._settings.trainer
        return trainer.reference_refresh_every > 0 or trainer.reference_decay is not None

    def _move_reference(self, step: int) -> None:
        """Let the reference follow the weights that this step left."""
        trainer = self._settings.trainer
        if trainer.reference_decay is not None:
            move_reference(self.reference.model, self.policy.model, decay=trainer.reference_decay)
        elif trainer.reference_refresh_every and step % trainer.reference_refresh_every == 0:
            move_reference(self.reference.model, self.policy.model, decay=0.0)

    def _ask_critic(
        self,
        batch: TrainBatch,
        updates: Sequence[Sequence[int]],
        credit: Credit,
        *,
        alone: bool,
    ) -> tuple[TrainBatch, dict[str, float]]:
        """The batch with the advantages that the critic gives it, and the metrics of the critic's
        own updates, made after that on the same rows as the policy's.

        A head is updated with the policy, unless it is trained alone.
        """
        trainer = self._current_settings.trainer
        model = self.policy.model if self._critic is None else self._critic.model
        values, behind = values_of(
            model,
            batch,
            cut_rows=cut_rows(batch, credit, trainer.critic),
            max_tokens=trainer.max_microbatch_tokens,
            on_microbatch=self._watchdog.progress,
            head=self._head,
        )
        batch, targets, metrics = with_values(batch, credit, values, behind, trainer)
        if self._head is not None:
            batch = with_value_targets(batch, targets)
            if not alone:
                return batch, metrics
        on_microbatch = self._watchdog.progress
        for rows in updates:
            try:
                if self._critic is not None:
                    measured = critic_update(
                        self._critic, targets, trainer, rows=rows, on_microbatch=on_microbatch
                    )
                else:
                    assert self._head is not None
                    measured = update_head_alone(
                        self._head, model, batch, trainer, rows=rows, on_microbatch=on_microbatch
                    )
            except FloatingPointError as error:
                raise UpdateRefused(f"the critic's update was refused: {error}") from error
            metrics = measured | metrics
        return batch, metrics

    def sft_update(self, batch: TrainBatch) -> UpdateReport:
        """One cross-entropy update."""
        return sft_update(self.policy, batch, self._settings.trainer)

    def score_prompts(self, prompts: list[list[int]]) -> list[Float32]:
        """Logprobs [T - 1] at temperature 1 of every prompt's ids under the policy, the first
        aside; on every rank."""
        batch = TrainBatch.of([prompt_sample(ids) for ids in prompts])
        column = self._score(self.policy.model, batch)
        return [column[start + 1 : end] for start, end in pairwise(batch.starts.tolist())]

    def _with_proximal(
        self, batch: TrainBatch, updates: Sequence[Sequence[int]], policy_version: int
    ) -> tuple[TrainBatch, dict[str, float]]:
        """The batch with proximal logprobs and corrections, and the metrics of both.

        The rows of each update are packed as in the update.
        """
        column = np.zeros(batch.token_ids.shape, np.float32)
        # Further passes train the same rows again.
        first_pass = updates[: len(updates) // self._settings.trainer.num_epochs_per_take]
        for rows in first_pass:
            column += self._score(self.policy.model, batch, rows)
        return with_proximal(
            batch,
            column,
            self._settings.trainer,
            rows=list(chain(*first_pass)),
            policy_version=policy_version,
        )

    def _score(
        self, model: PolicyModel, batch: TrainBatch, rows: Sequence[int] | None = None
    ) -> Float32:
        """Logprobs [T] of rows under a model, on every rank; 0 at other rows."""
        return score(
            model,
            batch,
            rows=rows,
            max_tokens=self._settings.trainer.max_microbatch_tokens,
            on_microbatch=self._watchdog.progress,
        )

    def load(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint.

        Raises:
            SettingsError: it is of another model.
        """
        load_checkpoint(self.policy, checkpoint, critic=self._critic or self._head)
        if self._settings.trainer.kl_target is not None and checkpoint.kl_coefficient is not None:
            self._kl_coefficient = checkpoint.kl_coefficient
        if (
            self._settings.trainer.entropy_target is not None
            and checkpoint.entropy_coefficient is not None
        ):
            self._entropy_coefficient = checkpoint.entropy_coefficient

    def save(self, *, step: int, mark: CheckpointMark, reference_hash: str) -> Saving:
        """Begin a checkpoint of all ranks, written in a thread of each while training goes on.

        With trainer.trains_while_saving off it is over when this returns.
        """
        self._end_save()
        trainer = self._settings.trainer
        self._saving = begin_save(
            self.policy,
            self._run_dir / "checkpoints",
            step=step,
            mark=mark,
            keep=trainer.keep_checkpoints,
            critic=self._critic or self._head,
            kl_coefficient=self._kl_coefficient,
            entropy_coefficient=self._entropy_coefficient,
            reference=self.reference.model if self._reference_moves else None,
            reference_hash=reference_hash,
            timeout_s=trainer.rank_timeout_s,
            is_copied=trainer.trains_while_saving,
            make_shards=self._make_shards,
        )
        (self._saving.start if trainer.trains_while_saving else self._saving.run)()
        return self._saving

    def close(self) -> None:
        """Let a save that is under way end; otherwise the one before stays in use."""
        if self._staging is not None:
            self._staging.close()
        if self._channel is not None:
            self._channel.close()
        for sending in self._sending.values():
            sending.close()
        if self._saving is None:
            return
        if self._watchdog.has_lost_rank:
            self._saving.give_up_missing()
        if not self._saving.wait(_LAST_SAVE_S):
            _log.warning("checkpoint_given_up", step=self._saving.step)

    def _end_save(self) -> None:
        """Wait for the save before, which is nearly over: rank 0 saw it end."""
        timeout_s = self._settings.trainer.rank_timeout_s
        if self._saving is not None and not self._saving.wait(timeout_s):
            raise DeadlineExceeded(
                who="trainer",
                phase=f"write the checkpoint of step {self._saving.step}",
                peer="its disk",
                after_s=timeout_s,
            )
        self._saving = None

    def leave_device(self, *, keeps_weights: bool) -> None:
        """Take this rank's tensors off its device: all, or all but the policy's weights. Returns
        when every rank has, for servers take the memory of all devices then."""
        self.placement.leave(keeps_weights=keeps_weights)
        meet()

    def come_back_to_device(self, *, weights_only: bool) -> None:
        """Put them back: all, or the policy's weights alone."""
        self.placement.come_back(weights_only=weights_only)

    def send_weights(self, names: list[str]) -> None:
        """Send what this rank holds of these tensors to rank 0, which reads them."""
        self.exports.send(names)

    def carry_out(self, transport: str, order: Order) -> list[Outcome]:
        """Do what a publish asks of the ranks that send; the answers of all."""
        mine = self._sending_rank(transport, self.shares).carry_out(order)
        return [_OUTCOME.decode(data) for data in gather_bytes(msgspec.msgpack.encode(mine))]

    def copy_weights(self) -> None:
        """Copy this rank's share of the weights into host memory, to be published while the model
        is trained on; the other ranks listen for rank 0's publishing thread from then on. Returns
        when every rank has its share."""
        if self._copy is None:
            settings = self._settings
            dtype = torch.float32 if settings.server.dtype == "float32" else torch.bfloat16
            self._copy = WeightsCopy(self.shares, dtype)
            self._channel = OrderChannel(
                rendezvous_store(),
                rank=dist.get_rank(),
                num_ranks=dist.get_world_size(),
                timeout_s=settings.trainer.rank_timeout_s,
                is_broken=lambda: self._watchdog.has_lost_rank,
            )
            if dist.get_rank():
                self._channel.follow(self._carry_out_copied)
        self._copy.fill()
        # Rank 0 may be through with its part long before the others: its publishing thread would
        # have them send what is not copied yet, under checksums that agree.
        meet()

    def carry_out_beside(self, transport: str, order: Order) -> list[Outcome]:
        """As `carry_out`, with the copies, on rank 0 alone: for a thread beside the training.

        Raises:
            DeadlineExceeded, PartFailed: a rank did not answer, failed, or is lost.
        """
        assert self._channel is not None, "copy_weights comes first"
        data = msgspec.msgpack.encode((transport, order))
        return [_OUTCOME.decode(one) for one in self._channel.ask(data, self._carry_out_copied)]

    def _carry_out_copied(self, data: bytes) -> bytes:
        transport, order = _ORDER.decode(data)
        return msgspec.msgpack.encode(self._sending_rank(transport, self.copy).carry_out(order))

    def _sending_rank(self, transport: str, reader: ShareReader) -> SendingRank:
        key = (transport, reader is self._copy)
        if key not in self._sending:
            self._sending[key] = build_sending_rank(self._settings, transport, reader)
        return self._sending[key]

    def stage_bucket(
        self,
        names: list[str],
        starts: list[int],
        *,
        dtype: str,
        index: int,
        num_bytes: int,
        num_readers: list[int],
    ) -> list[list[str]]:
        """Put these tensors together on every rank's device, at these bytes of its bucket.

        Returns every rank's payloads, as many as it has readers.
        """
        if self._staging is None:
            transport = self._settings.publish.transport
            self._staging = BucketStaging(self.exports, is_on_device=transport == "cuda_ipc")
        shapes = {spec.name: spec.shape for spec in self.exports.specs}
        element: torch.dtype = getattr(torch, dtype)
        specs = [TensorSpec(name=name, shape=shapes[name], dtype=element) for name in names]
        places = [
            Place(spec=spec, start=start, end=start + spec.num_bytes)
            for spec, start in zip(specs, starts, strict=True)
        ]
        mine = self._staging.fill(
            places, index=index, num_bytes=num_bytes, num_readers=num_readers[dist.get_rank()]
        )
        return [
            msgspec.msgpack.decode(data, type=list[str])
            for data in gather_bytes(msgspec.msgpack.encode(mine))
        ]

    @property
    def staged(self) -> Tensor:
        """The last bucket on this rank, uint8 [bytes]."""
        assert self._staging is not None
        return self._staging.content

    def end_staging(self) -> None:
        """Readers are done with what was staged."""
        if self._staging is not None:
            self._staging.end()

    def save_version(self, policy_version: int) -> None:
        """Write the policy as a version that servers hold while the run goes on."""
        folder = version_folder(self._run_dir, policy_version)
        self.exports.save(folder, source=self._settings.model.path)

    def save_folder(self) -> None:
        """Write the policy as the run's Hugging Face folder."""
        self.exports.save(self._run_dir / "hf", source=self._settings.model.path)
