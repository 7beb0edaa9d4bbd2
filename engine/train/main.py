"""The trainer process.

Owns: building the trainer from a run's settings, and its boundary to the launcher. Does not own:
training itself (loop, sft). Invariant: what settings alone can show to be wrong is refused before
the process group is formed.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack

import structlog
import torch

from outloop.buffer.errors import SettingsError
from outloop.buffer.reader import BufferReader
from outloop.buffer.run import Run
from outloop.buffer.settings import Settings
from outloop.buffer.telemetry import MetricsWriter
from outloop.engine.publish.transaction import Publisher
from outloop.engine.train import mcore
from outloop.engine.train.custom import check_custom
from outloop.engine.train.loop import RlLoop
from outloop.engine.train.sft import run_sft
from outloop.engine.train.weights import load_huggingface

_log = structlog.get_logger()


def train(run: Run, *, stop: threading.Event) -> None:
    """Train until the last step or until `stop` is set; then the process may end.

    A run that ends by itself is left in state finished, one that fails in state failed; a stopped
    one keeps its state, for the next start to resume.
    """
    check_settings(run.settings)
    torch.set_num_threads(run.settings.trainer.num_threads)
    with ExitStack() as stack:
        reader = BufferReader.connect(run)
        stack.callback(reader.close)
        try:
            _train(run, reader, stop, stack)
        except Exception:
            _log.exception("trainer_failed")
            reader.set_run_state("failed")
            raise


def _train(run: Run, reader: BufferReader, stop: threading.Event, stack: ExitStack) -> None:
    settings = run.settings
    config = mcore.read_config(settings.model.path, settings.trainer.megatron)
    mcore.join_process_group(seed=settings.run.seed)
    stack.callback(mcore.leave_process_group)
    metrics = MetricsWriter(run.dir, tensorboard=settings.telemetry.tensorboard)
    stack.callback(metrics.close)

    def build(num_updates: int) -> mcore.Policy:
        policy = mcore.build_policy(config, settings.trainer, num_updates=num_updates)
        load_huggingface(policy.model, settings.model.path)
        return policy

    if settings.trainer.mode == "sft":
        run_sft(
            run,
            vocab_size=config.vocab_size,
            build=build,
            reader=reader,
            metrics=metrics,
            stop=stop,
        )
        return
    publisher = Publisher(run, reader)
    stack.callback(publisher.close)
    RlLoop(
        run,
        build(settings.trainer.num_steps * settings.trainer.num_updates_per_take),
        reader=reader,
        publisher=publisher,
        metrics=metrics,
        stop=stop,
    ).run()


def check_settings(settings: Settings) -> None:
    """Refuse what this trainer cannot do.

    Raises:
        SettingsError: with the sentence that says what to change.
    """
    trainer = settings.trainer
    if trainer.num_ranks != 1:
        raise SettingsError(
            f"trainer.num_ranks={trainer.num_ranks}; 1 is allowed in this release. Set it to 1."
        )
    if trainer.device.startswith("cuda") != torch.cuda.is_available():
        there = "cuda" if torch.cuda.is_available() else "cpu"
        raise SettingsError(
            f"trainer.device={trainer.device!r} on a machine where torch offers {there!r}; "
            f'set trainer.device = "{there}"'
        )
    if trainer.mode == "rl" and settings.model.max_context_tokens > trainer.max_microbatch_tokens:
        raise SettingsError(
            f"model.max_context_tokens={settings.model.max_context_tokens} exceeds "
            f"trainer.max_microbatch_tokens={trainer.max_microbatch_tokens}: an episode could not "
            "be trained. Raise the second or lower the first."
        )
    check_custom(settings)
