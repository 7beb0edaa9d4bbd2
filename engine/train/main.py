"""The trainer process, from a run's settings to its end.

Settings that cannot work are refused before the process group is formed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import structlog
import torch

from outloop.buffer.errors import BufferUnavailable, PartFailed, RankKilled, SettingsError
from outloop.buffer.reader import BufferReader
from outloop.buffer.run import Run, create_run
from outloop.buffer.settings import Settings
from outloop.buffer.settings.buffer import beyond_age
from outloop.buffer.settings.recipes import recipe_sentence
from outloop.buffer.telemetry import MetricsWriter
from outloop.engine.publish.buckets.staging import start_memory_manager
from outloop.engine.publish.publisher import Publisher as TransactionalPublisher
from outloop.engine.train.algorithms.credit import VALUE_ADVANTAGES
from outloop.engine.train.algorithms.user_functions import check_custom
from outloop.engine.train.checkpoint.checkpoint_format import (
    check_critic,
    check_model,
    latest_checkpoint,
)
from outloop.engine.train.debug.recorded_groups import NoServers, Recording, read_groups
from outloop.engine.train.debug.replay_run import RecordedSteps
from outloop.engine.train.interfaces import LeaseRenewer, Publisher, Reader
from outloop.engine.train.loop import RlLoop
from outloop.engine.train.megatron import model_and_optimizer
from outloop.engine.train.megatron.device import (
    device_of,
    gpu_number,
    limit_connections,
    set_precision,
)
from outloop.engine.train.megatron.layer_kind import layers_of
from outloop.engine.train.megatron.parallel_config import check_world
from outloop.engine.train.ranks.controller import RankController, follow
from outloop.engine.train.ranks.rank_worker import RankWorker
from outloop.engine.train.ranks.watchdog import Watchdog, as_killed
from outloop.engine.train.reward_model import run_reward_model
from outloop.engine.train.sft import run_sft
from outloop.engine.train.step.critic_update import describe_critic
from outloop.engine.train.step.reference_model import read_reference_config
from outloop.engine.train.step.teacher import read_teacher_config
from outloop.engine.train.step.teacher_endpoint import TeacherEndpoint

_log = structlog.get_logger()


def train(
    run: Run, *, stop: threading.Event, on_hang: Callable[[PartFailed], None] | None = None
) -> None:
    """Train until the last step or until `stop` is set; then the process may end.

    A run that makes its last step is left in state finished, one that fails in state failed. A
    stopped run keeps its state, for the next start to resume, and so does one that lost a rank,
    its Redis, or got no more memory. Of several ranks rank 0 leads, and the others follow it until
    it ends.

    Args:
        on_hang: gets the error when there was no progress for trainer.hang_timeout_s, or
            `RankKilled` when a thread got no memory to begin; called in a thread of its own, it
            may end the process.

    Raises:
        RankKilled: a rank was lost, or the system gave this one no more memory.
    """
    limit_connections(run.settings.trainer)
    check_settings(run.settings)
    torch.set_num_threads(run.settings.trainer.num_threads)
    with ExitStack() as stack:
        if int(os.environ.get("RANK", "0")):
            follow(*join_ranks(run, stack, on_hang))
            return
        reader = BufferReader.connect_patiently(run, is_stopping=stop.is_set)
        leases = BufferReader.connect_patiently(run, is_stopping=stop.is_set)
        stack.callback(reader.close)
        stack.callback(leases.close)

        def publisher() -> Publisher:
            def warn(sentence: str) -> None:
                reader.registry.report_status("publisher", {"warning": sentence})

            made = TransactionalPublisher(run, reader.registry, on_warning=warn)
            stack.callback(made.close)
            return made

        try:
            _lead(run, reader, leases, publisher, stop, stack, on_hang=on_hang)
        except Exception as error:
            _log.exception("trainer_failed")
            failure = as_killed(error, rank=0, phase="between the phases")
            if not isinstance(failure, RankKilled | BufferUnavailable):
                reader.set_run_state("failed")
            if failure is error:
                raise
            raise failure from error


def train_from_recording(run: Run, path: Path, *, stop: threading.Event) -> None:
    """Train on the groups of a file of `outloop buffer export`, without buffer or servers.

    Ends, with a checkpoint, after the last step or the last group.

    Raises:
        RecordError: the file holds lines that are no trajectories, or no training episode.
    """
    check_settings(run.settings)
    torch.set_num_threads(run.settings.trainer.num_threads)
    groups = read_groups(path)
    with ExitStack() as stack:
        recording = Recording(groups, stop)
        _lead(run, recording, recording, NoServers, stop, stack)


def train_recorded_steps(
    settings: Settings, folder: Path, steps: RecordedSteps, stop: threading.Event
) -> None:
    """Train recorded steps in a run folder, on this process alone; see `replay_run`."""
    run = create_run(settings, folder, "")
    check_settings(settings)
    torch.set_num_threads(settings.trainer.num_threads)
    with ExitStack() as stack:
        _lead(run, steps, steps, NoServers, stop, stack)


def join_ranks(
    run: Run,
    stack: ExitStack,
    on_hang: Callable[[PartFailed], None] | None = None,
    *,
    join_group: Callable[..., None] = model_and_optimizer.join_process_group,
    make_worker: Callable[..., RankWorker] = RankWorker,
) -> tuple[RankWorker, Watchdog]:
    """This rank's models and its watchdog, once it is among the others.

    Files that do not belong to the model are refused before `join_group` is called.

    Args:
        stack: leaves the group and ends both.
        on_hang: see `train`.
        make_worker: called with what `RankWorker` takes.

    Raises:
        SettingsError: what `train` would refuse before any rank waits for another.
    """
    settings = run.settings
    trainer = settings.trainer
    config = model_and_optimizer.read_config(
        settings.model.path,
        trainer.megatron,
        num_ranks=trainer.num_ranks,
        layers=layers_of(trainer),
        dtype=trainer.dtype,
    )
    _log.info("trainer_model", device=device_of(trainer), dtype=trainer.dtype, layers=config.layers)
    _check_files(run, config)
    if trainer.num_ranks > 1 and run.settings.publish.transport == "shared_memory":
        start_memory_manager()
    join_group(
        seed=settings.run.seed,
        sizes=config.sizes,
        timeout_s=trainer.rank_timeout_s,
        gpu=gpu_number(device_of(trainer)),
    )
    stack.callback(model_and_optimizer.leave_process_group)
    watchdog = Watchdog(
        run.dir / "progress",
        rank=int(os.environ.get("RANK", "0")),
        num_ranks=trainer.num_ranks,
        hang_timeout_s=trainer.hang_timeout_s,
        store=model_and_optimizer.rendezvous_store(),
        beat_s=min(1.0, trainer.rank_timeout_s / 20.0),
        on_hang=on_hang,
    )
    stack.callback(watchdog.close)
    worker = make_worker(run, config, watchdog)
    stack.callback(worker.close)
    return worker, watchdog


def _check_files(run: Run, config: model_and_optimizer.PolicyConfig) -> None:
    """Refuse, before a process group is formed, files that do not belong to this model.

    Every rank finds the same error on its own.

    Raises:
        SettingsError: the reference has another vocabulary, or the checkpoint that the run would
            go on from is of another model or release.
    """
    trainer = run.settings.trainer
    if trainer.kl != "none":
        read_reference_config(run.settings, config)
    if trainer.teacher is not None and trainer.teacher.path is not None:
        read_teacher_config(run.settings, config)
    critic = None
    if trainer.mode == "rl" and trainer.advantage in VALUE_ADVANTAGES:
        critic = describe_critic(run.settings, config)
    if trainer.resume and trainer.mode == "rl":
        found = latest_checkpoint(run.dir / "checkpoints")
        if found is not None:
            check_model(found, config)
            if critic is not None:
                check_critic(found, critic)


def _lead(
    run: Run,
    reader: Reader,
    leases: LeaseRenewer,
    publisher: Callable[[], Publisher],
    stop: threading.Event,
    stack: ExitStack,
    *,
    on_hang: Callable[[PartFailed], None] | None = None,
) -> None:
    """Rank 0: everything that is not the model."""
    settings = run.settings
    _log_recipe(settings)
    worker, watchdog = join_ranks(run, stack, on_hang)
    ranks = RankController(
        worker,
        watchdog,
        num_ranks=settings.trainer.num_ranks,
        timeout_s=settings.trainer.rank_timeout_s,
    )
    stack.enter_context(ranks.ending())
    metrics = MetricsWriter(
        run.dir,
        max_full_s=settings.buffer.outage_s,
        on_full=lambda sentence: reader.registry.report_status("trainer", {"warning": sentence}),
    )
    stack.callback(metrics.close)
    if settings.trainer.mode == "sft":
        train_supervised = run_sft if settings.trainer.reward_model is None else run_reward_model
        train_supervised(run, ranks, reader=reader, metrics=metrics, stop=stop)
        return
    num_updates = settings.trainer.num_updates
    publishing = publisher()
    if settings.trainer.is_colocated:
        _take_devices(publishing, ranks, reader)
    ranks.run(RankWorker.build, num_updates=num_updates)
    teacher = None
    if settings.trainer.teacher is not None and settings.trainer.teacher.urls:
        teacher = TeacherEndpoint(
            settings.trainer.teacher, vocab_size=ranks.config.vocab_size, stop=stop
        )
        stack.callback(teacher.close)
    RlLoop(
        run,
        ranks,
        reader=reader,
        leases=leases,
        publisher=publishing,
        metrics=metrics,
        stop=stop,
        teacher=teacher,
    ).run()


def _take_devices(publisher: Publisher, ranks: RankController, reader: Reader) -> None:
    """Before anything is built on devices that servers share: these start first, since what they
    take depends on what is free then, and give up what they took."""

    def wait(sentence: str) -> None:
        reader.registry.report_status("trainer", {"waiting_for": sentence})
        ranks.idle()

    publisher.wait_for_servers(wait)
    publisher.take_devices(on_wait=wait)


def _log_recipe(settings: Settings) -> None:
    trainer, buffer = settings.trainer, settings.buffer
    if recipe := recipe_sentence(dict(trainer), dict(buffer)):
        _log.info("recipe", sentence=recipe)
    if sentence := beyond_age(buffer.pipeline_depth, buffer.max_staleness):
        _log.warning("depth_beyond_age", sentence=sentence)
    if trainer.kl != "none" and buffer.drop_zero_signal:
        _log.warning(
            "kl_without_equal_groups",
            sentence=f'trainer.kl="{trainer.kl}" with buffer.drop_zero_signal=true pulls on tasks '
            "with different rewards only: what is always solved, or never, may drift. Set "
            "buffer.drop_zero_signal = false to hold it.",
        )


def check_settings(settings: Settings) -> None:
    """Refuse what this trainer cannot do.

    Raises:
        SettingsError: with the sentence that says what to change.
    """
    trainer = settings.trainer
    check_world(trainer.num_ranks)
    if trainer.num_ranks > 1 and trainer.rank_timeout_s <= settings.server.start_timeout_s:
        raise SettingsError(
            f"trainer.rank_timeout_s={trainer.rank_timeout_s} does not exceed "
            f"server.start_timeout_s={settings.server.start_timeout_s}: the other ranks would give "
            "up while rank 0 waits for servers. Raise the first or lower the second."
        )
    if trainer.num_ranks > 1 and trainer.rank_timeout_s <= settings.publish.phase_timeout_s:
        raise SettingsError(
            f"trainer.rank_timeout_s={trainer.rank_timeout_s} does not exceed "
            f"publish.phase_timeout_s={settings.publish.phase_timeout_s}: the other ranks would "
            "give up while one of them waits for servers. Raise the first or lower the second."
        )
    set_precision(device_of(trainer))
    if trainer.mode == "rl" and settings.model.max_context_tokens > trainer.max_microbatch_tokens:
        raise SettingsError(
            f"model.max_context_tokens={settings.model.max_context_tokens} exceeds "
            f"trainer.max_microbatch_tokens={trainer.max_microbatch_tokens}: an episode could not "
            "be trained. Raise the second or lower the first."
        )
    check_custom(settings)
