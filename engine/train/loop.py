"""The RL loop: the order of a step.

A version is announced before it is published and acknowledged before anything is admitted under it.
A group is acknowledged only by a checkpoint that contains its update. One loop serves every
max_staleness: at 0 a step waits for its publish, above it the next step begins beside it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from outloop.buffer.errors import UpdateRefused
from outloop.buffer.records import Group, Lease
from outloop.buffer.run import Run
from outloop.buffer.telemetry import MetricsWriter
from outloop.buffer.trajectories.steps import StepRecord, UpdateResult, write_step
from outloop.buffer.trajectories.trained import keeps_trajectories, write_trained
from outloop.engine.models.kept_versions import remove_from, remove_needless
from outloop.engine.train.checkpoint.acknowledgement import Acknowledgements
from outloop.engine.train.checkpoint.best_checkpoint import BestCheckpoint
from outloop.engine.train.checkpoint.checkpoint_format import latest_checkpoint
from outloop.engine.train.curriculum import Curriculum
from outloop.engine.train.data.batch_builder import Batch, build_batch, group_rewards
from outloop.engine.train.data.teacher_context import TeacherContexts
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.evaluation import Evaluations
from outloop.engine.train.interfaces import LeaseRenewer, Publisher, Reader
from outloop.engine.train.no_signal import SignalWatch
from outloop.engine.train.publishing import Publishing, PublishingBeside, PublishingWithin
from outloop.engine.train.ranks.controller import RankController
from outloop.engine.train.ranks.copied_weights import CopiedWeights
from outloop.engine.train.ranks.rank_worker import RankWorker
from outloop.engine.train.step.teacher_endpoint import TeacherEndpoint
from outloop.engine.train.step.update_metrics import (
    UpdateReport,
    policy_logprobs,
    step_metrics,
)

_RECORDED_STATS = (
    "buffer/dropped_groups",
    "buffer/replaced_attempts",
    "buffer/dropped/",
    "buffer/ledger/",
    "buffer/length/",
    "buffer/depth/",
    "buffer/wait/",
    "buffer/pipeline_depth",
    "buffer/live_groups",
    "buffer/discarded_time_share",
)
"""Entries of the buffer's stats() in a step's row, by what their names begin with."""
_MAX_REFILLS_OF_LOST = 8
_MIN_ENDED_ATTEMPTS = 200
"""With fewer, lengths are not compared."""
_LENGTH_RATIO = 0.9
_MAX_SCORE = 3.0
"""Standard errors by which slow episodes may be lost more often before a warning."""
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Step:
    """A step whose weights are on their way to the servers."""

    number: int
    policy_version: int
    batch: Batch
    reports: Sequence[UpdateReport]
    times: Mapping[str, float]


class RlLoop:
    """A run's training from its first step, or its last checkpoint, to its end."""

    def __init__(
        self,
        run: Run,
        ranks: RankController,
        *,
        reader: Reader,
        leases: LeaseRenewer,
        publisher: Publisher,
        metrics: MetricsWriter,
        stop: threading.Event,
        teacher: TeacherEndpoint | None = None,
    ) -> None:
        """`leases`: used by a thread of its own; a connection that `reader` does not use. Devices
        that servers share are the trainer's when the loop begins. `teacher`: one that is served
        elsewhere, trainer.teacher.urls."""
        asked = run.settings.trainer.teacher
        has_context = asked is not None and asked.context_key is not None
        self._teacher = teacher
        self._contexts = TeacherContexts(run.settings) if has_context else None
        self._settings = run.settings
        self._is_colocated = run.settings.trainer.is_colocated
        self._run = run
        self._run_dir = run.dir
        self._keeps_trajectories = keeps_trajectories(run.settings.trajectories)
        self._ranks = ranks
        self._reader = reader
        self._publisher = publisher
        self._metrics = metrics
        self._stop = stop
        self._status: dict[str, str] = {}
        self._publishing = self._publishing_of(publisher)
        self._unrecorded: _Step | None = None
        """The step made last, until its weights are published."""
        self._fence = fence = reader.acquire_fence()
        ranks.watchdog.renew_leases(
            lambda: leases.renew(fence), every_s=run.settings.buffer.lease_s / 4.0
        )
        self._acknowledgements = Acknowledgements(
            ranks,
            reader,
            timeout_s=run.settings.trainer.hang_timeout_s,
            on_wait=self._wait,
            on_failure=self._save_failed,
        )
        self._evaluations = Evaluations(
            reader, run.settings, metrics, run_dir=run.dir, stop=stop, beat=self._wait
        )
        self._curriculum = Curriculum(run.settings, reader)
        self._best = BestCheckpoint(run.dir) if run.settings.eval.chooses_checkpoint else None
        self._step = 0
        self._version = -1
        self._next_slot = 0
        self._saved_step = -1
        """The step of the last checkpoint, written or resumed from."""
        self._dropped: set[str] = set()
        """Groups of this step that were given up already."""
        self._takes: list[list[str]] = []
        """Groups of this step's takes."""
        self._depths: dict[int, int] = {}
        """Of the versions in them; see `_staleness_in`."""
        self._updated_version = -1
        """That the weights had before this step's updates."""
        self._max_age: int | None = None
        """How old tokens of this step may be."""
        self._filtered: dict[str, str] = {}
        """The answer of the user's filter for each group of this step."""
        self._signal = SignalWatch(run.settings, run.dir)
        self._low_reward = run.settings.env.failure_reward
        """The next warning of rewards below that of failing is of one below this."""
        self._reference_hash = ""
        """Content hash of the reference that the run is pinned to; empty until one is used."""

    def run(self) -> None:
        """Train to the last step, or until stopped; a stop leaves a checkpoint behind."""
        with closing(self._publishing):
            self._run_steps()

    def _run_steps(self) -> None:
        self._resume()
        ended_at = time.monotonic()
        while self._step < self._settings.trainer.num_steps and not self._stop.is_set():
            self._dropped.clear()
            self._filtered.clear()
            self._takes.clear()
            leases = self._take(self._settings.trainer.groups_per_step)
            if self._stop.is_set():
                break
            taken_at = time.monotonic()
            batch = self._refill(leases, self._build(leases))
            self._warn_without_signal(batch, leases)
            batch.metrics.update(
                self._curriculum.follow([lease.group for lease in leases], step=self._step + 1)
            )
            evaluation_s = self._evaluate()
            updating_at = time.monotonic()
            self._take_devices()
            reports = self._update(batch)
            updated_at = time.monotonic()
            self._ranks.leave(keeps_weights=True)
            self._finish_publish()
            self._publish(
                parent=self._version,
                policy_version=self._version + 1,
                settle=self._settlement_of(batch, reports),
            )
            if not self._goes_on_beside:
                self._publishing.finish()
            self._step += 1
            now = time.monotonic()
            times = {
                "train/step_s": now - ended_at,
                "train/wait_s": taken_at - ended_at,
                "train/update_s": updated_at - updating_at,
                "train/evaluation_wait_s": evaluation_s,
                "train/publish_wait_s": now - updated_at,
            }
            self._unrecorded = _Step(self._step, self._version, batch, reports, times)
            self._record_published()
            self._acknowledgements.collect()
            if self._is_checkpoint_due():
                self._finish_publish()
                self._checkpoint()
            ended_at = now
        self._finish()

    @property
    def _goes_on_beside(self) -> bool:
        """Whether the next step may begin before servers hold this one's weights."""
        return isinstance(self._publishing, PublishingBeside)

    def _publishing_of(self, publisher: Publisher) -> Publishing:
        """Beside training if something else is in flight then, and servers have devices of their
        own; otherwise there is nothing to do but wait, and no copy is needed."""
        settings, ranks, registry = self._settings, self._ranks, self._reader.registry
        is_ahead = settings.buffer.max_staleness > 0 and settings.buffer.pipeline_depth != 0
        if self._is_colocated or not (is_ahead and settings.publish.overlaps_training):
            take = partial(self._take_devices, weights_only=True)
            return PublishingWithin(ranks, registry, publisher, self._wait_for_servers, take)
        copy = CopiedWeights(ranks, is_probed=settings.verification == "probe")
        return PublishingBeside(ranks, registry, publisher, self._wait_for_servers, copy=copy)

    def _resume(self) -> None:
        """Start from the latest checkpoint or the model folder, and make its weights served."""
        checkpoint = None
        if self._settings.trainer.resume:
            checkpoint = latest_checkpoint(self._run_dir / "checkpoints")
        mark = checkpoint.mark if checkpoint else None
        parent = None
        if checkpoint is not None and mark is not None:
            self._ranks.run(RankWorker.load, checkpoint)
            self._step = self._saved_step = checkpoint.step
            self._next_slot, parent = mark.next_slot, mark.policy_version
            if self._best is not None:
                self._best.forget_after(checkpoint.step)
            self._reference_hash = checkpoint.reference_hash
            _log.info("resumed", checkpoint=str(checkpoint.path), step=self._step)
        if self._settings.trainer.kl != "none":
            self._reference_hash = self._ranks.run(
                RankWorker.load_reference,
                pinned_hash=self._reference_hash,
                checkpoint=checkpoint,
            )
        teacher = self._settings.trainer.teacher
        if self._teacher is not None:
            self._teacher.check(self._settings)
        elif teacher is not None and teacher.path is not None:
            found = self._ranks.run(RankWorker.load_teacher)
            _log.info("teacher_loaded", path=str(teacher.path), content_hash=found)
        highest = self._reader.recover(mark, fence=self._fence)
        self._reader.set_steps_left(self._settings.trainer.num_steps - self._step)
        self._reader.set_run_state("running")
        self._ranks.leave(keeps_weights=True)
        remove_from(self._run_dir, highest + 1)
        self._publish(parent=parent, policy_version=highest + 1)
        self._publishing.finish()
        if checkpoint is None:
            self._evaluations.request(step=0, policy_version=self._version)

    def _refill(self, leases: list[Lease], batch: Batch) -> Batch:
        """Take other groups for those that were dropped; statistics cover all that was taken.

        Groups that were left out for their rewards are replaced buffer.max_refills times, those
        that could not be trained always.

        Raises:
            UpdateRefused: after many refills most of the groups still could not be trained.
        """
        wanted = self._settings.trainer.groups_per_step
        max_refills = self._settings.buffer.max_refills
        for refill in itertools.count():
            chosen = sum(why in ("no_signal", "filtered") for _, why in batch.dropped)
            num_lost = len(batch.dropped) - chosen
            missing = min(
                wanted - len(batch.group_ids) - (chosen if refill >= max_refills else 0),
                len(batch.dropped),
            )
            if missing <= 0 or self._stop.is_set():
                return batch
            if refill >= max(max_refills, _MAX_REFILLS_OF_LOST):
                self._warn_of_lost(batch, num_lost, missing)
                return batch
            # Their credit comes back with the next take; without it no others could be played.
            self._drop(batch)
            leases += self._take(missing)
            batch = self._build(leases)
        raise AssertionError("unreachable")

    def _warn_of_lost(self, batch: Batch, num_lost: int, missing: int) -> None:
        reasons = Counter(why for _, why in batch.dropped)
        wanted = self._settings.trainer.groups_per_step
        sentence = (
            f"{missing} of {wanted} groups of step {self._step + 1} are missing: {num_lost} that "
            f"were taken could not be trained ({dict(reasons)})"
        )
        if missing > wanted // 2:
            raise UpdateRefused(
                f"{sentence}. stale: lower buffer.pipeline_depth or raise buffer.max_staleness; "
                "malformed: see `outloop buffer dead list`; overlong: raise "
                "trainer.max_microbatch_tokens"
            )
        _log.warning("groups_missing", sentence=sentence)
        self._report(warning=sentence)

    def _take(self, num_groups: int) -> list[Lease]:
        """The next groups, oldest slots first."""

        def should_stop() -> bool:
            return self._stop.is_set()

        settings = self._settings.trainer
        self._ranks.watchdog.progress("take")
        leases = self._reader.take(
            num_groups,
            fence=self._fence,
            policy_version=self._version,
            timeout_s=settings.take_timeout_s,
            on_wait=self._wait,
            should_stop=should_stop,
        )
        self._takes.append([lease.group.group_id for lease in leases])
        return leases

    def _evaluate(self) -> float:
        """Record the evaluations that are complete, and those of these weights that must be before
        they change; the seconds."""
        began_at = time.monotonic()
        self._ranks.watchdog.progress("evaluation")
        if self._evaluations.blocks_training(self._step):
            # The publish requests it.
            self._finish_publish()
            self._collect()
        else:
            self._evaluations.collect_done()
        return time.monotonic() - began_at

    def _take_devices(self, *, weights_only: bool = False) -> None:
        """Have the trainer's tensors on its devices: servers that share them give them up. With
        `weights_only` these keep the weights that they serve.

        Raises:
            DeadlineExceeded, PublishFailed: a server holds on to them.
        """
        if not self._is_colocated:
            return
        self._ranks.watchdog.progress("take devices")
        self._publisher.take_devices(keeps_weights=weights_only, on_wait=self._wait_for_servers)
        self._ranks.come_back(weights_only=weights_only)

    def _wait(self, sentence: str) -> None:
        """Report what is awaited, and look after what goes on meanwhile."""
        self._report(sentence)
        self._ranks.idle()
        self._acknowledgements.collect()
        self._publishing.look_after_servers()
        self._record_published()

    def _report(self, waiting_for: str = "", **fields: str) -> None:
        """Report what the trainer is doing, if it changed."""
        changed = self._status | fields | {"waiting_for": waiting_for}
        if changed != self._status:
            if _without_numbers(waiting_for) != _without_numbers(
                self._status.get("waiting_for", "")
            ):
                changed["since"] = f"{time.time():.1f}"
            self._status = changed
            self._reader.registry.report_status("trainer", changed)

    def _build(self, leases: list[Lease]) -> Batch:
        self._max_age = max((x.max_age for x in leases if x.max_age is not None), default=None)
        batch = build_batch(
            [lease.group for lease in leases],
            self._settings,
            policy_version=self._version,
            vocab_size=self._ranks.config.vocab_size,
            staleness_of=self._staleness_in(leases),
            max_age=self._max_age,
            filtered=self._filtered,
            context_of=None if self._contexts is None else self._contexts.ids_of,
        )
        self._warn_of_failure_reward([lease.group for lease in leases])
        reward = f"{batch.metrics['train/reward_mean']:.3f}"
        self._report(step=str(self._step + 1), reward=reward)
        slots = [lease.group.slot for lease in leases]
        self._next_slot = max([self._next_slot, *(slot + 1 for slot in slots)])
        return batch

    def _staleness_in(self, leases: Sequence[Lease]) -> Callable[[int], int]:
        """How many publishes ago a version in `leases` was trained.

        After a resume that is less than the difference of the numbers: the checkpoint's weights are
        published again under a new number.
        """
        versions = {
            span.policy_version
            for lease in leases
            for trajectory in lease.group.trajectories
            for turn in trajectory.turns
            for span in turn.version_spans
        }
        current = self._version
        depths = self._reader.version_depths(versions | {current})
        self._depths = depths

        def staleness_of(version: int) -> int:
            return depths.get(current, current) - depths.get(version, version)

        return staleness_of

    def _update(self, batch: Batch) -> list[UpdateReport]:
        """The step's optimizer updates, made by all ranks from one broadcast."""
        self._ranks.watchdog.progress("update")
        self._updated_version = self._version
        updates = batch.updates(
            self._settings.trainer.num_updates_per_take,
            num_epochs=self._settings.trainer.num_epochs_per_take,
            seed=self._step,
        )
        reports, metrics = self._ranks.run(
            RankWorker.train_step,
            self._taught(batch) if updates else batch.rows,
            updates,
            credit=batch.credit,
            contexts=dict(batch.contexts),
            step=self._step + 1,
            policy_version=self._version,
        )
        batch.metrics.update(metrics)
        return reports

    def _taught(self, batch: Batch) -> TrainBatch:
        """The rows, with the scores of a teacher that is served elsewhere.

        Raises:
            UpdateRefused: it did not score them, or the policy would be its own teacher.
        """
        teacher = self._settings.trainer.teacher
        if self._teacher is not None:
            began_at = time.monotonic()
            columns = self._teacher.columns(batch.rows, batch.contexts, on_wait=self._wait)
            batch.metrics["train/teacher_wait_s"] = time.monotonic() - began_at
            self._report()
            return batch.rows.with_columns(**columns)
        if teacher is not None and teacher.path is None and not batch.contexts:
            raise UpdateRefused(
                f"no episode of step {self._step + 1} has a text under trainer.teacher.context_key="
                f"{teacher.context_key!r}: the policy would be its own teacher and learn nothing. "
                "Give tasks that field, or set trainer.teacher.path"
            )
        return batch.rows

    def _publish(
        self,
        *,
        parent: int | None,
        policy_version: int,
        settle: Callable[[int], None] | None = None,
    ) -> None:
        """Begin to make the weights available as `policy_version` on every server.

        Args:
            settle: what follows at once when they hold it; gets `policy_version`.
        """
        self._ranks.watchdog.progress("publish")
        self._report(f"servers to load version {policy_version}")

        def published() -> None:
            self._reader.acknowledge_version(policy_version)
            if settle is not None:
                settle(policy_version)

        self._reader.announce_version(policy_version, parent)
        self._keep(policy_version)
        self._publishing.begin(policy_version, published)
        self._version = policy_version
        self._report()

    def _keep(self, policy_version: int) -> None:
        """Write the weights down, where servers are to hold this version for longer."""
        server = self._settings.server
        if server.keeps(policy_version):
            self._ranks.run(RankWorker.save_version, policy_version)
            remove_needless(server, self._run_dir)

    def _finish_publish(self) -> None:
        """Wait until servers hold the version begun last."""
        self._ranks.watchdog.progress("publish")
        if self._publishing.report() is None:
            self._report(f"servers to load version {self._version}")
        self._publishing.finish()
        self._record_published()

    def _wait_for_servers(self, sentence: str) -> None:
        """Report progress: a publish that waits is not a hang, and the other ranks wait with it."""
        self._report(sentence)
        self._ranks.idle()

    def _drop(self, batch: Batch) -> None:
        for group_id, reason in batch.dropped:
            if group_id not in self._dropped:
                why = batch.sentences.get(group_id, "")
                self._reader.drop(group_id, reason, fence=self._fence, error=why)
                self._dropped.add(group_id)

    def _settlement_of(
        self, batch: Batch, reports: Sequence[UpdateReport]
    ) -> Callable[[int], None]:
        """What follows when servers hold the weights that `batch` made, as it is now.

        Admission credit returns; earlier, episodes would start under the old version.
        """
        self._drop(batch)
        fence, step, record = self._fence, self._step + 1, self._step_record(reports)

        def settle(policy_version: int) -> None:
            self._reader.set_steps_left(self._settings.trainer.num_steps - step)
            self._reader.mark_trained(batch.group_ids, fence=fence, policy_version=policy_version)
            self._evaluations.request(step=step, policy_version=policy_version)
            self._keep_step(batch, reports, record, policy_version)

        return settle

    def _step_record(self, reports: Sequence[UpdateReport]) -> StepRecord:
        """What it takes to make this step again."""
        return StepRecord(
            step=self._step + 1,
            policy_version=self._updated_version,
            takes=[list(take) for take in self._takes],
            depths=dict(self._depths),
            max_age=self._max_age,
            num_ranks=self._settings.trainer.num_ranks,
            updates=[
                UpdateResult(
                    loss=report.loss,
                    grad_norm=report.grad_norm,
                    gradient_hash=report.gradient_hash,
                )
                for report in reports
            ],
        )

    def _keep_step(
        self,
        batch: Batch,
        reports: Sequence[UpdateReport],
        record: StepRecord,
        policy_version: int,
    ) -> None:
        """For who looks at the tokens later, or makes the step again; training goes on without."""
        if not self._keeps_trajectories:
            return
        rows = batch.rows
        try:
            write_trained(
                self._run_dir,
                policy_version,
                episode_ids=rows.episode_ids,
                branches=rows.branches,
                starts=rows.starts.tolist(),
                trained=rows.loss_mask,
                advantages=rows.advantages,
                policy_logprobs=policy_logprobs(reports, len(rows.token_ids)),
            )
            write_step(self._run_dir, record)
        except OSError as error:
            _log.warning("step_not_kept", policy_version=policy_version, reason=str(error))

    def _is_checkpoint_due(self) -> bool:
        every = self._settings.trainer.checkpoint_every
        is_last = self._step == self._settings.trainer.num_steps
        is_candidate = self._best is not None and self._evaluations.is_due(self._step)
        return not is_last and (is_candidate or (every > 0 and self._step % every == 0))

    def _checkpoint(self) -> None:
        """Begin to write what the weights contain; it is acknowledged when it is on disk."""
        # A wait may load weights into servers, which takes the devices too.
        self._acknowledgements.wait()
        self._ranks.watchdog.progress("checkpoint")
        with self._devices():
            self._acknowledgements.begin(
                step=self._step,
                fence=self._fence,
                next_slot=self._next_slot,
                policy_version=self._version,
                reference_hash=self._reference_hash,
            )
        self._saved_step = self._step
        if not self._settings.trainer.trains_while_saving:
            self._acknowledgements.wait()

    @contextmanager
    def _devices(self) -> Iterator[None]:
        """Have everything on the devices within the block, while servers sleep on their weights."""
        if not self._is_colocated:
            yield
            return
        self._publisher.take_devices(keeps_weights=True, on_wait=self._wait_for_servers)
        self._ranks.come_back()
        yield
        self._publisher.give_devices(self._ranks)

    def _save_failed(self, sentence: str) -> None:
        self._saved_step = -1
        self._report(warning=sentence)

    def _finish(self) -> None:
        """Leave a checkpoint; at the end of the run also the last evaluation and the HF folder."""
        self._finish_publish()
        is_done = self._step >= self._settings.trainer.num_steps
        self._acknowledgements.wait()
        # Written again, a checkpoint that was resumed from would forget which groups it contains.
        if self._step > 0 and self._saved_step != self._step:
            self._checkpoint()
        self._acknowledgements.wait(is_last=True)
        if is_done:
            self._collect()
        if is_done and not self._stop.is_set():
            self._go_to_best()
            with self._devices():
                self._ranks.run(RankWorker.save_folder)
            self._reader.set_run_state("finished")
        self._report()

    def _collect(self) -> None:
        """Record the evaluation under way; the checkpoint of its step may be the best so far."""
        found = self._evaluations.collect()
        if found is not None and self._best is not None and found[0] > 0:
            self._acknowledgements.wait()
            self._best.offer(*found)

    def _go_to_best(self) -> None:
        """End with the weights that were best on validation, and evaluate the test split once."""
        best = self._best.best if self._best is not None else None
        if self._best is None or best is None:
            return
        if best.step != self._step:
            self._take_devices()
            self._ranks.run(RankWorker.load, best)
            self._ranks.leave(keeps_weights=True)
            parent = best.mark.policy_version
            self._publish(parent=parent, policy_version=self._version + 1)
            self._publishing.finish()
        if not self._best.is_reported:
            self._evaluations.request_test(step=best.step, policy_version=self._version)
            if self._evaluations.collect() is not None:
                self._best.mark_reported()

    def _warn_of_failure_reward(self, groups: Sequence[Group]) -> None:
        """An agent that fails must not do better than one that is wrong. Said once, and again when
        failing pays twice as much."""
        failed = self._settings.env.failure_reward
        lowest = min(itertools.chain.from_iterable(map(group_rewards, groups)), default=failed)
        if lowest >= self._low_reward:
            return
        self._low_reward = 2 * lowest - failed
        _log.warning(
            "failure_reward_too_high",
            sentence=f"an episode was scored {lowest:g}, less than env.failure_reward={failed:g}, "
            "which an agent gets that crashes or hangs: failing pays. Set env.failure_reward to "
            "the lowest reward that the verifier can give.",
        )

    def _warn_without_signal(self, batch: Batch, leases: Sequence[Lease]) -> None:
        sentence = self._signal.look(batch, [lease.group for lease in leases])
        if sentence:
            _log.warning("no_signal", sentence=sentence)
            self._report(warning=sentence)

    def _record_published(self) -> None:
        """Write the row of the step made last once its weights are published.

        Before its checkpoint: what a checkpoint contains has its row, whatever ends the run.
        """
        published, step = self._publishing.report(), self._unrecorded
        if published is None or step is None:
            return
        self._unrecorded = None
        self._acknowledgements.add(step.batch.group_ids)
        stats = self._reader.stats()
        row: dict[str, Any] = {**step.batch.metrics, **step_metrics(step.reports), **step.times}
        num_tokens = sum(report.num_tokens for report in step.reports)
        row |= {
            "train/tokens_per_s": num_tokens / max(row["train/step_s"], 1e-9),
            "train/policy_version": step.policy_version,
            "publish/duration_s": published.duration_s,
            "publish/bytes": published.num_bytes,
            "publish/pause_s": published.pause_s,
            "publish/peak_extra_buckets": published.peak_extra_buckets,
            "publish/wrong_in_a_row": published.wrong_in_a_row,
        }
        row |= {name: value for name, value in stats.items() if name.startswith(_RECORDED_STATS)}
        row["train/groups"] = len(step.batch.group_ids)
        self._metrics.write(step.number, row)
        self._warn_of_short_episodes(stats)

    def _warn_of_short_episodes(self, stats: Mapping[str, float]) -> None:
        """Warn when slow episodes are lost more often than fast ones."""
        num_ended = stats.get("buffer/ledger/started", 0.0) - stats.get("buffer/ledger/open", 0.0)
        if num_ended < _MIN_ENDED_ATTEMPTS:
            return
        sentences = []
        share, score = (stats[f"buffer/length/slow_lost_{name}"] for name in ("share", "z"))
        if score > _MAX_SCORE and share > self._settings.env.max_replaced_share:
            sentences.append(
                f"{share:.1%} of the slow episodes that ended were not trained, more than of the "
                f"others by {score:.1f} standard errors"
            )
        for unit, what in (("s", "seconds"), ("tokens", "sampled tokens")):
            trained, ended = (
                stats[f"buffer/length/{name}_{unit}"] for name in ("trained", "ended")
            )
            if trained < _LENGTH_RATIO * ended:
                sentences.append(
                    "trained episodes are shorter than those that were played: "
                    f"{trained:.4g} {what} against {ended:.4g} on average"
                )
        if sentences:
            sentence = f"{'; '.join(sentences)}. `outloop buffer stats` says where they are lost."
            _log.warning("short_episodes", sentence=sentence)
            self._report(warning=sentence)


def _without_numbers(sentence: str) -> str:
    """A wait whose counts move on is still the same wait."""
    return "".join(character for character in sentence if not character.isdigit())
